"""Record slots of a captured graph, copied aside after each replay before the next overwrites them.

A slot has one address for as long as the graph lives: it is in memory of the graph's own pool,
taken in its capture, which nothing else gets while the graph may be replayed. In front of the slots
is a row that counts replays, on the device: how often they were written comes with the same copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Optional

import numpy as np
import torch

from fastcheck.backends.backend import Backend
from fastcheck.record.format import (
    RECORD_BYTES,
    RECORD_DTYPE,
    VALUE_BYTES,
    Flag,
    identify,
    nonfinite,
)
from fastcheck.utils.torch.own_operators import no_grad
from fastcheck.utils.torch.streams import DeviceStreams

from .segment import Segment

BLOCK_SLOTS = 1024
# Of one graph's copies in flight.
_MAX_BYTES = 12 * 2**20
# As many as a host that is max_lag=2 steps ahead needs, and one.
_FIRST_SNAPSHOTS = 4


class GraphSlots:
    """The slots of one segment of a graph, on one device.

    Not thread-safe: the caller holds the session's lock.
    """

    def __init__(self, streams: DeviceStreams, backend: Backend, depth: int) -> None:
        self.streams = streams
        self.backend = backend
        #: Each as of an Identity, with the numbers of the capture.
        self.identities: list[tuple[int, ...]] = []
        self._blocks: list[torch.Tensor] = []
        #: Replays that the host counted, and those that only the device did.
        self.replays = self.unseen_replays = 0
        self._depth = depth
        self._template: Optional[np.ndarray] = None
        self._free: deque[Segment] = deque()
        self._snapshot_count = 0

    # While the graph is captured

    def observe(self, tensor: torch.Tensor, identity: tuple[int, ...]) -> None:
        """Captures the reading of ``tensor`` into a slot."""
        block, row = self._next()
        self.backend.observe(tensor, block, row, self._depth)
        self.identities.append(identity)

    def observe_list(
        self, tensors: Sequence[torch.Tensor], identities: Sequence[tuple[int, ...]]
    ) -> None:
        done = 0
        while done < len(tensors):
            block, row = self._next()
            part = tensors[done : done + len(block) - row]
            with no_grad():
                self.backend.observe_list(part, block, row, self._depth)
            self.identities += identities[done : done + len(part)]
            done += len(part)

    def end_capture(self) -> None:
        """Captures the counter's increment, as the last launch of the graph."""
        if self._blocks:
            with no_grad():
                self._counter.add_(1)

    def start(self) -> None:
        """Prepares for the first replay. Called after the capture."""
        if not self._blocks:
            return
        with no_grad():
            self._counter.zero_()
        self._template = np.zeros(len(self.identities), RECORD_DTYPE)
        mode = self.backend.device_mode
        identify(self._template, self.identities, self._depth, mode)
        # Allocated here: allocating pinned memory may wait for the device.
        self._free.extend(self._new_snapshot() for _ in range(_FIRST_SNAPSHOTS))

    @property
    def _counter(self) -> torch.Tensor:
        return self._blocks[0].view(torch.int64)[0, :1]

    def _next(self) -> tuple[torch.Tensor, int]:
        """A block that has a free row, and which one that is."""
        row = 1 + len(self.identities)  # behind the counter
        if row >= BLOCK_SLOTS * len(self._blocks):
            with torch.inference_mode(False):
                self._blocks.append(self.streams.empty(BLOCK_SLOTS, RECORD_BYTES))
        return self._blocks[row // BLOCK_SLOTS], row % BLOCK_SLOTS

    # After a replay, on the stream that it runs on

    def snapshot(self) -> Optional[GraphCopy]:
        """A free copy; None when too many are in flight."""
        if self._free:
            found = self._free.popleft()
            assert isinstance(found, GraphCopy)
            return found
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

    def records(self, rows: np.ndarray, shift: int, step: int, number: int) -> np.ndarray:
        """The records in the rows of a snapshot that was taken after replay ``number``."""
        assert self._template is not None
        records: np.ndarray = self._template.copy()
        cells = records.view(np.uint8).reshape(len(records), RECORD_BYTES)
        cells[:, :VALUE_BYTES] = rows[1:, :VALUE_BYTES]
        records["seq"] += shift
        records["step"] = step
        records["flags"] |= nonfinite(records).astype(np.uint32) * np.uint32(Flag.NONFINITE)
        counted = int(rows[0, :8].view(np.int64)[0])
        self.unseen_replays = max(self.unseen_replays, counted - number)
        return records


class GraphCopy(Segment):
    """What the slots of a graph hold after one of its replays, and the mirror of that."""

    def __init__(self, slots: GraphSlots, pool: deque[Segment]) -> None:
        super().__init__(slots.streams, 1 + len(slots.identities))
        self.pool = pool
        self._of = slots
        self._shift = self._step = self._number = 0

    def copy(self, shift: int, step: int, copier: object) -> None:
        """Puts the copy on the current stream, and the one to the host behind it. No waiting.

        ``shift``: what the sequence numbers of the capture become larger by.
        """
        self._shift, self._step, self._number = shift, step, self._of.replays
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

    def take(self, depth: int, backend: Backend) -> np.ndarray:
        rows = self.mirror.numpy()
        return self._of.records(rows, self._shift, self._step, self._number)
