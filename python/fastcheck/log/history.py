"""The records of the last steps, in memory: for trends, the stop report and monitor.records()."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Callable, Optional

import numpy as np

from fastcheck.record.format import BYTES_DTYPE, RECORD_DTYPE, DeviceMode, Flag

# 48 MiB: a hundred steps of some thousand records, fewer of larger steps.
MAX_RECORDS = 262144
# A step that never closes (a served model) must not grow for ever: 12 MiB of records.
MAX_STEP_RECORDS = 65536


class History:
    """Chunks of records as they were drained: those of the open step, and those of the last
    ``steps`` closed steps. ``is_logged``: take_unlogged() is called.

    Not thread-safe: the caller holds the monitor's lock.
    """

    def __init__(
        self, steps: int, max_step_records: int = MAX_STEP_RECORDS, is_logged: bool = True
    ) -> None:
        self._steps = steps
        self._closed: deque[np.ndarray] = deque()
        self._closed_count = 0
        #: The records of the open step, in pieces, oldest first. To be read only.
        self.open_chunks: list[np.ndarray] = []
        # Their first sequence numbers, and how many records they have together.
        self._starts: list[int] = []
        self._open_count = 0
        self._is_logged = is_logged
        self._unlogged: list[np.ndarray] = []
        self._max_step_records = max_step_records
        self.dropped_records = 0

    @property
    def is_full(self) -> bool:
        """True if the open step holds more records than the limit; drop_oldest() removes some."""
        return self._open_count > self._max_step_records

    def add(self, records: np.ndarray) -> None:
        """Adds to the open step."""
        count = records.size
        if count:
            self.open_chunks.append(records)
            self._starts.append(int(records["seq"][0]))
            self._open_count += count
            if self._is_logged:
                self._unlogged.append(records)

    def drop_oldest(self) -> None:
        """Drops the oldest records of the open step until a quarter of what fits is free. Those
        with a verdict stay, but no more of them than half of what fits.
        """
        before, most = self._open_count, self._max_step_records
        excess = before - most * 3 // 4
        kept: list[np.ndarray] = []
        while self.open_chunks and excess > 0:
            chunk = self.open_chunks.pop(0)
            judged = chunk[(chunk["flags"] >> 8) != 0]
            excess -= len(chunk) - len(judged)
            if len(judged):
                kept.append(judged)
        if kept:
            self.open_chunks.insert(0, joined(kept)[-(most // 2) :].copy())
        self._starts = [int(chunk["seq"][0]) for chunk in self.open_chunks]
        self._open_count = sum(map(len, self.open_chunks))
        self.dropped_records += before - self._open_count

    def close_step(self) -> None:
        """Makes the open step the youngest closed step; the oldest closed step may go."""
        chunks = self.open_chunks
        if chunks:
            self._closed.append(chunks[0] if len(chunks) == 1 else joined(chunks))
            self._closed_count += self._open_count
            while len(self._closed) > self._steps or (
                self._closed_count > MAX_RECORDS and len(self._closed) > 1
            ):
                self._closed_count -= len(self._closed.popleft())
        self.open_chunks, self._starts, self._open_count = [], [], 0
        self._unlogged = []

    def take_unlogged(self) -> np.ndarray:
        """The records of the open step that were not handed out by this before. To be read only:
        they may be those that are held.
        """
        parts, self._unlogged = self._unlogged, []
        return parts[0] if len(parts) == 1 else joined(parts)

    def set_flags(self, seq: int, flags: int) -> None:
        """Adds flag bits to a record of the open step, in place. Verdict bits are replaced."""
        place = self._find_open(seq)
        if place is not None:
            chunk, index = place
            chunk["flags"][index] = (int(chunk["flags"][index]) & 0xFF) | flags

    def find(self, seq: int) -> Optional[np.void]:
        """The record with this sequence number; None if it is no longer in memory."""
        place = self._find_open(seq) or _find(reversed(self._closed), seq)
        if place is None:
            return None
        return place[0][place[1]].copy()

    def _find_open(self, seq: int) -> Optional[tuple[np.ndarray, int]]:
        # Each pass is a piece at op level. Only where a device is read from several threads may
        # another piece hold it than the piece that it falls into.
        at = bisect_right(self._starts, seq) - 1
        likely = iter(self.open_chunks[at : at + 1] if at >= 0 else ())
        return _find(likely, seq) or _find(reversed(self.open_chunks), seq)

    def between(self, first: int, stop: int) -> np.ndarray:
        """The records of the open step with these sequence numbers, oldest first."""
        if self._starts and first >= self._starts[-1]:
            at = first - self._starts[-1]
            part = self.open_chunks[-1][at : at + stop - first]
            # No number is missing, as a rule.
            if part.size == stop - first > 0 and part["seq"][-1] == stop - 1:
                return part
        parts = []
        for chunk in reversed(self.open_chunks):
            numbers = chunk["seq"]
            if numbers[-1] < first:
                break
            # Not searchsorted(), which copies a column of records first.
            parts.append(chunk[bisect_left(numbers, first) : bisect_left(numbers, stop)])
        return parts[0] if len(parts) == 1 else joined(parts[::-1])

    def of_site(self, site: int, call: int) -> np.ndarray:
        """The records in memory of one site and call index, oldest first."""
        parts = [
            chunk[(chunk["site"] == site) & (chunk["call"] == call)]
            for chunk in (*self._closed, *self.open_chunks)
        ]
        return joined(parts)

    def latest(self, site: int) -> Optional[np.void]:
        """The latest record of this site in memory."""
        return self._youngest(lambda chunk: chunk["site"] == site)

    def latest_of(self, sites: set[int]) -> np.ndarray:
        """The latest record in memory of each of these sites, oldest first."""
        left, records = sites.copy(), []
        for chunk in self._youngest_first():
            if not left:
                break
            mine = chunk[np.isin(chunk["site"], list(left))]
            for record in mine[::-1]:
                if int(record["site"]) in left:
                    left.discard(int(record["site"]))
                    records.append(record)
        return np.array(records[::-1], RECORD_DTYPE)

    def last_finite_step(self, site: int) -> Optional[int]:
        """The step of the latest record in memory of this site that was finite. A weight may hold
        the largest number on purpose.
        """
        record = self._youngest(lambda chunk: (chunk["site"] == site) & _is_finite(chunk))
        return None if record is None else int(record["step"])

    def last_finite(self, record: np.void) -> Optional[np.void]:
        """The latest finite record in memory of the same site and call in an earlier step."""
        return self._youngest(
            lambda chunk: (
                (chunk["site"] == record["site"])
                & (chunk["call"] == record["call"])
                & (chunk["step"] < record["step"])
                & has_not_overflowed(chunk)
            )
        )

    def _youngest_first(self) -> Iterator[np.ndarray]:
        yield from reversed(self.open_chunks)
        yield from reversed(self._closed)

    def _youngest(self, is_wanted: Callable[[np.ndarray], np.ndarray]) -> Optional[np.void]:
        for chunk in self._youngest_first():
            matches = chunk[is_wanted(chunk)]
            if len(matches):
                return matches[-1].copy()
        return None

    def all(self) -> np.ndarray:
        """The records in memory, oldest first, as one array."""
        return joined([*self._closed, *self.open_chunks])

    def last_step(self) -> np.ndarray:
        """The records of the open step or, when it has none yet, of the last closed step."""
        if self.open_chunks:
            return joined(self.open_chunks)
        return self._closed[-1].copy() if self._closed else joined([])


def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """``np.concatenate(parts)`` of records, also of none."""
    if not parts:
        return np.zeros(0, RECORD_DTYPE)
    whole: np.ndarray = np.concatenate([part.view(BYTES_DTYPE) for part in parts])
    return whole.view(RECORD_DTYPE)


def has_not_overflowed(records: np.ndarray) -> np.ndarray:
    """A boolean array of the records that are finite, and show no saturation of their device."""
    saturating = records["device_mode"] == int(DeviceMode.SATURATING)
    return _is_finite(records) & ~(saturating & (records["saturated_count"] != 0))


def _is_finite(records: np.ndarray) -> np.ndarray:
    return (records["flags"] & int(Flag.NONFINITE)) == 0


def _find(chunks: Iterator[np.ndarray], seq: int) -> Optional[tuple[np.ndarray, int]]:
    for chunk in chunks:
        numbers = chunk["seq"]
        index = bisect_left(numbers, seq)  # not searchsorted(), which copies the column first
        if index < len(numbers) and numbers[index] == seq:
            return chunk, index
    return None
