"""DeviceRing: record slots in the memory of one device, copied to the host asynchronously.

Slots come in segments. A segment is filled, copied to its pinned mirror, decoded once the copy's
event has passed, and filled again. There are as many segments as the host's lead over the device
needs: none is allocated any more once it has been that far ahead. Streams may take turns; a
segment's copy waits, on the device, for every stream that wrote to it.

GraphSlots are the record slots of a captured graph, copied aside after each replay before the next
overwrites them. A slot has one address for as long as the graph lives: it is in memory of the
graph's own pool, taken in its capture, which nothing else gets while the graph may be replayed. In
front of the slots is a row that counts replays, on the device: how often they were written comes
with the same copy.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple, Optional

import numpy as np
import torch

from fastcheck.backends.backend import Backend, Observe
from fastcheck.backends.portable.traversal import dtype_and_order
from fastcheck.extension import status
from fastcheck.record.format import (
    BOX_DTYPE,
    RECORD_BYTES,
    RECORD_DTYPE,
    VALUE_BYTES,
    Depth,
    DeviceMode,
    Flag,
    Identity,
    identify,
    nonfinite,
    offset_of,
)
from fastcheck.utils.torch.lost_device import is_lost
from fastcheck.utils.torch.own_operators import no_grad
from fastcheck.utils.torch.streams import DeviceStreams

from .depths import Depths
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


SEGMENT_SLOTS = 1024
# 12 MiB of records that the host has not seen yet.
MAX_SEGMENTS = 64
# Enough for a host that is two steps ahead, of a model of a few hundred modules.
_FIRST_SEGMENTS = 4


class Rows(NamedTuple):
    """The rows that a recorder writes to; the next row is ``cursor.slot``."""

    observe: Callable[..., None]
    slots: torch.Tensor
    identities: np.ndarray
    cursor: Cursor


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

BLOCK_SLOTS = 1024
# Most bytes of one graph's copies in flight.
_MAX_BYTES = 12 * 2**20
# The number that a host needs that is max_lag=2 steps ahead, and one.
_FIRST_SNAPSHOTS = 4


#: (tensor, site): as of HookRecorder.has_passed().
MayWait = Callable[[torch.Tensor, int], bool]
# The most small tensors that wait, as in csrc/torch/read/waiting.h.
_MOST_WAITING = 32


# Gates of a graph's launches, words in the device's memory: a launch reads nothing while its gate
# is 0. This one is open where a replay reads at all; the others, by depth, where it reads so deep.
_ANY = 0


def _is_open(gate: int, depth: int) -> bool:
    return gate == depth if gate != _ANY else depth > 0


class _Waiting(NamedTuple):
    """A small tensor that is to be read with others, and what it was when it was seen."""

    alias: torch.Tensor
    identity: tuple[int, ...]
    version: int
    address: int

    @property
    def is_unchanged(self) -> bool:
        return self.alias._version == self.version and self.alias.data_ptr() == self.address


@dataclass(eq=False)
class GraphSlots:
    """The slots of one segment of a graph, on one device. ``stream``: where its capture began.

    Small tensors wait for each other (csrc/torch/read/waiting.h) on that stream alone: the capture
    ends in failure where something is put on another stream after the two were joined.

    Not thread-safe: the caller holds the session's lock.
    """

    streams: DeviceStreams
    backend: Backend
    _whole: int
    _stream: Any
    _may_wait: MayWait

    def __post_init__(self) -> None:
        self._waiting: list[_Waiting] = []
        #: The numbers of tensors that were overwritten before they were read.
        self.unread: list[int] = []
        #: Each as of an Identity, with the numbers of the capture.
        self.identities: list[tuple[int, ...]] = []
        self._blocks: list[torch.Tensor] = []
        #: Replays that the host counted, and those that only the device did.
        self.replays = self.unseen_replays = 0
        #: The depth of what the next replay reads; 0: nothing.
        self.depth = 0
        self._used_gates: set[int] = set()
        self._template: Optional[np.ndarray] = None
        self._free: deque[Segment] = deque()
        self._snapshot_count = 0

    # While the graph is captured

    def observe(self, tensor: torch.Tensor, identity: tuple[int, ...]) -> None:
        """Captures the reading of ``tensor`` into a slot, with others if it may wait for them."""
        site = Identity(*identity).site
        if self.streams.current() != self._stream or not self._may_wait(tensor, site):
            self.observe_list([tensor], [identity])
            return
        with no_grad():
            alias = tensor.detach()
        self._waiting.append(_Waiting(alias, identity, alias._version, alias.data_ptr()))
        if len(self._waiting) == _MOST_WAITING:
            self.read_waiting()

    def read_waiting(self) -> None:
        """Captures the reading of what waits; a tensor that was overwritten is left unread."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        whole = [each for each in waiting if each.is_unchanged]
        self.unread += [Identity(*each.identity).seq for each in waiting if not each.is_unchanged]
        with self.streams.on(self._stream):
            for depth in dict.fromkeys(each.identity[-1] for each in whole):
                part = [each for each in whole if each.identity[-1] == depth]
                self.observe_list([each.alias for each in part], [each.identity for each in part])

    def observe_list(
        self, tensors: Sequence[torch.Tensor], identities: Sequence[tuple[int, ...]]
    ) -> None:
        """Captures the reading of tensors into slots, all of them to the same depth. What isn't
        read whole in each step is captured twice: at each replay one of the two launches reads.
        """
        capture_list = self.backend.capture_list
        assert capture_list is not None
        depth = identities[0][-1] if identities else self._whole
        launches = {_ANY: depth} if depth == self._whole else {d: d for d in (depth, self._whole)}
        self._used_gates.update(launches)
        done = 0
        while done < len(tensors):
            block, row = self._next()
            part = tensors[done : done + len(block) - row]
            for gate, depth in launches.items():
                with no_grad():
                    capture_list(part, block, row, depth, gate=self._gates[gate : gate + 1])
            self.identities += identities[done : done + len(part)]
            done += len(part)

    def end_capture(self) -> None:
        """Captures the counter's increment, as the last launch of the graph."""
        self.read_waiting()
        if self._blocks:
            with no_grad():
                self._counter.add_(1)

    def start(self) -> None:
        """Prepares for the first replay. Called after the capture."""
        if not self._blocks:
            return
        with no_grad():
            self._counter.zero_()
            self._gates.zero_()
        self.let_read(self._whole)
        self._template = np.zeros(len(self.identities), RECORD_DTYPE)
        mode = self.backend.device_mode
        identify(self._template, self.identities, mode)
        # Allocated here: allocating pinned memory may wait for the device.
        self._free.extend(self._new_snapshot() for _ in range(_FIRST_SNAPSHOTS))

    @property
    def _counter(self) -> torch.Tensor:
        return self._blocks[0].view(torch.int64)[0, :1]

    @property
    def _gates(self) -> torch.Tensor:
        return self._blocks[0].view(torch.int32)[0, 2 : 3 + max(Depth)]  # behind the counter

    def _next(self) -> tuple[torch.Tensor, int]:
        """A block that has a free row, and which row that is."""
        row = 1 + len(self.identities)  # behind the row of the counter and the gates
        if row >= BLOCK_SLOTS * len(self._blocks):
            with torch.inference_mode(False):
                self._blocks.append(self.streams.empty(BLOCK_SLOTS, RECORD_BYTES))
        return self._blocks[row // BLOCK_SLOTS], row % BLOCK_SLOTS

    # Before and after a replay, on the stream that it runs on

    def let_read(self, depth: int) -> None:
        """The kernels of later replays read to this depth; 0: they return at once and leave the
        slots as they are.
        """
        if depth == self.depth or not self._blocks:
            return
        before, self.depth = self.depth, depth
        with no_grad():
            for gate in self._used_gates:
                if _is_open(gate, depth) != _is_open(gate, before):
                    self._gates[gate].fill_(int(_is_open(gate, depth)))

    def snapshot(self) -> Optional[GraphCopy]:
        """A free copy; None when too many are in flight."""
        if self._free:
            free_copy = self._free.popleft()
            assert isinstance(free_copy, GraphCopy)
            return free_copy
        rows = 1 + len(self.identities)
        if self._snapshot_count >= max(_FIRST_SNAPSHOTS, _MAX_BYTES // (rows * RECORD_BYTES)):
            return None
        return self._new_snapshot()

    def _new_snapshot(self) -> GraphCopy:
        self._snapshot_count += 1
        with torch.inference_mode(False):
            return GraphCopy(self, self._free)

    def pieces(self) -> list[torch.Tensor]:
        """The rows that are in use, the counter's first."""
        rows = 1 + len(self.identities)
        return [
            block[: rows - first] for first, block in zip(range(0, rows, BLOCK_SLOTS), self._blocks)
        ]

    def records(
        self, rows: np.ndarray, shift: int, step: int, number: int, depth: int
    ) -> np.ndarray:
        """The records in the rows of a snapshot that was taken after replay ``number``, which has
        read to this depth.
        """
        assert self._template is not None
        records: np.ndarray = self._template.copy()
        cells = records.view(np.uint8).reshape(len(records), RECORD_BYTES)
        cells[:, :VALUE_BYTES] = rows[1:, :VALUE_BYTES]
        records["seq"] += shift
        records["step"] = step
        np.maximum(records["depth"], depth, out=records["depth"], casting="unsafe")
        records["flags"] |= nonfinite(records).astype(np.uint32) * np.uint32(Flag.NONFINITE)
        counted = int(rows[0, :8].view(np.int64)[0])
        self.unseen_replays = max(self.unseen_replays, counted - number)
        return records


class GraphCopy(Segment):
    """A copy of what the slots of a graph hold after one of its replays, and the mirror of that."""

    def __init__(self, slots: GraphSlots, pool: deque[Segment]) -> None:
        super().__init__(slots.streams, 1 + len(slots.identities))
        self.pool = pool
        self._of = slots
        self._shift = self._step = self._number = self._depth = 0

    def copy(self, shift: int, step: int, copier: object) -> None:
        """Puts the copy on the current stream, and the copy to the host behind it. No waiting.

        ``shift``: what the sequence numbers of the capture become larger by.
        """
        self._shift, self._step, self._number = shift, step, self._of.replays
        self._depth = self._of.depth
        self.use_on(self._streams.current())
        with no_grad():
            done = 0
            for piece in self._of.pieces():
                self.slots[done : done + len(piece)].copy_(piece, non_blocking=True)
                done += len(piece)
        self.start_copy(copier)

    @property
    def used(self) -> int:
        return len(self.slots)

    def take(self, backend: Backend) -> np.ndarray:
        rows = self.mirror.numpy()
        return self._of.records(rows, self._shift, self._step, self._number, self._depth)
