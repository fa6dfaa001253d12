"""Finds where a run continues another: the step of one whose weights, or batch, the other begins
with.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

import numpy as np

from fastcheck.comparison.block import Block, Kind, Phase, Source
from fastcheck.comparison.names import NameTable, Renaming
from fastcheck.record.format import Depth

#: The part of the weights that has to be equal to the bit: one tensor may not have been restored.
_ENOUGH = 0.5


class Shift(NamedTuple):
    """``steps``: the step of the reference minus that of actual. ``reason``: how that is known."""

    steps: int
    reason: str


class _Side:
    """Checksums of the steps of the lowest rank."""

    def __init__(self, source: Source) -> None:
        self._source, self._names, self._renaming = source, NameTable(), Renaming.of(None)
        self.rank = min(rank for _, rank in source.places())
        self.steps = [step for step, rank in source.places() if rank == self.rank]

    def read(self, step: int) -> tuple[frozenset[int], frozenset[int]]:
        """Those of the weights, and of the batch."""
        block = self._source.block(step, self.rank, self._names, self._renaming, step == 0)
        numbers = np.unique(block.names).tolist()
        parameters = [n for n in numbers if self._names[n].role == "param"]
        weights = np.isin(block.names, parameters) & (block.records["numel"] > 1)
        return _checksums(block, weights), _checksums(block, block.phases == Phase.BATCHES)


def _checksums(block: Block, which: np.ndarray) -> frozenset[int]:
    which = which & (block.records["depth"] == Depth.FULL)
    return frozenset(block.records["checksum"][which].tolist())


def find_shift(actual: Source, reference: Source) -> Optional[Shift]:
    """None where steps of one number belong together, or nothing tells which do."""
    if actual.kind is not Kind.LOG or reference.kind is not Kind.LOG:
        return None
    ours, theirs = _Side(actual), _Side(reference)
    for one, other, sign in ((ours, theirs, 1), (theirs, ours, -1)):
        found = _place_of(one, other)
        if found is not None:
            step, reason = found
            return Shift(sign * (step - one.steps[0]), reason)
    return None


def _place_of(one: _Side, other: _Side) -> Optional[tuple[int, str]]:
    """The step of ``other`` at which ``one`` begins."""
    start = one.steps[0]
    weights, batch = one.read(start)
    before = other.read(start) if start in other.steps else (frozenset(), frozenset())
    if batch == before[1] and weights == before[0]:
        return None
    best, same_batch = (len(weights & before[0]), start), []
    for step in other.steps:
        found = other.read(step)
        if len(weights & found[0]) > best[0]:
            best = (len(weights & found[0]), step)
        if batch and batch == found[1]:
            same_batch.append(step)
        if weights and weights == found[0]:
            break
    count, step = best
    if step != start and count >= _ENOUGH * len(weights):
        whole = "the weights are" if count == len(weights) else f"{count:,} weights are"
        return step, f"{whole} equal to the bit"
    if weights == before[0]:
        same_batch = [step for step in other.steps if batch and other.read(step)[1] == batch]
    if len(same_batch) == 1 and same_batch[0] != start:
        follows = [(s.steps.index(n) + 1, s) for s, n in ((one, start), (other, same_batch[0]))]
        after = [side.read(side.steps[at])[1] for at, side in follows if at < len(side.steps)]
        # One batch alone may be the same by chance, of data in another order.
        if len(after) == 2 and after[0] == after[1]:
            return same_batch[0], "the batch is equal to the bit, and the next one"
    return None
