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
        # What was read last, which is the same in most steps.
        self._last: Optional[tuple[list[float], torch.Tensor]] = None

    def loss_scale(self, scale: Any) -> None:
        """The loss of this step is multiplied by ``scale``, a number or a tensor."""
        is_tensor = isinstance(scale, torch.Tensor)
        with unobserved():
            self._session.step.update.scale = scale.detach().clone() if is_tensor else float(scale)
        site = Site("", "", "optimizer", "loss_scale", 0, "loss scale")
        self._read(scale if is_tensor else [float(scale)], site)

    def found_inf(self, word: torch.Tensor) -> int:
        """Reads what a GradScaler has found in the gradients of one device; returns the number of
        its record.
        """
        return self._record(word, Site("", "GradScaler", "optimizer", "found_inf", 0, "found_inf"))

    def skipped(self, word: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Whether the optimizer is about to skip its update: 1.0 or 0.0, on its device."""
        kind = type(optimizer).__name__
        self._record(word, Site("", kind, "optimizer", "skipped_update", 0, "skipped update"))

    def learning_rates(self, optimizer: torch.optim.Optimizer) -> None:
        """Reads the learning rates of the groups, as the optimizer is about to use them."""
        site = Site("", type(optimizer).__name__, "optimizer", "learning_rate", 0, "lr")
        here: list[float] = []
        elsewhere: list[torch.Tensor] = []
        for group in optimizer.param_groups:
            rate = group.get("lr")
            if isinstance(rate, torch.Tensor) and not rate.is_cpu:
                elsewhere.append(rate)
            elif isinstance(rate, (float, torch.Tensor, Real)):  # the ABC's own check is slow
                here.append(float(rate))
        if here:
            self._read(here, site)
        for rate in elsewhere:
            self._read(rate, site)

    def _read(self, numbers: Union[list[float], torch.Tensor], site: Site) -> None:
        if not self._session.level.reads_numbers:
            return
        if isinstance(numbers, list):
            if self._last is None or self._last[0] != numbers:
                with unobserved():
                    self._last = numbers, torch.tensor(numbers, dtype=torch.float64, device="cpu")
            numbers = self._last[1]
        if numbers.is_cpu or streams_of(numbers.device) is not None:
            self._record(numbers, site)

    def _record(self, number: torch.Tensor, site: Site) -> int:
        session = self._session
        return session.level.read_number(number, session.sites.intern(site))
