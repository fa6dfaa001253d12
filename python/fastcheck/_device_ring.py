"""The ring of one device: record slots in its memory, and the asynchronous copies that bring them
to the host.

Slots come in segments. A segment is filled, copied to its pinned mirror, decoded once the copy's
event has passed, and filled again. There are as many segments as the host's lead over the device
needs: none is allocated any more once it has been that far ahead. Streams may take turns; a
segment's copy waits, on the device, for every stream that wrote to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Optional

import numpy as np
import torch

from ._device import DeviceStreams
from ._record import Identity
from ._recorder import HookRecorder
from ._reserve import Reserve
from ._segment import Segment
from .backends import Backend

__all__ = ["DeviceRing"]

SEGMENT_SLOTS = 1024
# 12 MiB of records that the host has not seen yet.
MAX_SEGMENTS = 64
# Enough for a host that is two steps ahead, of a model of a few hundred modules.
_FIRST_SEGMENTS = 4


class DeviceRing:
    """Not thread-safe but for take(): the caller holds the session's lock."""

    def __init__(
        self,
        streams: DeviceStreams,
        backend: Backend,
        depth: int,
        segment_slots: int = SEGMENT_SLOTS,
        max_segments: int = MAX_SEGMENTS,
    ) -> None:
        self.backend = backend
        # Observations for which there was no slot.
        self.lost_count = 0
        self._streams = streams
        self._depth = int(depth)
        self._segment_slots = segment_slots
        self._max_segments = max_segments
        self._copier = streams.new_stream()
        self._free: deque[Segment] = deque()
        self._filling: list[Segment] = []  # one, or none
        self._in_flight: list[Segment] = []
        self._taken_early: list[np.ndarray] = []
        self._segment_count = min(_FIRST_SEGMENTS, max_segments)
        self._free.extend(Segment(streams, segment_slots) for _ in range(self._segment_count))
        # The segment that observe() wrote to last, on a stream that it has waited for.
        self._last_used: Optional[Segment] = None
        self._reserve = Reserve(streams, backend, self._depth)

    def observe(
        self, tensor: torch.Tensor, identity: tuple[int, ...], is_known_stream: bool = False
    ) -> None:
        """Has ``tensor`` read into the next slot, on the current stream. Waits for nothing.

        ``identity``: as of an Identity. ``is_known_stream``: the stream is that of the last call.
        """
        segment = self._segment()
        if segment is None:
            self.lost_count += 1
            with torch.no_grad():
                self._reserve.observe(tensor, Identity(*identity))
            return
        if not is_known_stream or segment is not self._last_used:
            segment.use_on(self._streams.current())
            self._last_used = segment
        row = segment.cursor.slot
        self.backend.observe(tensor, segment.slots, row, self._depth)
        segment.identities[row] = identity
        segment.cursor.slot = row + 1

    def aim(self, recorder: HookRecorder) -> None:
        """The recorder may write the next rows, on the stream of the last observe(), until cut()
        and as long as there are rows.
        """
        segment = self._last_used
        if segment is not None:
            recorder.aim(self.backend.observe, segment.slots, segment.identities, segment.cursor)

    def observe_list(
        self,
        tensors: Sequence[torch.Tensor],
        sites: Sequence[int],
        step: int,
        first_seq: int,
        flags: int,
    ) -> None:
        """Has many tensors read in one call, or in several when they don't fit a segment."""
        done = 0
        while done < len(tensors):
            segment = self._segment()
            if segment is None:
                part = tensors[done:]
            else:
                first = segment.used
                part = tensors[done : done + self._segment_slots - first]
            identities = [
                (first_seq + i, step, 0, sites[i], flags, *self.backend.identity(tensor, False))
                for i, tensor in enumerate(part, done)
            ]
            if segment is None:
                for tensor, identity in zip(part, identities):
                    self.observe(tensor, identity)
                return
            segment.use_on(self._streams.current())
            with torch.no_grad():
                self.backend.observe_list(part, segment.slots, first, self._depth)
            segment.identities[first : first + len(part)] = identities
            segment.cursor.slot = first + len(part)
            done += len(part)

    def cut(self) -> tuple[list[np.ndarray], list[Segment]]:
        """Starts the copy of what was written since the last cut. Returns the records of it that
        are here already, and the segments that are in flight: each has to come back through take().
        """
        self._send()
        segments, self._in_flight = self._in_flight, []
        records, self._taken_early = self._taken_early, []
        reserve = self._reserve.cut(self._copier)
        return records, segments if reserve is None else [*segments, reserve]

    def take(self, segment: Segment) -> np.ndarray:
        """The records of a segment whose copy is done. May be called by any one thread."""
        records = segment.take(self._depth, self.backend)
        if segment is not self._reserve:
            self._free.append(segment)
        return records

    def _segment(self) -> Optional[Segment]:
        """The one to write to; None when the host is so far ahead that there is none."""
        if self._filling and self._filling[0].used == self._segment_slots:
            self._send()
        if not self._filling:
            if not self._free:
                self._take_early()
            if self._free:
                self._filling.append(self._free.popleft())
            elif self._segment_count < self._max_segments:
                self._segment_count += 1
                self._filling.append(Segment(self._streams, self._segment_slots))
        return self._filling[0] if self._filling else None

    def _take_early(self) -> None:
        """A step of very many records: those of it that have arrived make room for the rest."""
        while self._in_flight and self._in_flight[0].is_ready:
            self._taken_early.append(self.take(self._in_flight.pop(0)))

    def _send(self) -> None:
        if self._filling and self._filling[0].used:
            segment = self._filling.pop()
            segment.start_copy(self._copier)
            self._last_used = None
            self._in_flight.append(segment)
