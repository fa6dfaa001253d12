"""A segment of a device's ring: record slots in its memory, and their mirror in pinned memory."""

from __future__ import annotations

from collections import deque
from typing import Any, Optional

import numpy as np

from fastcheck.backends.backend import Backend
from fastcheck.record.format import RECORD_BYTES, RECORD_DTYPE, VALUE_BYTES, Identity, identify
from fastcheck.utils.torch.lost_device import is_lost
from fastcheck.utils.torch.streams import DeviceStreams

from .cursor import new_cursor


class Segment:
    """Slots on the device, their mirror in pinned memory, and the streams that wrote to them."""

    def __init__(self, streams: DeviceStreams, rows: int) -> None:
        self._streams = streams
        # Allocated by this stream: another one has to wait for it before its first use.
        self._home = streams.current()
        self._ready = streams.new_event()
        self.slots = streams.empty(rows, RECORD_BYTES)
        self._ready.record(self._home)
        self.mirror = streams.pinned(rows, RECORD_BYTES)
        # Made here: numpy() calls operators, which take() must not.
        self.rows: np.ndarray = self.mirror.numpy()
        # Each row an Identity; the cursor's slot is the first free row. Each filling has a cursor
        # of its own: a recorder that still holds an earlier one finds no free row there.
        self.identities = np.zeros((rows, len(Identity._fields)), np.int64)
        self.cursor = new_cursor()
        self._written: dict[Any, Any] = {}  # stream: the event behind its last write
        self._copied = streams.new_event()
        self._address = self.slots.data_ptr()
        # The first stretch of launches (backends.backend.BlackBox) that wrote to it.
        self.stretch = 0
        # Why the copy could not be started: the device is lost.
        self._failure: Optional[RuntimeError] = None
        # The copy was seen to be done. Of a device that is lost no event can be queried any more,
        # not even one that it has passed.
        self._is_copied = False
        # The segment is appended to it when its records have been taken.
        self.pool: Optional[deque[Segment]] = None

    @property
    def used(self) -> int:
        """How many rows are copied."""
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
        used = self.used
        with self._streams.on(copier):
            self.mirror[:used].copy_(self.slots[:used], non_blocking=True)
        self.slots.record_stream(copier)
        self._copied.record(copier)

    @property
    def is_ready(self) -> bool:
        """Whether the copy is done. Does not wait. Raises what the device reports if it is lost."""
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

    def take(self, depth: int, backend: Backend) -> np.ndarray:
        """The complete records; the segment may be filled again afterwards."""
        used = self.cursor.slot
        records = np.zeros(used, RECORD_DTYPE)
        rows = records.view(np.uint8).reshape(used, RECORD_BYTES)
        rows[:, :VALUE_BYTES] = self.rows[:used, :VALUE_BYTES]
        identify(records, self.identities[:used], depth, backend.device_mode)
        self.cursor = new_cursor()
        return records

    def rescue(self, box: np.ndarray, depth: int, backend: Backend) -> np.ndarray:
        """The complete records of this segment that ``box`` holds, rows of BOX_DTYPE."""
        places = box["slot"].astype(np.int64) - self._address
        mine = (box["stretch"] >= max(self.stretch, 1)) & (places >= 0)
        mine &= places < self.cursor.slot * RECORD_BYTES
        rows = places[mine] // RECORD_BYTES
        records: np.ndarray = box["record"][mine][np.argsort(rows)]
        identify(records, self.identities[np.sort(rows)], depth, backend.device_mode)
        return records
