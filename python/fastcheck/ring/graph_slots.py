"""GraphSlots: the record slots of a captured graph, copied aside after each replay before the next
overwrites them.

A slot has one address for as long as the graph lives: it is in memory of the graph's own pool,
taken in its capture, which nothing else gets while the graph may be replayed. In front of the slots
is a row that counts replays, on the device: how often they were written comes with the same copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple, Optional

import numpy as np
import torch

from fastcheck.backends.backend import Backend
from fastcheck.record.format import (
    RECORD_BYTES,
    RECORD_DTYPE,
    VALUE_BYTES,
    Depth,
    Flag,
    Identity,
    identify,
    nonfinite,
)
from fastcheck.utils.torch.own_operators import no_grad
from fastcheck.utils.torch.streams import DeviceStreams

from .segments import Segment

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
