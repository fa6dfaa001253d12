"""Batches that differ, and are those of other steps, or the same samples in another order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Callable, Optional

import numpy as np

from fastcheck.record.format import COUNTS
from fastcheck.record.statistics import extreme_values

from .block import Block
from .split import merged

_MOST = 100_000
_ENDS = ("min", "max")
#: Sums of the same numbers in another order agree to this.
_SUMMED = 1e-6
#: Numbers that span less may have the same sums by chance.
_SPAN = 16


class BatchOrder:
    """The batches of one rank: ``held`` has the step and both checksums of each, by number of the
    name. Counts, extremes and sums are added up from the ``first`` step on whose batches differ,
    ``until`` those of all inputs are the same on both sides.
    """

    def __init__(self) -> None:
        #: A sentence on what the first inputs that differ are of the others of their step.
        self.exchanged = ""
        self.held: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        self.first = 0
        self.until: Optional[int] = None
        #: Where one side continues the other, and begins with the first batches of it: the place of
        #: the longer side, the step that has them there, and that which is compared with them.
        self.again: Optional[tuple[int, int, int]] = None
        self._totals: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def keep(
        self,
        step: int,
        names: np.ndarray,
        left: np.ndarray,
        right: np.ndarray,
        label: Callable[[int], str] = str,
    ) -> None:
        """Adds the batches of a step, by the numbers of their names and both sides' records.
        ``label``: the name of a number.
        """
        if not self._totals and (left["checksum"] != right["checksum"]).any():
            self.exchanged = _exchanged(step, [label(n) for n in names.tolist()], left, right)
        for place, number in enumerate(names.tolist()):
            mine, other = int(left["checksum"][place]), int(right["checksum"][place])
            if len(self.held[number]) < _MOST:
                self.held[number].append((step, mine, other))
            if self.until is None and (mine != other or number in self._totals):
                self.first = self.first if self._totals else step
                self._add(number, left[place : place + 1], right[place : place + 1])
        if self._totals and self.until is None and all(map(_are_same, self._totals.values())):
            self.until = step

    def _add(self, number: int, *records: np.ndarray) -> None:
        held = self._totals.get(number)
        if held is not None:
            pairs = zip(held, records)
            records = tuple(np.array([merged(np.concatenate(pair))]) for pair in pairs)
        self._totals[number] = records[0], records[1]

    def begin(self, late: int, block: Block) -> None:
        """Looks for the first batches of the shorter side in the first step of the longer side."""
        firsts = {number: held[0] for number, held in self.held.items() if held}
        places = {number: place for place, number in reversed([*enumerate(block.names.tolist())])}
        differs = any(mine != other for _, mine, other in firsts.values())
        if differs and all(
            number in places and int(block.records["checksum"][places[number]]) == first[2 - late]
            for number, first in firsts.items()
        ):
            self.again = late, block.step, min(step for step, _, _ in firsts.values())

    @property
    def are_shuffled(self) -> bool:
        """True if they are the same only when several steps are taken together, and of numbers that
        are not so few that their sums may be the same by chance.
        """
        if self.until is None or self.until == self.first:
            return False
        totals = [right for _, right in self._totals.values()]
        spans = [np.ptp([extreme_values(total, end) for end in _ENDS]) for total in totals]
        return max(spans) >= _SPAN or any(float(total["sum"][0]) % 1 for total in totals)


def _exchanged(step: int, labels: list[str], left: np.ndarray, right: np.ndarray) -> str:
    """A sentence on an input that is, to the bit, another of the reference; "" where none is."""
    varied = np.flatnonzero(right["min"] != right["max"]).tolist()
    places = {int(right["checksum"][place]): place for place in varied}
    for mine in np.flatnonzero(left["checksum"] != right["checksum"]).tolist():
        other = places.get(int(left["checksum"][mine]))
        if other is None or labels[mine] == labels[other]:
            continue
        if left["checksum"][other] == right["checksum"][mine]:
            return f"{labels[mine]} and {labels[other]} are in each other's place in step {step:,}"
        whose = "of reference"
        if left["checksum"][other] == right["checksum"][other]:
            whose = "of both sides (targets that are not shifted, or one tensor given twice)"
        return f"{labels[mine]} of actual is {labels[other]} {whose} in step {step:,}, to the bit"
    return ""


def _of_ranks(ranks: Mapping[int, BatchOrder]) -> Iterator[str]:
    """A sentence on a rank that reads what another rank of the reference reads."""
    first = {
        rank: {number: held[0] for number, held in batches.held.items() if held}
        for rank, batches in ranks.items()
    }
    for rank, mine in first.items():
        if all(own == other for _, own, other in mine.values()):
            continue
        for another, its in first.items():
            if another != rank and {n: own for n, (_, own, _) in mine.items()} == {
                n: other for n, (_, _, other) in its.items()
            }:
                same = all(own == other for _, own, other in its.values())
                more = (
                    f", as rank {another} does: the ranks do not share the data (a sampler that "
                    "does not know its rank, or data that each rank draws by one seed)"
                )
                reads = f"rank {rank} of actual reads what rank {another} of reference does"
                yield reads + more * same
                return


def _are_same(records: tuple[np.ndarray, np.ndarray]) -> bool:
    left, right = records
    if any(left[field] != right[field] for field in (*COUNTS, *_ENDS)):
        return False
    return all(
        abs(left[field] - right[field]) <= _SUMMED * abs(right[size])
        for field, size in (("sum", "abs_sum"), ("abs_sum", "abs_sum"), ("sum_sq", "sum_sq"))
    )


def of_order(ranks: Mapping[int, BatchOrder]) -> Iterator[str]:
    """Sentences on batches that are those of other steps or ranks of the reference, or other inputs
    of their step, or the same samples.
    """
    if told := [*_of_ranks(ranks), *(b.exchanged for b in ranks.values() if b.exchanged)]:
        yield told[0]
        return
    for batches in ranks.values():
        if batches.again is not None:
            late, first, step = batches.again
            side, longer = (("reference", "actual"), ("actual", "reference"))[late]
            yield (
                f"the data of {side} begin anew: what it reads first, in place of the batch of "
                f"step {step:,}, is the batch of step {first:,} in {longer}. Restore the place in "
                "the data too, or skip what was trained on"
            )
            return
        for held in batches.held.values():
            differing = [(step, mine) for step, mine, other in held if mine != other]
            steps = {other: step for step, _, other in reversed(held)}
            found = [(step, steps[mine]) for step, mine in differing if mine in steps]
            if found:
                step, other = found[0]
                text = f"that of step {step:,} in actual is that of step {other:,} in reference"
                if len(found) > 1 and {mine - its for mine, its in found} == {step - other}:
                    more = "actual" if step > other else "reference"
                    yield (
                        f"batches are shifted: {text}, and so on, so {more} has "
                        f"{abs(step - other):,} more before it (drop_last=, a batch that is taken "
                        "twice or left out)"
                    )
                else:
                    yield (
                        f"batches in another order: {text}. Of the {len(differing):,} that differ, "
                        f"{len(found):,} are those of other steps"
                    )
                return
        if batches.are_shuffled:
            yield (
                f"the batches of steps {batches.first:,} to {batches.until:,}, taken together, "
                "have the same counts, extremes and sums on both sides: the same samples, shuffled "
                "in another way (another seed, another sampler)"
            )
            return
