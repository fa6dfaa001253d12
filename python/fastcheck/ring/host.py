"""HostRing: a preallocated block of record slots that the kernels of the CPU write.

It never allocates after construction, and a record can be read as soon as it is written. A full
ring calls ``when_full``, which takes the records out, and starts again at the first slot.
``ring/device.py`` has the ring of other devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Callable, Optional

import numpy as np
import torch

from fastcheck.backends.backend import Observe
from fastcheck.backends.complete_records import host_observers, observe_on_host
from fastcheck.record.format import RECORD_DTYPE, nonfinite

from .cursor import Cursor, new_cursor

# 768 KiB: several steps of a model of a few hundred modules, so that it is rarely full in a step.
CAPACITY = 4096


class HostRing:
    """Slots [0, used) hold records. Not thread-safe: the caller holds the session's lock."""

    def __init__(
        self,
        depth: int,
        when_full: Callable[[], None],
        capacity: int = CAPACITY,
        cursor: Optional[Cursor] = None,
    ) -> None:
        # Not the default device, which the user may have set to another.
        slots = torch.zeros(capacity * RECORD_DTYPE.itemsize, dtype=torch.uint8, device="cpu")
        self.slots = slots
        self._records: np.ndarray = slots.numpy().view(RECORD_DTYPE)
        self.capacity = capacity
        self._cursor = cursor or new_cursor()
        self.depth = int(depth)
        self._when_full = when_full
        self._observe, self._observe_list = host_observers()

    @property
    def used(self) -> int:
        return self._cursor.slot

    @used.setter
    def used(self, value: int) -> None:
        self._cursor.slot = value

    def observe(
        self,
        tensor: torch.Tensor,
        site: int,
        call: int,
        step: int,
        seq: int,
        flags: int,
        observe: Optional[Observe] = None,
    ) -> bool:
        """Reads ``tensor`` into the next slot. True when it holds anything non-finite."""
        is_bad = self.write(tensor, self.next_slot(), site, call, step, seq, flags, observe)
        # After the write: a tensor that the kernel refuses takes no slot.
        self.used += 1
        return is_bad

    def next_slot(self) -> int:
        """The number of a free slot; after writing it the caller increments ``used``."""
        if self.used == self.capacity:
            self._when_full()
        return self.used

    def write(
        self,
        tensor: torch.Tensor,
        index: int,
        site: int,
        call: int,
        step: int,
        seq: int,
        flags: int,
        observe: Optional[Observe] = None,
    ) -> bool:
        """Reads ``tensor`` into this slot. True when it holds anything non-finite. ``observe``
        takes the place of the backend's.
        """
        identity = site, call, step, seq, flags
        if observe is not None:
            return observe_on_host(tensor, self.slots, index, self.depth, *identity, observe)
        is_bad: bool = self._observe(tensor, self.slots, index, self.depth, *identity)
        return is_bad

    def observe_list(
        self,
        tensors: Sequence[torch.Tensor],
        sites: Sequence[int],
        step: int,
        first_seq: int,
        flags: int,
    ) -> Iterator[np.ndarray]:
        """Reads many tensors in one call, or in several when they don't fit.

        Yields copies of the records that are non-finite; the caller has to exhaust it.
        """
        start = 0
        while start < len(tensors):
            if self.used == self.capacity:
                self._when_full()
            stop = min(len(tensors), start + self.capacity - self.used)
            found = self._observe_list(
                list(tensors[start:stop]),
                self.slots,
                self.used,
                self.depth,
                list(sites[start:stop]),
                step,
                first_seq + start,
                flags,
            )
            part = self._records[self.used : self.used + stop - start]
            self.used += stop - start
            start = stop
            if found:
                yield part[nonfinite(part)].copy()

    def last(self) -> np.void:
        """A copy of the record that was written last."""
        record: np.void = self._records[self.used - 1].copy()
        return record

    def take(self) -> np.ndarray:
        """A copy of every record in the ring, oldest first; the ring is empty afterwards."""
        records: np.ndarray = self._records[: self.used].copy()
        self.used = 0
        return records
