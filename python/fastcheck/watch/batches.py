"""Batches: the sequence of the batches' checksums, and the patterns in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from .numbers import Number

_BATCHES = 64
# The numbers of steps, of runs of one batch, and of rounds of a cycle that make a pattern.
_SAME, _RUNS, _ROUNDS = 64, 16, 4


class Batches:
    """The sequence of the batches' checksums, and the patterns in it, each reported once."""

    def __init__(self) -> None:
        self._last: deque[int] = deque(maxlen=_BATCHES * (_ROUNDS + 1))
        # The last batches with their steps.
        self._recent: deque[tuple[int, int]] = deque(maxlen=_BATCHES)
        self._runs: deque[int] = deque(maxlen=_RUNS + 1)
        self._run = 0
        self._steps = 0

    def last(self, before: int, count: int) -> tuple[int, list[int]]:
        """The last ``count`` steps before a step: the number of the latest, and their checksums,
        oldest first.
        """
        known = [(step, value) for step, value in self._recent if step < before][-count:]
        return known[-1][0] if known else -1, [value for _, value in known]

    def of_step(self, step: int, checksums: Sequence[int]) -> list[Number]:
        """Takes in a step, with the checksums of its batch."""
        if not any(checksums):
            return []
        found: list[Number] = []
        value = hash(tuple(checksums))
        before = self._last[-1] if self._last else None
        self._last.append(value)
        self._recent.append((step, value))
        self._steps += 1
        if before == value:
            self._run += 1
        else:
            if before is not None:
                self._runs.append(self._run)
            self._run = 1
            if len(self._runs) > 1 and self._runs[1] > 1:
                found += self._repeated()
        if self._run == self._steps == _SAME:
            found.append(Number("same_batch", _SAME))
        if self._run == 1 and self._steps % _BATCHES == 0:
            found += self._cycle()
        return found

    def _repeated(self) -> Iterator[Number]:
        """Reports batches that come several times in a row. The first run may be incomplete and is
        left out.
        """
        runs = list(self._runs)[1:]
        if len(runs) == _RUNS and len(set(runs)) == 1:
            yield Number("repeated_batch", runs[0], _RUNS)

    def _cycle(self) -> Iterator[Number]:
        last = list(self._last)
        for period in range(2, _BATCHES + 1):
            count = period * _ROUNDS
            if len(last) < count + period:
                return
            if last[-count:] == last[-count - period : -period]:
                yield Number("cycle", period)
                return
