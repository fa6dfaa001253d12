"""The pairs of one step of one rank, with what was found of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Optional

import numpy as np

from fastcheck.comparison.align import Alignment
from fastcheck.comparison.block import Block, Extra, Phase
from fastcheck.comparison.measure import PairState
from fastcheck.comparison.names import Name, NameTable
from fastcheck.comparison.row import Row, make_row
from fastcheck.comparison.tally import Key
from fastcheck.record.format import Depth
from fastcheck.statistics.elements import Elements
from fastcheck.statistics.thresholds import Threshold, coarser_of

# More than a step has tensors.
_LATER = 1 << 40


class Pairs:
    """Arrays have one element a pair, in the order of the reference.

    ``ours``, ``theirs``: all tensors of either side; ``step``: that of the reference, ``before``:
    the step whose update the parameters of this step show; ``names``: numbers of ``table``;
    ``phases``, ``states``: values of Phase and PairState; ``errors``: relative errors, and
    ``limits``: what is allowed of them; ``reasons``: indices of REASONS; ``left``, ``right``: the
    records of actual and of reference; ``formats``: the codes of the dtypes whose rounding the
    pairs carry. ``elements``, ``relations``: by position, of pairs whose values are there;
    ``excused``: the errors of pairs that count for nothing.
    """

    def __init__(
        self,
        table: NameTable,
        ours: Block,
        theirs: Block,
        aligned: Alignment,
        before: int,
        thresholds: Sequence[Threshold],
    ) -> None:
        self.table, self.ours, self.theirs, self.aligned = table, ours, theirs, aligned
        self.step, self.rank, self.before = theirs.step, theirs.rank, before
        self.thresholds = thresholds
        count = len(aligned.ours)
        self.names = theirs.names[aligned.theirs]
        self.phases = theirs.phases[aligned.theirs].copy()
        self.states = np.where(aligned.same, np.uint8(PairState.SAME), np.uint8(PairState.CLOSE))
        self.errors = np.zeros(count)
        self.reasons = np.zeros(count, np.uint8)
        self.left, self.right = ours.records[aligned.ours], theirs.records[aligned.theirs]
        self.formats: np.ndarray = coarser_of(self.left["dtype"], self.right["dtype"])
        self.elements: dict[int, Elements] = {}
        self.relations: dict[int, str] = {}
        self.excused: dict[int, float] = {}

    @property
    def has_bits(self) -> np.ndarray:
        """A boolean array: the pairs that can be compared to the bit."""
        full = (side["depth"] == Depth.FULL for side in (self.left, self.right))
        return np.logical_and(*full)

    @property
    def limits(self) -> np.ndarray:
        """The errors that are allowed."""
        return np.array([limit.error for limit in self.thresholds])[self.formats]

    @property
    def shown_errors(self) -> np.ndarray:
        """The errors, of pairs that count for nothing too."""
        errors: np.ndarray = self.errors.copy()
        errors[list(self.excused)] = list(self.excused.values())
        return errors

    def set(self, index: int, state: PairState, error: float, reason: int) -> None:
        self.states[index], self.errors[index], self.reasons[index] = state, error, reason

    def name(self, index: int) -> Name:
        return self.table[int(self.names[index])]

    def key(self, phase: int, index: int) -> Key:
        """The place of a pair in the order of computation. What an API reads of a parameter comes
        after the optimizer's own calls, in the step before.
        """
        name = self.name(index)
        place = index + (_LATER if name.op and name.role == "param" else 0)
        return self.step_of(phase, index), phase, place, self.rank

    def step_of(self, phase: int, index: int) -> int:
        """A parameter shows the update of the step before; a call of an optimizer is of its own, as
        its rates are.
        """
        name = self.name(index)
        is_read = phase == Phase.UPDATE and (not name.op or name.role == "param")
        is_read &= name.role not in ("learning_rate", "skipped_update")
        return self.before if is_read else self.step

    def other_order(self, index: int) -> Optional[tuple[str, str, str]]:
        """The last output of modules that comes at the same place on both sides, and the next one
        of either side; None if that is not before this pair. What one side has more often is left
        out.
        """
        counts = [Counter(block.names.tolist()) for block in (self.ours, self.theirs)]
        mine, other = (
            [
                (number, place)
                for place, number in enumerate(block.names.tolist())
                if self.table[number].role == "output" and counts[0][number] == counts[1][number]
            ]
            for block in (self.ours, self.theirs)
        )
        ends = int(self.aligned.ours[index]), int(self.aligned.theirs[index])
        before = ""
        for (left, at), (right, there) in zip(mine, other):
            if left != right:
                if at > ends[0] and there > ends[1]:
                    return None
                return before, str(self.table[left]), str(self.table[right])
            before = str(self.table[left])
        return None

    def extras(self, index: int) -> tuple[Extra, Extra]:
        """The data of both sides of a pair, apart from its records."""
        ours, theirs = int(self.aligned.ours[index]), int(self.aligned.theirs[index])
        return self.ours.extra(ours), self.theirs.extra(theirs)

    def row(self, index: int) -> Row:
        phase = int(self.phases[index])
        return make_row(
            self.table,
            self.step_of(phase, index),
            Phase(phase),
            PairState(int(self.states[index])),
            self.excused.get(index, float(self.errors[index])),
            int(self.reasons[index]),
            (self.ours, int(self.aligned.ours[index])),
            (self.theirs, int(self.aligned.theirs[index])),
            self.elements.get(index),
            self.relations.get(index, ""),
        )
