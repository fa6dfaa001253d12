"""The ring: a preallocated block of record slots on one device, written by the kernels.

It never allocates after start. When it is full it asks its owner to take the records out (the drain
does that), then starts again at the first slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Callable

import torch

from ._extension import extension
from ._record import RECORD_DTYPE

__all__ = ["Ring"]

# 768 KiB: several steps of a model of a few hundred modules, so that a drain is rare within a step.
CAPACITY = 4096


class Ring:
    """Slots [0, used) hold records with consecutive sequence numbers, the last of them ``next_seq -
    1``.

    Sequence numbers start at 0 when the monitor is installed and never repeat. Not thread-safe: the
    caller holds the monitor's lock.
    """

    def __init__(self, depth: int, when_full: Callable[[], None], capacity: int = CAPACITY) -> None:
        self.slots = torch.zeros(capacity * RECORD_DTYPE.itemsize, dtype=torch.uint8)
        self.capacity = capacity
        self.used = 0
        self.next_seq = 0
        self._depth = int(depth)
        self._when_full = when_full
        self._observe = extension.observe
        self._observe_list = extension.observe_list

    def observe(self, tensor: torch.Tensor, site: int, call: int, step: int, flags: int) -> bool:
        """Reads ``tensor`` into the next slot. True when it holds anything non-finite."""
        if self.used == self.capacity:
            self._when_full()
        nonfinite: bool = self._observe(
            tensor, self.slots, self.used, self._depth, site, call, step, self.next_seq, flags
        )
        # Only now: a tensor that the kernel refuses takes no slot.
        self.used += 1
        self.next_seq += 1
        return nonfinite

    def observe_list(
        self, tensors: Sequence[torch.Tensor], sites: Sequence[int], step: int, flags: int
    ) -> Iterator[range]:
        """Reads many tensors in one call, or in several when they don't fit.

        Yields the sequence numbers of each call that found anything non-finite, while its records
        are still in the ring; the caller has to exhaust it.
        """
        start = 0
        while start < len(tensors):
            if self.used == self.capacity:
                self._when_full()
            stop = min(len(tensors), start + self.capacity - self.used)
            first = self.next_seq
            nonfinite = self._observe_list(
                list(tensors[start:stop]),
                self.slots,
                self.used,
                self._depth,
                list(sites[start:stop]),
                step,
                first,
                flags,
            )
            self.used += stop - start
            self.next_seq += stop - start
            start = stop
            if nonfinite:
                yield range(first, self.next_seq)
