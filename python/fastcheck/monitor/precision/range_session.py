"""RangeSession: ``install(record="range")``: counts the exponents of what is read in some steps.

In these steps the C++ hooks leave their work to Python, where the exponents of a tensor are counted
in the pass over its memory that makes its record. All other steps are as with ``record="full"``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Optional

import numpy as np
import torch

from fastcheck.backends.backend import Observe
from fastcheck.backends.portable.traversal import dtype_and_order
from fastcheck.backends.table import backend_for
from fastcheck.monitor.session.config import Config
from fastcheck.monitor.session.session import Session
from fastcheck.record.precision import PrecisionAdvice
from fastcheck.record.site import SiteTable
from fastcheck.ring.reader import PythonReader
from fastcheck.utils.torch.rank import Ranks

from .readings import ExponentReadings

#: Of the observed steps, counted from 0: 0, 1, 2, 4, 8, 16, and then each 32nd.
_PERIOD = 32


class RangeSession(Session):
    """A Session whose tensors are counted in one of 32 steps."""

    def __init__(self, config: Config, sites: SiteTable, ranks: Ranks) -> None:
        super().__init__(config, sites, ranks)
        self.exponents = ExponentReadings(sites)
        self._plain_reader = self.reader
        self._counting_reader = PythonReader(self.seen, self._write)
        self._steps = 0
        self._counted_step = -1
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
        self.reader = self._counting_reader if self.is_counting else self._plain_reader
        return super().read(tensor, site, call, flags, any_dtype)

    def _write(
        self,
        tensor: torch.Tensor,
        index: int,
        site: int,
        call: int,
        step: int,
        seq: int,
        flags: int,
    ) -> bool:
        observe = self.observe_for(site)
        return self.host.write(tensor, index, site, call, step, seq, flags, observe)

    def read_list(
        self,
        device: torch.device,
        tensors: Sequence[torch.Tensor],
        sites: Sequence[int],
        flags: int,
    ) -> list[np.void]:
        if not self.is_counting:
            return super().read_list(device, tensors, sites, flags)
        found, step = [], self.step.index
        for tensor, site in zip(tensors, sites):
            seq, observe = self.next_seq, self.observe_for(site)
            if device.type == "cpu":
                if self.host.observe(tensor, site, 0, step, seq, flags, observe):
                    found.append(self.host.last())
            else:
                identity = (seq, step, 0, site, flags, *dtype_and_order(tensor))
                self._ring(device).observe(tensor, identity, observe=observe)
            self.next_seq = seq + 1
        return found

    def observe_for(self, site: int) -> Optional[Observe]:
        return functools.partial(self._observe_and_count, site) if self.is_counting else None

    def _observe_and_count(
        self, site: int, tensor: torch.Tensor, slots: torch.Tensor, index: int, depth: int
    ) -> None:
        try:
            step = self.step.index
            if self.exponents.read(tensor, slots, index, site, step, self.is_scaled):
                return
        except Exception as error:
            # Raises where it is the tensor that can't be read.
            backend_for(tensor.device).observe(tensor, slots, index, depth)
            self._switch_off(error)
            return
        backend_for(tensor.device).observe(tensor, slots, index, depth)

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
