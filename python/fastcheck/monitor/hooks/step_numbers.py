"""Reads the numbers of a session's steps: loss scale, learning rates, skipped updates."""

from __future__ import annotations

from numbers import Real
from typing import Any, Optional, Union

import torch

from fastcheck.monitor.session.session import Session
from fastcheck.record.site import Site
from fastcheck.utils.torch.own_operators import unobserved
from fastcheck.utils.torch.streams import streams_of


class StepNumbers:
    """Reads the numbers of a session's steps: loss scale, learning rates, skipped updates. Methods
    expect the session's lock to be held, and a step that is observed.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        # The tensor that was read last, which is the same in most steps.
        self._last: Optional[tuple[list[float], torch.Tensor]] = None
        # Sites by type and role.
        self._sites: dict[tuple[str, str], int] = {}

    def loss_scale(self, scale: Any) -> None:
        """The loss of this step is multiplied by ``scale``, a number or a tensor."""
        is_tensor = isinstance(scale, torch.Tensor)
        with unobserved():
            self._session.step.update.scale = scale.detach().clone() if is_tensor else float(scale)
        site = self._site("", "loss_scale", "loss scale")
        self._read(scale if is_tensor else [float(scale)], site)

    def found_inf(self, word: torch.Tensor) -> int:
        """Reads what a GradScaler has found in the gradients of one device; returns the number of
        its record.
        """
        return self._session.level.read_number(
            word, self._site("GradScaler", "found_inf", "found_inf")
        )

    def skipped(self, word: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        """A number on its device: 1.0 if the optimizer is about to skip its update, else 0.0."""
        site = self._site(type(optimizer).__name__, "skipped_update", "skipped update")
        self._session.level.read_number(word, site)

    def learning_rates(self, optimizer: torch.optim.Optimizer) -> None:
        """Reads the learning rates of the groups, as the optimizer is about to use them."""
        kind, role = type(optimizer).__name__, "learning_rate"
        site = self._sites.get((kind, role)) or self._site(kind, role, "lr")
        here: list[float] = []
        elsewhere: list[torch.Tensor] = []
        for group in optimizer.param_groups:
            rate = group.get("lr")
            if type(rate) is float:
                here.append(rate)
            elif isinstance(rate, torch.Tensor) and not rate.is_cpu:
                elsewhere.append(rate)
            elif isinstance(rate, (float, torch.Tensor, Real)):  # the ABC's own check is slow
                here.append(float(rate))
        if here:
            self._read(here, site)
        for rate in elsewhere:
            self._read(rate, site)

    def _site(self, kind: str, role: str, label: str) -> int:
        number = self._sites.get((kind, role))
        if number is None:
            site = Site("", kind, "optimizer", role, 0, label)
            number = self._sites[kind, role] = self._session.sites.intern(site)
        return number

    def _read(self, numbers: Union[list[float], torch.Tensor], site: int) -> None:
        if not self._session.level.reads_numbers:
            return
        if isinstance(numbers, list):
            if self._last is None or self._last[0] != numbers:
                with unobserved():
                    self._last = numbers, torch.tensor(numbers, dtype=torch.float64, device="cpu")
            numbers = self._last[1]
        if numbers.is_cpu or streams_of(numbers.device) is not None:
            self._session.level.read_number(numbers, site)
