"""RangeLevel: ``install(record="range")``: counts the exponents of what is read in some steps.

In these steps the C++ hooks leave their work to Python, where the exponents of a tensor are counted
in the pass over its memory that makes its record. All other steps are as with ``record="full"``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np
import torch

from fastcheck.backends.backend import Observe
from fastcheck.backends.portable.traversal import dtype_and_order
from fastcheck.backends.table import backend_for, guarded_streams, observe_and_count
from fastcheck.calls.module_calls import ModuleNode
from fastcheck.errors import ConfigError
from fastcheck.monitor.session.session import ModuleLevel, Session
from fastcheck.record.exponents import EXPONENT_WORDS, Exponents
from fastcheck.record.precision import PrecisionAdvice, advise, candidates, check_tolerance
from fastcheck.record.site import SiteTable
from fastcheck.ring.host import HookReader
from fastcheck.utils.torch.own_operators import no_grad
from fastcheck.utils.torch.streams import DeviceStreams


@dataclass
class _Total:
    """The readings of a site, added up."""

    dtype: str
    is_scaled: bool
    first_step: int
    last_step: int
    readings: int = 0
    exponents: Optional[Exponents] = None
    #: The number of them that are in the log.
    logged: int = 0


class ExponentReadings:
    """Counts the exponents of tensors, and adds them up by site. Not thread-safe: the caller holds
    the session's lock.
    """

    def __init__(self, sites: SiteTable) -> None:
        self._sites = sites
        self._totals: dict[int, _Total] = {}
        # Counts that are not on their way to the host, by device and stream.
        self._on_device: dict[tuple[torch.device, Any], list[tuple[int, torch.Tensor]]] = {}
        # The streams of its device, the event behind a copy, its rows on the host, and their sites.
        self._in_flight: list[tuple[DeviceStreams, Any, np.ndarray, list[int]]] = []
        self.is_off = False

    def read(
        self,
        tensor: torch.Tensor,
        slots: torch.Tensor,
        index: int,
        site: int,
        step: int,
        is_scaled: bool,
    ) -> bool:
        """Writes the record of a readable tensor to ``slots[index]`` and counts its exponents, on
        its device. False, and nothing is done: the tensor is empty, or has no exponents.
        """
        if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
            return False
        words = observe_and_count(tensor, slots, index)
        dtype = str(tensor.dtype).removeprefix("torch.")
        total = self._totals.setdefault(site, _Total(dtype, False, step, step))
        total.is_scaled = total.is_scaled or (
            is_scaled and self._sites[site].direction == "backward"
        )
        total.last_step = step
        if tensor.is_cpu:
            self._add(site, words.numpy())
            return True
        streams = guarded_streams(tensor.device)
        if streams is not None:
            place = tensor.device, streams.current()
            self._on_device.setdefault(place, []).append((site, words))
        return True

    def _add(self, site: int, words: np.ndarray) -> None:
        total, exponents = self._totals[site], Exponents(words)
        total.readings += 1
        total.exponents = exponents if total.exponents is None else total.exponents + exponents

    def send(self) -> None:
        """Starts to copy what devices have counted. Waits for nothing."""
        places, self._on_device = self._on_device, {}
        for (device, stream), items in places.items():
            streams = guarded_streams(device)
            assert streams is not None
            mirror = streams.pinned(len(items), EXPONENT_WORDS * 8)
            with streams.on(stream), no_grad():
                rows = torch.stack([words for _, words in items])
                mirror.copy_(rows.view(torch.uint8), non_blocking=True)
                copied = streams.new_event()
                copied.record(stream)
            rows_on_host = mirror.numpy().view(np.int64)
            self._in_flight.append((streams, copied, rows_on_host, [site for site, _ in items]))

    def take_in(self, waits: bool) -> None:
        """Adds the counts that have arrived; with ``waits`` all of them."""
        left = []
        for streams, copied, rows, sites in self._in_flight:
            if waits:
                streams.wait_for(copied)
            elif not streams.is_done(copied):
                left.append((streams, copied, rows, sites))
                continue
            for site, words in zip(sites, rows):
                self._add(site, words)
        self._in_flight = left

    def advice(self, tolerance: float, formats: Sequence[str]) -> list[PrecisionAdvice]:
        """The advice for each site that has a reading."""
        return [
            advise(
                total.exponents,
                total.dtype,
                tolerance,
                formats=formats,
                site=self._sites[number],
                readings=total.readings,
                is_scaled=total.is_scaled,
            )
            for number, total in self._totals.items()
            if total.exponents is not None
        ]

    def lines(self) -> Iterator[dict[str, Any]]:
        """Lines for the log, one of each site with readings that are not in it yet: all readings of
        the site added up, words that are 0 left out.
        """
        for number, total in self._totals.items():
            if total.exponents is None or total.logged == total.readings:
                continue
            total.logged = total.readings
            words = total.exponents.words
            yield {
                "site": number,
                "dtype": total.dtype,
                "readings": total.readings,
                "steps": [total.first_step, total.last_step],
                "is_scaled": total.is_scaled,
                "words": {str(at): int(words[at]) for at in np.flatnonzero(words)},
            }


#: The observed steps that are counted, from 0: 0, 1, 2, 4, 8, 16, and then each 32nd.
_PERIOD = 32


class RangeLevel(ModuleLevel):
    """A ModuleLevel whose tensors are counted in one of 32 steps."""

    def __init__(self, session: Session, nodes: Sequence[ModuleNode], has_excluded: bool) -> None:
        super().__init__(session, nodes, has_excluded)
        self.exponents = ExponentReadings(session.sites)
        self._plain_reader = self.reader
        self._counting_reader = HookReader(self.seen, self._write)
        self._steps = 0
        self._counted_step = -1
        self._is_counted_step = False

    @property
    def is_counting(self) -> bool:
        """True if exponents are counted in the current step."""
        session, index = self.session, self.session.step.index
        if index != self._counted_step and session.is_active:
            self._counted_step = index
            number, self._steps = self._steps, self._steps + 1
            self._is_counted_step = number % _PERIOD == 0 or (
                number < _PERIOD and number & (number - 1) == 0
            )
        # While a graph is captured, what is read now belongs to its replays.
        return self._is_counted_step and session.tape is None and not self.exponents.is_off

    def open_recorder(self) -> None:
        if not self.is_counting:
            super().open_recorder()

    def read(
        self, tensor: torch.Tensor, site: int, call: int, flags: int, any_dtype: bool = False
    ) -> int:
        self.reader = self._counting_reader if self.is_counting else self._plain_reader
        return super().read(tensor, site, call, flags, any_dtype)

    def _write(self, tensor: torch.Tensor, index: int, site: int, *identity: int) -> bool:
        return self.host.write(tensor, index, site, *identity, observe=self.observe_for(site))

    def read_list(
        self,
        device: torch.device,
        tensors: Sequence[torch.Tensor],
        sites: Sequence[int],
        flags: int,
    ) -> list[np.void]:
        if not self.is_counting:
            return super().read_list(device, tensors, sites, flags)
        records, step = [], self.session.step.index
        for tensor, site in zip(tensors, sites):
            seq, observe = self.next_seq, self.observe_for(site)
            if device.type == "cpu":
                if self.host.observe(tensor, site, 0, step, seq, flags, observe=observe):
                    records.append(self.host.last())
            else:
                identity = (seq, step, 0, site, flags, *dtype_and_order(tensor))
                self.session.rings.ring_of(device).observe(tensor, identity, observe=observe)
            self.next_seq = seq + 1
        return records

    def observe_for(self, site: int) -> Optional[Observe]:
        return functools.partial(self._observe_and_count, site) if self.is_counting else None

    def _observe_and_count(
        self, site: int, tensor: torch.Tensor, slots: torch.Tensor, index: int, depth: int
    ) -> None:
        try:
            step, is_scaled = self.session.step.index, self.session.is_scaled
            if self.exponents.read(tensor, slots, index, site, step, is_scaled):
                return
        except Exception as error:
            # Raises where it is the tensor that can't be read.
            backend_for(tensor.device).observe(tensor, slots, index, depth)
            self._switch_off(error)
            return
        backend_for(tensor.device).observe(tensor, slots, index, depth)

    def _switch_off(self, error: Exception) -> None:
        self.exponents.is_off = True
        self.session.report_internal_error("exponents", error)

    def step_closed(self) -> None:
        self._take_in(waits=False)

    def flushed(self) -> None:
        self._take_in(waits=True)
        log = self.session.event_store.archive.log
        if log is not None:
            for line in self.exponents.lines():
                log.append_line("range", line)

    def _take_in(self, waits: bool) -> None:
        try:
            self.exponents.send()
            self.exponents.take_in(waits)
        except Exception as error:
            self._switch_off(error)

    def advice(self, tolerance: float, formats: Sequence[str]) -> list[PrecisionAdvice]:
        """The advice for each tensor that was counted, in the order in which they were first read.
        Waits for the copies of counts from devices.
        """
        self._take_in(waits=True)
        return self.exponents.advice(tolerance, formats)


def check_level(record: str, level: str) -> None:
    """ConfigError if exponents are to be counted at op level."""
    if record == "range" and level == "op":
        raise ConfigError('record="range" is for module level, not for level="op"')


def advice_of(
    session: Session, tolerance: float, formats: Optional[Sequence[str]]
) -> list[PrecisionAdvice]:
    """The result of monitor.advice(). Takes the session's lock."""
    check_tolerance(tolerance)
    names = candidates(formats)
    level = session.level
    if not isinstance(level, RangeLevel):
        raise ConfigError(
            'this monitor counts no exponents: install(record="range") makes a monitor that does'
        )
    with session.lock:
        return level.advice(tolerance, names)
