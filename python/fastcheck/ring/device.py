"""DeviceRing: record slots in the memory of one device, copied to the host asynchronously.

Slots come in segments. A segment is filled, copied to its pinned mirror, decoded once the copy's
event has passed, and filled again. There are as many segments as the host's lead over the device
needs: none is allocated any more once it has been that far ahead. Streams may take turns; a
segment's copy waits, on the device, for every stream that wrote to it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any, Callable, Optional

import numpy as np
import torch

from fastcheck.backends.backend import Backend, Observe
from fastcheck.backends.portable.traversal import dtype_and_order
from fastcheck.extension import status
from fastcheck.record.format import (
    BOX_DTYPE,
    Identity,
)
from fastcheck.utils.torch.own_operators import no_grad
from fastcheck.utils.torch.streams import DeviceStreams

from .depths import Depths
from .graph_slots import GraphSlots, MayWait
from .segments import Reserve, Rows, Segment

SEGMENT_SLOTS = 1024
# 12 MiB of records that the host has not seen yet.
MAX_SEGMENTS = 64
# Enough for a host that is two steps ahead, of a model of a few hundred modules.
_FIRST_SEGMENTS = 4


class DeviceRing:
    """Segments of records in a device's memory, and their copies to the host. Not thread-safe but
    for take(): the caller holds the session's lock.
    """

    def __init__(
        self,
        streams: DeviceStreams,
        backend: Backend,
        depths: Depths,
        segment_slots: int = SEGMENT_SLOTS,
        max_segments: int = MAX_SEGMENTS,
    ) -> None:
        self.backend = backend
        # Observations for which there was no slot.
        self.lost_count = 0
        self._streams = streams
        streams.exchange_capture_mode = backend.exchange_capture_mode
        self._index = streams.device.index or 0
        self._depths = depths
        self._segment_slots = segment_slots
        self._max_segments = max_segments
        self._copier = streams.new_stream()
        self._free: deque[Segment] = deque()
        self._filling: list[Segment] = []  # one, or none
        self._in_flight: list[Segment] = []
        self._taken_early: list[np.ndarray] = []
        self._segment_count = min(_FIRST_SEGMENTS, max_segments)
        self._free.extend(self._new_segment() for _ in range(self._segment_count))
        # The segment that observe() wrote to last, on a stream that it has waited for.
        self._last_used: Optional[Segment] = None
        # The reserve in use, and those that can be used again.
        self._spare: deque[Segment] = deque()
        self._reserve = self._new_reserve()
        # While a graph is captured: returns its slots, or None for a tensor outside of it.
        self.captured: Optional[Callable[[DeviceRing], Optional[GraphSlots]]] = None

    def observe(
        self,
        tensor: torch.Tensor,
        identity: tuple[int, ...],
        is_known_stream: bool = False,
        observe: Optional[Observe] = None,
    ) -> None:
        """Reads ``tensor`` into the next slot, on the current stream. No synchronisation.

        ``identity``: as of an Identity, but for the depth. ``is_known_stream``: the stream is that
        of the last call.
        ``observe`` takes the place of the backend's, where there is a free slot.
        """
        depths = self._depths
        depth = depths.now if depths.now == depths.whole else depths.of(tensor)
        identity = (*identity, depth)
        if self.captured is not None:
            slots = self.captured(self)
            if slots is not None:
                slots.observe(tensor, identity)
            return
        segment = self._segment()
        if segment is None:
            self._observe_in_reserve(tensor, identity)
            return
        if not is_known_stream or segment is not self._last_used:
            segment.use_on(self._streams.current())
            self._last_used = segment
        row = segment.cursor.slot
        (observe or self.backend.observe)(tensor, segment.slots, row, depth)
        segment.identities[row] = identity
        segment.cursor.slot = row + 1

    def next_rows(self) -> Optional[Rows]:
        """The rows that a recorder may write next, on the stream of the last observe(), until cut()
        and as long as there are rows. None before the first observe().
        """
        segment = self._last_used
        if segment is None:
            return None
        return Rows(self.backend.observe, segment.slots, segment.identities, segment.cursor)

    def observe_list(
        self,
        tensors: Sequence[torch.Tensor],
        sites: Sequence[int],
        step: int,
        first_seq: int,
        flags: int,
    ) -> None:
        """Reads many tensors in one call, or in several when they don't fit a segment."""
        depth = self._depths.now
        rows = _identities(tensors, sites, step, first_seq, flags, depth)
        self._observe_each(tensors, rows, depth)

    def observe_each(self, tensors: Sequence[torch.Tensor], identities: np.ndarray) -> None:
        """observe_list() of tensors with any identities: an array of int64, a row for each."""
        if self._depths.are_whole:
            self._observe_each(tensors, identities, self._depths.whole)
            return
        depths = identities[:, Identity._fields.index("depth")]
        for depth in np.unique(depths).tolist():
            chosen = np.flatnonzero(depths == depth)
            part = [tensors[at] for at in chosen.tolist()]
            self._observe_each(part, identities[chosen], depth)

    def _observe_each(
        self, tensors: Sequence[torch.Tensor], identities: np.ndarray, depth: int
    ) -> None:
        if self.captured is not None:
            slots = self.captured(self)
            if slots is not None:
                slots.observe_list(tensors, [*map(tuple, identities.tolist())])
            return
        done, count = 0, len(tensors)
        while done < count:
            segment = self._segment()
            if segment is None:
                for tensor, identity in zip(tensors[done:], identities[done:].tolist()):
                    self._observe_in_reserve(tensor, identity)
                return
            first, stop = segment.cursor.slot, self._segment_slots
            if count - done < stop - first:
                stop = first + count - done
            end = done + stop - first
            segment.use_on(self._streams.current())
            with no_grad():
                self.backend.observe_list(tensors[done:end], segment.slots, first, depth)
            segment.identities[first:stop] = identities[done:end]
            segment.cursor.slot = stop
            done = end

    def new_graph_slots(self, stream: Any, may_wait: MayWait) -> GraphSlots:
        """Slots for a graph whose capture has begun on ``stream``."""
        return GraphSlots(self._streams, self.backend, self._depths.whole, stream, may_wait)

    @property
    def is_capturing(self) -> bool:
        """True if a read now is captured into a graph."""
        return self._streams.is_capturing()

    def follow(self, slots: GraphSlots, shift: int, step: int) -> None:
        """A graph was replayed on the current stream: copies its slots. Waits for nothing.

        ``shift``: from the sequence numbers of the capture to those of this replay.
        """
        snapshot = slots.snapshot()
        if snapshot is None:
            self._take_early()
            snapshot = slots.snapshot()
        if snapshot is not None:
            snapshot.copy(shift, step, self._copier)
            self._in_flight.append(snapshot)
            return
        self.lost_count += len(slots.identities)
        identities = [
            each._replace(seq=each.seq + shift, step=step, depth=max(each.depth, slots.depth))
            for each in itertools.starmap(Identity, slots.identities)
        ]
        with no_grad():
            self._reserve.keep(torch.cat(slots.pieces())[1:], identities)

    def cut(self) -> tuple[list[np.ndarray], list[Segment]]:
        """Starts the copy of what was written since the last cut. Returns the records of it that
        are here already, and the segments that are in flight: each has to come back through take().
        """
        self._send()
        segments, self._in_flight = self._in_flight, []
        records, self._taken_early = self._taken_early, []
        if self._reserve.cut(self._copier):
            segments.append(self._reserve)
            self._reserve = self._new_reserve()
        return records, segments

    def take(self, segment: Segment) -> np.ndarray:
        """The records of a segment whose copy is done. May be called by any one thread."""
        records = segment.take(self.backend)
        if segment.pool is not None:
            segment.pool.append(segment)
        return records

    def rescue(self, segment: Segment) -> np.ndarray:
        """take(), of a segment that is lost with its device: those of its non-finite records that
        the device's black box holds.
        """
        box = self.backend.black_box
        rows = b"" if box is None else box.contents(self._index)
        return segment.rescue(np.frombuffer(rows, BOX_DTYPE), self.backend)

    def check(self) -> None:
        """Raises what the device reports if it is lost. Does not wait."""
        self._streams.is_done(self._streams.current())

    def _observe_in_reserve(self, tensor: torch.Tensor, identity: Sequence[int]) -> None:
        self.lost_count += 1
        with no_grad():
            self._reserve.observe(tensor, Identity(*identity))

    def _new_reserve(self) -> Reserve:
        if self._spare:
            spare = self._spare.popleft()
            assert isinstance(spare, Reserve)
            return spare
        with torch.inference_mode(False):
            reserve = Reserve(self._streams, self.backend)
        reserve.pool = self._spare
        return reserve

    def _new_segment(self) -> Segment:
        segment = Segment(self._streams, self._segment_slots)
        segment.pool = self._free
        return segment

    def _segment(self) -> Optional[Segment]:
        """The segment to write to; None when all of max_segments are in flight."""
        if self._filling and self._filling[0].cursor.slot == self._segment_slots:
            self._send()
        if not self._filling:
            if not self._free:
                self._take_early()
            if self._free:
                self._fill(self._free.popleft())
            elif self._segment_count < self._max_segments:
                self._segment_count += 1
                self._fill(self._new_segment())
        return self._filling[0] if self._filling else None

    def _fill(self, segment: Segment) -> None:
        if self.backend.black_box is not None:
            segment.stretch = self.backend.black_box.begin(self._index)
        self._filling.append(segment)

    def _take_early(self) -> None:
        """Takes the segments whose copies are done, to reuse them within a step of very many
        records.
        """
        while self._in_flight and self._in_flight[0].is_ready:
            self._taken_early.append(self.take(self._in_flight.pop(0)))

    def _send(self) -> None:
        if self._filling and self._filling[0].cursor.slot:
            segment = self._filling.pop()
            segment.start_copy(self._copier)
            self._last_used = None
            self._in_flight.append(segment)


def _identities_in_python(
    tensors: Sequence[torch.Tensor],
    sites: Sequence[int],
    step: int,
    first_seq: int,
    flags: int,
    depth: int,
) -> np.ndarray:
    rows = [
        (first_seq + at, step, 0, site, flags, *dtype_and_order(tensor), depth)
        for at, (site, tensor) in enumerate(zip(sites, tensors))
    ]
    return np.array(rows, np.int64).reshape(len(rows), len(Identity._fields))


# A row for each tensor, as an Identity.
_identities: Callable[[Sequence[torch.Tensor], Sequence[int], int, int, int, int], np.ndarray]
_identities = _identities_in_python if status.module is None else status.module.identities


# Slots of a captured graph
