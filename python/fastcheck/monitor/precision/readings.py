"""ExponentReadings: the exponents counted in a run, by site, and their way to the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np
import torch

from fastcheck.backends.exponents import observe_and_count
from fastcheck.backends.table import guarded_streams
from fastcheck.record.exponents import EXPONENT_WORDS, Exponents
from fastcheck.record.precision import PrecisionAdvice, advise
from fastcheck.record.site import SiteTable
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
    #: How many of them are in the log.
    logged: int = 0


class ExponentReadings:
    """Not thread-safe: the caller holds the session's lock."""

    def __init__(self, sites: SiteTable) -> None:
        self._sites = sites
        self._totals: dict[int, _Total] = {}
        # By device and stream: what was counted there, and is not on its way.
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
        total, found = self._totals[site], Exponents(words)
        total.readings += 1
        total.exponents = found if total.exponents is None else total.exponents + found

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
        """Adds what has arrived; ``waits``: all of it."""
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
        """Of each site that has a reading."""
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
        """Of each site with readings that are not in the log yet, a line for it: all of its
        readings added up, words that are 0 left out.
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
