"""What a full ring keeps nevertheless: the first non-finite records among those that it has no slot
for, chosen on the device.
"""

from __future__ import annotations

from typing import Any, Optional

import numpy as np
import torch

from ._device import DeviceStreams
from ._record import RECORD_BYTES, RECORD_DTYPE, DeviceMode, Identity, identify, offset_of
from ._segment import Segment
from .backends import Backend

__all__ = ["Reserve"]

# From one cut to the next; the very first is the one that matters.
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
        self._waiting: dict[int, Identity] = {}
        self._copying: dict[int, Identity] = {}

    def observe(self, tensor: torch.Tensor, identity: Identity) -> None:
        """Reads ``tensor``, and keeps its record if that is non-finite."""
        stream = self._streams.current()
        self.use_on(stream)
        if stream != self._home:
            self._scratch.record_stream(stream)
        if self._last is None:
            self._last = self._streams.new_event()
        else:
            stream.wait_event(self._last)
        self._backend.observe(tensor, self._scratch, 0, self._depth)
        words = self._scratch.view(torch.int64)
        words[0, _SEQ_WORD].fill_(identity.seq)
        taken = self.slots.view(torch.int64)[0, :1]
        bad = words[0, _COUNT_WORDS].sum()
        if self._backend.device_mode is DeviceMode.SATURATING:
            bad = bad + words[0, _SATURATED_WORD]
        keep = (bad > 0) & (taken < RESERVED_SLOTS)
        row = taken.clamp(max=RESERVED_SLOTS - 1) + 1
        self.slots.index_copy_(
            0, row, torch.where(keep, self._scratch, self.slots.index_select(0, row))
        )
        taken.add_(keep)
        self._last.record(stream)
        self._waiting[identity.seq] = identity

    def cut(self, copier: Any) -> Optional[Reserve]:
        """Starts the copy, unless there is nothing to copy or the last one was not taken yet."""
        if not self._waiting or self._copying:
            return None
        self._copying, self._waiting = self._waiting, {}
        self.start_copy(copier)
        with self._streams.on(copier):
            self.slots[0].zero_()
        self._copied.record(copier)
        if self._last is not None:
            self._last.record(copier)
        return self

    @property
    def used(self) -> int:
        return len(self.slots)

    def take(self, depth: int, backend: Backend) -> np.ndarray:
        rows = self.rows.reshape(-1).view(RECORD_DTYPE)
        records: np.ndarray = rows[1 : 1 + int(rows["numel"][0])].copy()
        identities = [self._copying[int(seq)] for seq in records["seq"]]
        self._copying = {}
        identify(records, identities, depth, backend.device_mode)
        records["reserved"] = np.void(bytes(records["reserved"].dtype.itemsize))
        return records
