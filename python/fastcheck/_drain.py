"""The drain: brings records from a ring to the host, as a structured array.

On the CPU the ring is host memory and a record is there as soon as it is written. On an accelerator
this is where the asynchronous copy to pinned memory belongs.
"""

from __future__ import annotations

import numpy as np

from ._record import RECORD_DTYPE
from ._ring import Ring

__all__ = ["Drain"]


class Drain:
    """Takes records out of one ring. Not thread-safe: the caller holds the monitor's lock."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._records: np.ndarray = ring.slots.numpy().view(RECORD_DTYPE)

    def peek(self, seq: int) -> np.void:
        """A copy of a record that is still in the ring."""
        slot = seq - (self._ring.next_seq - self._ring.used)
        record: np.void = self._records[slot].copy()
        return record

    def nonfinite(self, seqs: range) -> list[int]:
        """Which of these records, all still in the ring, hold anything non-finite; in order."""
        first = seqs.start - (self._ring.next_seq - self._ring.used)
        part = self._records[first : first + len(seqs)]
        counts = part["nan_count"] + part["posinf_count"] + part["neginf_count"]
        return [seqs.start + int(index) for index in np.flatnonzero(counts)]

    def take(self) -> np.ndarray:
        """A copy of every record in the ring, oldest first; the ring is empty afterwards."""
        records: np.ndarray = self._records[: self._ring.used].copy()
        self._ring.used = 0
        return records
