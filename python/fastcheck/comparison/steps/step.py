"""The pairs of one step, measured, judged and added to the tally."""

from __future__ import annotations

from typing import Optional

import numpy as np

from fastcheck.comparison.align import Alignment
from fastcheck.comparison.block import Block, Phase
from fastcheck.comparison.measure import PairState
from fastcheck.comparison.over_time import SAME_LOSS, LossPair
from fastcheck.statistics.thresholds import BY_COARSENESS, COARSENESS

from .course import Course
from .pairs import Pairs


def inherited_formats(
    codes: np.ndarray, is_exact: np.ndarray, before: Optional[int]
) -> tuple[np.ndarray, Optional[int]]:
    """The code, by pair, of the coarsest dtype among itself and what was computed before it with
    other last bits: a float32 that is made of bfloat16 carries the rounding of bfloat16.

    ``before`` is that of the steps before; the second result is the same for the steps after.
    """
    own = COARSENESS[codes]
    start = 0 if before is None else COARSENESS[before]
    reached = np.maximum.accumulate(np.r_[start, np.where(is_exact, 0, own)])
    # A tensor that holds no rounding inherits none.
    inherits = (reached[:-1] > own) & (own > 0)
    formats: np.ndarray = np.where(inherits, BY_COARSENESS[reached[:-1]], codes)
    return formats, int(BY_COARSENESS[reached[-1]]) if reached[-1] else before


class StepPairs(Pairs):
    """``sums``: the numbers of the names of tensors that are sums of those of several ranks."""

    def __init__(
        self,
        course: Course,
        ours: Block,
        theirs: Block,
        aligned: Alignment,
        before: int,
        sums: frozenset[int],
    ) -> None:
        super().__init__(course.names, ours, theirs, aligned, before, course.thresholds)
        self.course, self.sums = course, sums
        #: Handed on by the steps of its rank.
        self.handed = course.handed[self.rank]
        #: Boolean arrays: updates that differ by little of their size, and by more than rounding.
        self.turned, self.beyond = np.zeros((2, len(self.states)), bool)
        if course.given:
            is_exact = aligned.same | np.isin(self.phases, course.given)
            self.formats, self.handed.coarsest = inherited_formats(
                self.formats, is_exact, self.handed.coarsest
            )
        #: True if the gradients of all parameters are equal but for rounding.
        self.are_gradients_alike = False
        #: The error of the sum of a gradient that one side has in parts, by number of the name, and
        #: whether something tells the order of its elements.
        self.in_parts: dict[int, tuple[float, bool]] = {}

    def is_counted(self) -> np.ndarray:
        """A boolean array: all but earlier readings of the same first weight."""
        given = np.flatnonzero(self.phases == Phase.WEIGHTS)[::-1]
        _, last = np.unique(self.names[given], return_index=True)
        is_counted: np.ndarray = self.phases != Phase.WEIGHTS
        is_counted[given[last]] = True
        return is_counted

    def leave_out(self, index: int, kind: str, reason: int, error: float = 0.0) -> None:
        """Excuses a pair, and notes its name among those of this kind."""
        self.set(index, PairState.CLOSE, error, reason)
        self.course.tally.note(kind, str(self.name(index)))

    def summed_up(self, which: np.ndarray) -> tuple[float, bool]:
        """The largest error of these pairs, and whether all are equal to the bit."""
        errors, states = self.errors[which], self.states[which]
        if not len(errors):
            return 0.0, True
        return float(errors.max()), bool((states == PairState.SAME).all())

    @property
    def losses(self) -> Optional[LossPair]:
        """The losses of the step, where both sides have recorded it separately."""
        mine, other = (self.course.loss_of(block) for block in (self.ours, self.theirs))
        return None if mine is None or other is None else LossPair(self.step, mine, other)

    @property
    def has_same_loss(self) -> bool:
        losses = self.losses
        return losses is not None and losses.error <= SAME_LOSS
