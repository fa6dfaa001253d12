"""Segments: rows of records on a device, and their copies to the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple, Optional

import numpy as np
import torch

from fastcheck.backends.backend import Backend
from fastcheck.record.format import (
    RECORD_BYTES,
    RECORD_DTYPE,
    VALUE_BYTES,
    DeviceMode,
    Identity,
    identify,
    offset_of,
)
from fastcheck.utils.torch.lost_device import is_lost
from fastcheck.utils.torch.streams import DeviceStreams

from .host import Cursor, new_cursor


class Segment:
    """Slots on the device, their mirror in pinned memory, and the streams that wrote to them."""

    def __init__(self, streams: DeviceStreams, rows: int) -> None:
        self._streams = streams
        # Allocated by this stream: another stream has to wait for it before its first use.
        self._home = streams.current()
        self._ready = streams.new_event()
        self.slots = streams.empty(rows, RECORD_BYTES)
        self._ready.record(self._home)
        self.mirror = streams.pinned(rows, RECORD_BYTES)
        # Made here: numpy() calls operators, which take() must not.
        self.rows: np.ndarray = self.mirror.numpy()
        # Each row an Identity; the cursor's slot is the first free row. Each filling has a cursor
        # of its own: a recorder that still holds an earlier block finds no free row there.
        self.identities = np.zeros((rows, len(Identity._fields)), np.int64)
        self.cursor = new_cursor()
        self._written: dict[Any, Any] = {}  # stream: the event behind its last write
        self._copied = streams.new_event()
        self._address = self.slots.data_ptr()
        # The first stretch of launches (backends.backend.BlackBox) that wrote to it.
        self.stretch = 0
        # The reason why the copy could not be started: the device is lost.
        self._failure: Optional[RuntimeError] = None
        # The copy was seen to be done. Of a device that is lost no event can be queried any more,
        # not even an event that it has passed.
        self._is_copied = False
        # The segment is appended to it when its records have been taken.
        self.pool: Optional[deque[Segment]] = None

    @property
    def used(self) -> int:
        """The number of rows that are copied."""
        return self.cursor.slot

    def use_on(self, stream: Any) -> None:
        """Orders writes of slots on ``stream`` behind the allocation. Call it before writing."""
        if stream in self._written:
            return
        self._written[stream] = self._streams.new_event()
        if stream != self._home:
            stream.wait_event(self._ready)
            self.slots.record_stream(stream)

    def start_copy(self, copier: Any) -> None:
        """Puts the copy to the mirror on the stream ``copier``, behind all writes. No waiting. On a
        device that is lost nothing happens: ``is_ready`` raises then.
        """
        self._is_copied = False
        try:
            self._start_copy(copier)
        except RuntimeError as error:
            if not is_lost(error):
                raise
            self._failure = error

    def _start_copy(self, copier: Any) -> None:
        for stream, event in self._written.items():
            event.record(stream)
            copier.wait_event(event)
        self._streams.copy_rows(copier, self.slots, self.mirror, self.used)
        self.slots.record_stream(copier)
        self._copied.record(copier)

    @property
    def is_ready(self) -> bool:
        """True if the copy is done. Does not wait. Raises what the device reports if it is lost."""
        if self._failure is not None:
            raise self._failure
        if not self._is_copied:
            self._is_copied = self._streams.is_done(self._copied)
        return self._is_copied

    def wait(self) -> None:
        """Waits for the copy. Raises what the device reports if it is lost."""
        if self._failure is not None:
            raise self._failure
        self._streams.wait_for(self._copied)

    def take(self, backend: Backend) -> np.ndarray:
        """The complete records; the segment may be filled again afterwards."""
        used = self.cursor.slot
        records = np.zeros(used, RECORD_DTYPE)
        rows = records.view(np.uint8).reshape(used, RECORD_BYTES)
        rows[:, :VALUE_BYTES] = self.rows[:used, :VALUE_BYTES]
        identify(records, self.identities[:used], backend.device_mode)
        self.cursor = new_cursor()
        return records

    def rescue(self, box: np.ndarray, backend: Backend) -> np.ndarray:
        """The complete records of this segment that ``box`` holds, rows of BOX_DTYPE."""
        places = box["slot"].astype(np.int64) - self._address
        mine = (box["stretch"] >= max(self.stretch, 1)) & (places >= 0)
        mine &= places < self.cursor.slot * RECORD_BYTES
        rows = places[mine] // RECORD_BYTES
        records: np.ndarray = box["record"][mine][np.argsort(rows)]
        identify(records, self.identities[np.sort(rows)], backend.device_mode)
        return records


# Slots from one cut to the next.
RESERVED_SLOTS = 16

_SEQ_WORD = offset_of("seq") // 8
_COUNT_WORDS = slice(1, 4)  # nan_count, posinf_count, neginf_count
_SATURATED_WORD = 7


class Reserve(Segment):
    """A segment whose first row is a counter: how many of the rows behind it are taken.

    Every observation is read into a scratch slot and moves on from there if it is non-finite and
    there is room: a dozen small kernels, for a ring that is full.
    """

    def __init__(self, streams: DeviceStreams, backend: Backend) -> None:
        super().__init__(streams, 1 + RESERVED_SLOTS)
        self._backend = backend
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
        self._backend.observe(tensor, self._scratch, 0, identity.depth)
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
        hit_rows = rows.index_select(0, hits.to(torch.int32).argmax(1))
        self.slots[1:] = torch.where(hits.any(1)[:, None], hit_rows, self.slots[1:])
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

    def take(self, backend: Backend) -> np.ndarray:
        rows = self.rows.reshape(-1).view(RECORD_DTYPE)
        records: np.ndarray = rows[1 : 1 + int(rows["numel"][0])].copy()
        identities = [self._copying[int(number)] for number in records["seq"]]
        self._copying = {}
        identify(records, identities, backend.device_mode)
        records["reserved"] = np.void(bytes(records["reserved"].dtype.itemsize))
        return records


class Rows(NamedTuple):
    """The rows that a recorder writes to; the next row is ``cursor.slot``."""

    observe: Callable[..., None]
    slots: torch.Tensor
    identities: np.ndarray
    cursor: Cursor
