"""Keeps the first non-finite records on the device when the ring is full."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import numpy as np
import torch

from fastcheck.backends.backend import Backend
from fastcheck.record.format import (
    RECORD_BYTES,
    RECORD_DTYPE,
    DeviceMode,
    Identity,
    identify,
    offset_of,
)
from fastcheck.utils.torch.streams import DeviceStreams

from .segment import Segment

__all__ = ["Reserve"]

# From one cut to the next.
RESERVED_SLOTS = 16

_SEQ_WORD = offset_of("seq") // 8
_COUNT_WORDS = slice(1, 4)  # nan_count, posinf_count, neginf_count
_SATURATED_WORD = 7


class Reserve(Segment):
    """A segment whose first row is a counter: how many of the rows behind it are taken.

    Every observation is read into a scratch slot and moves on from there if it is non-finite and
    there is room: a dozen small kernels, for a ring that is full.
    """

    def __init__(self, streams: DeviceStreams, backend: Backend, depth: int) -> None:
        super().__init__(streams, 1 + RESERVED_SLOTS)
        self._backend = backend
        self._depth = depth
        self._scratch = streams.empty(1, RECORD_BYTES)
        self.slots.zero_()
        self._ready.record(self._home)
        # The last use of the scratch slot and the counter, which all streams share.
        self._last: Optional[Any] = None
        self._next = 0
        self._waiting: dict[int, Identity] = {}
        self._copying: dict[int, Identity] = {}

    def observe(self, tensor: torch.Tensor, identity: Identity) -> None:
        """Reads ``tensor``, and keeps its record if that is non-finite."""
        stream = self._begin()
        self._backend.observe(tensor, self._scratch, 0, self._depth)
        self._keep(self._scratch, [identity])
        self._last_on(stream)

    def keep(self, rows: torch.Tensor, identities: Sequence[Identity]) -> None:
        """observe() for records that were read already; overwrites ``rows``."""
        stream = self._begin()
        self._keep(rows, identities)
        self._last_on(stream)

    def _begin(self) -> Any:
        stream = self._streams.current()
        self.use_on(stream)
        if stream != self._home:
            self._scratch.record_stream(stream)
        if self._last is None:
            self._last = self._streams.new_event()
        else:
            stream.wait_event(self._last)
        return stream

    def _last_on(self, stream: Any) -> None:
        assert self._last is not None
        self._last.record(stream)

    def _keep(self, rows: torch.Tensor, identities: Sequence[Identity]) -> None:
        words = rows.view(torch.int64)
        # Until the host adds the identity, ``seq`` holds the record's number in this reserve.
        first, self._next = self._next, self._next + len(rows)
        words[:, _SEQ_WORD] = torch.arange(first, self._next, device=rows.device)
        taken = self.slots.view(torch.int64)[0, :1]
        bad = words[:, _COUNT_WORDS].sum(1)
        if self._backend.device_mode is DeviceMode.SATURATING:
            bad = bad + words[:, _SATURATED_WORD]
        # The place of each, from 1 on, as if there were room for all.
        places = taken + (bad > 0).cumsum(0)
        wanted = torch.arange(1, 1 + RESERVED_SLOTS, device=rows.device)
        hits = (places == wanted[:, None]) & (bad > 0)
        found = rows.index_select(0, hits.to(torch.int32).argmax(1))
        self.slots[1:] = torch.where(hits.any(1)[:, None], found, self.slots[1:])
        taken.add_(hits.sum())
        self._waiting.update(enumerate(identities, first))

    def cut(self, copier: Any) -> bool:
        """Starts the copy; the reserve can't be used until take(). False when it holds no
        record.
        """
        if not self._waiting:
            return False
        self._copying, self._waiting = self._waiting, {}
        self.start_copy(copier)
        if self._failure is not None:
            return True
        with self._streams.on(copier):
            self.slots[0].zero_()
        self._copied.record(copier)
        if self._last is not None:
            self._last.record(copier)
        return True

    @property
    def used(self) -> int:
        return len(self.slots)

    def take(self, depth: int, backend: Backend) -> np.ndarray:
        rows = self.rows.reshape(-1).view(RECORD_DTYPE)
        records: np.ndarray = rows[1 : 1 + int(rows["numel"][0])].copy()
        identities = [self._copying[int(number)] for number in records["seq"]]
        self._copying = {}
        identify(records, identities, depth, backend.device_mode)
        records["reserved"] = np.void(bytes(records["reserved"].dtype.itemsize))
        return records
