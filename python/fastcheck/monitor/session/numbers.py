"""Records scalars that no module holds: loss scale, a GradScaler's found_inf, learning rates."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any, Protocol

import torch

from fastcheck.record.site import Site, SiteTable
from fastcheck.utils.torch.own_operators import unobserved
from fastcheck.utils.torch.streams import streams_of
from fastcheck.verdict.step import Step


class _Session(Protocol):
    """What is needed of the Session."""

    step: Step
    sites: SiteTable

    @property
    def reads_numbers(self) -> bool: ...

    def read_number(self, number: torch.Tensor, site: int, /) -> int: ...


class StepNumbers:
    """Of one session. Methods expect its lock to be held, and a step that is observed."""

    def __init__(self, session: _Session) -> None:
        self._session = session

    def loss_scale(self, scale: Any) -> None:
        """The loss of this step is multiplied by ``scale``, a number or a tensor."""
        with unobserved():
            own = scale.detach().clone() if _is_tensor(scale) else float(scale)
        self._session.step.scale = own
        self._read(scale, Site("", "", "optimizer", "loss_scale", 0, "loss scale"))

    def found_inf(self, word: torch.Tensor) -> int:
        """What a GradScaler has found in the gradients of one device; the number of its record."""
        site = Site("", "GradScaler", "optimizer", "found_inf", 0, "found_inf")
        return self._session.read_number(word, self._session.sites.intern(site))

    def skipped(self, word: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Whether the optimizer is about to skip its update: 1.0 or 0.0, on its device."""
        site = Site(
            "", type(optimizer).__name__, "optimizer", "skipped_update", 0, "skipped update"
        )
        self._session.read_number(word, self._session.sites.intern(site))

    def learning_rates(self, optimizer: torch.optim.Optimizer) -> None:
        """Those of the groups, as the optimizer is about to use them."""
        kind = type(optimizer).__name__
        rates: list[Any] = [group.get("lr") for group in optimizer.param_groups]
        site = Site("", kind, "optimizer", "learning_rate", 0, "lr")
        elsewhere = [rate for rate in rates if _is_tensor(rate) and not rate.is_cpu]
        here = [float(r) for r in rates if isinstance(r, Real) or (_is_tensor(r) and r.is_cpu)]
        if here:
            self._read(here, site)
        for rate in elsewhere:
            self._read(rate, site)

    def _read(self, number: Any, site: Site) -> None:
        session = self._session
        if not session.reads_numbers:
            return
        if not _is_tensor(number):
            values: Sequence[float] = number if isinstance(number, list) else [float(number)]
            with unobserved():
                number = torch.tensor(values, dtype=torch.float64, device="cpu")
        if number.is_cpu or streams_of(number.device) is not None:
            session.read_number(number, session.sites.intern(site))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
