"""RangeSession: ``install(record="range")``: counts the exponents of what is read in some steps.

In these steps the C++ hooks leave their work to Python, where each tensor that was read for the
first time is read once more, for its exponents. All other steps are as with ``record="full"``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import torch

from fastcheck.monitor.session.config import Config
from fastcheck.monitor.session.session import Session
from fastcheck.record.precision import PrecisionAdvice
from fastcheck.record.site import SiteTable
from fastcheck.ring.reader import IS_NEW, TOKEN_SHIFT
from fastcheck.utils.torch.rank import Ranks

from .readings import ExponentReadings

__all__ = ["RangeSession"]

#: Of the observed steps, counted from 0: 0, 1, 2, 4, 8, 16, and then each 32nd.
_PERIOD = 32


class RangeSession(Session):
    """A Session whose tensors are counted in one of 32 steps."""

    def __init__(self, config: Config, sites: SiteTable, ranks: Ranks) -> None:
        super().__init__(config, sites, ranks)
        self.exponents = ExponentReadings(sites)
        self._steps = 0
        self._counted_step = self._counted_token = -1
        self._is_counted_step = False

    @property
    def is_counting(self) -> bool:
        """Whether the exponents of what is read now are counted."""
        index = self.step.index
        if index != self._counted_step and self.is_active:
            self._counted_step = index
            number, self._steps = self._steps, self._steps + 1
            self._is_counted_step = number % _PERIOD == 0 or (
                number < _PERIOD and number & (number - 1) == 0
            )
        # While a graph is captured, what is read now belongs to its replays.
        return self._is_counted_step and self.tape is None and not self.exponents.is_off

    def open_recorder(self) -> None:
        if not self.is_counting:
            super().open_recorder()

    def read(
        self, tensor: torch.Tensor, site: int, call: int, flags: int, any_dtype: bool = False
    ) -> int:
        code = super().read(tensor, site, call, flags, any_dtype)
        # Of a new type of device it has called itself.
        if code >= 0 and code & IS_NEW and code >> TOKEN_SHIFT != self._counted_token:
            self._counted_token = code >> TOKEN_SHIFT
            if self.is_counting:
                self._count([tensor], [site])
        return code

    def observe_list(
        self,
        tensors: Sequence[torch.Tensor],
        sites: Sequence[int],
        roles: Sequence[str],
        flags: int,
        method: Callable[..., None],
        *args: Any,
    ) -> None:
        super().observe_list(tensors, sites, roles, flags, method, *args)
        if self.is_counting:
            self._count(tensors, sites)

    def _count(self, tensors: Sequence[torch.Tensor], sites: Sequence[int]) -> None:
        try:
            for tensor, site in zip(tensors, sites):
                self.exponents.read(tensor, site, self.step.index, self.is_scaled)
        except Exception as error:
            self._switch_off(error)

    def _switch_off(self, error: Exception) -> None:
        self.exponents.is_off = True
        self.report_internal_error("exponents", error)

    def close_step(self) -> None:
        super().close_step()
        self._take_in(waits=False)

    def flush(self) -> None:
        super().flush()
        self._take_in(waits=True)
        log = self.event_store.log
        if log is not None:
            for line in self.exponents.lines():
                log.append_line("range", line)

    def _take_in(self, waits: bool) -> None:
        try:
            self.exponents.send()
            self.exponents.take_in(waits)
        except Exception as error:
            self._switch_off(error)

    def precision_advice(self, tolerance: float, formats: Sequence[str]) -> list[PrecisionAdvice]:
        """Of each tensor that was counted, in the order in which they were first read. Waits for
        the copies of counts from devices.
        """
        self._take_in(waits=True)
        return self.exponents.advice(tolerance, formats)
