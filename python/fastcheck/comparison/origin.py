"""Origin: the first computed tensor that is not equal to the bit, and what was computed from it.

A log has norms, sums and extremes of a tensor, and a checksum of its elements in their order. Where
only the checksum differs the elements may have other last bits, or stand in another order. What
reads the tensor tells which: rounding stays at the level of rounding, a permutation does not.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

import numpy as np

from fastcheck.record.format import DTYPES
from fastcheck.statistics.thresholds import THRESHOLDS, rounding_unit

from .block import Phase
from .measure import PairState
from .row import Row

#: Fewer elements may cancel to nearly nothing, and have no digits of their own.
_MANY = 64
#: Sums of the same numbers in another order agree to this; those of other numbers, if these are
#: coarse and few enough, do not.
_SUMMED = 2e-8
_COARSE = ("float16", "bfloat16")


def rounding_limit(code: int, has_values: bool = False) -> float:
    """The largest error of norms and sums that rounding makes within a step, by dtype code: eight
    spacings of float32 and float64. (24 layers of a transformer make four.) ``has_values``: of
    elements, whose rounding does not average out.
    """
    if has_values and DTYPES[code].name in _COARSE:
        return rounding_unit(code)
    threshold = THRESHOLDS.get(DTYPES[code].name)
    return 0.0 if threshold is None else min(rounding_unit(code) / 4, threshold.error / 10)


class Cause(enum.Enum):
    ROUNDING = "rounding"
    MOVED = "moved"  #: more than rounding follows from it
    UNKNOWN = "unknown"  #: nothing that reads it is in both sides


@dataclass
class Origin:
    """``worst``: of what was computed after it in its step, the update included; ``readers``: how
    many of those there are. ``limit``: the most that rounding explains.
    """

    key: tuple[int, int, int, int]
    row: Row
    limit: float
    is_parameters_gradient: bool
    is_permuted: bool
    #: True if it is an update that is off by more than rounding makes of it.
    is_other_update: bool = False
    readers: int = 0
    worst: Optional[Row] = None
    #: The number of parameters that ``worst`` leaves out: their updates differ by little of their
    #: size.
    turned: int = 0
    #: True if the same tensor was equal to the bit in the step before.
    is_late: bool = False
    #: The causes that the step before shows.
    causes: Sequence[str] = ()
    #: The number of tensors of its role that are equal to the bit in its step, and whether all
    #: others are.
    alike: int = 0
    is_alone: bool = False
    is_open: bool = True  # an update that it has a part in is not read yet
    #: True if updates that it has a part in were compared.
    is_updated: bool = False

    def follow(self, rows: int, worst: Optional[Row]) -> None:
        """Adds a pair that was computed after this pair."""
        self.readers += rows
        if worst is not None and (self.worst is None or _rank(worst) > _rank(self.worst)):
            self.worst = worst

    @property
    def error_after(self) -> float:
        return 0.0 if self.worst is None else self.worst.error

    @property
    def cause(self) -> Cause:
        if self.is_permuted or self.is_beyond or not self.is_level:
            return Cause.MOVED
        return Cause.ROUNDING if self.readers else Cause.UNKNOWN

    @property
    def is_level(self) -> bool:
        """True if the tensors computed after it differ by rounding only."""
        worst = self.worst
        return worst is None or (
            worst.state is not PairState.DIFFERENT and worst.error <= self.limit
        )

    @property
    def is_beyond(self) -> bool:
        """True if its own error is more than rounding makes of inputs that are equal to the bit."""
        if self.is_other_update:
            return True
        if self.row.phase is not Phase.FORWARD or self.row.reference is None:
            return False
        return (self.row.reference["numel"] or 0) >= _MANY and self.row.error > self.limit


def _rank(row: Row) -> tuple[bool, float]:
    return row.state is PairState.DIFFERENT, row.error


def is_permuted(left: np.void, right: np.void, state: PairState, code: int) -> bool:
    """True if the sums prove that a tensor with another checksum has the same elements: one other
    last bit of a coarse dtype is more than the order of summation makes.
    """
    unit = rounding_unit(code)
    if state is not PairState.REORDERED or unit / max(int(right["numel"]), 1) < 8 * _SUMMED:
        return False
    apart = [
        abs(float(left[field]) - float(right[field])) / max(float(right[field]), 1e-300)
        for field in ("abs_sum", "sum_sq")
    ]
    return max(apart) <= _SUMMED and DTYPES[code].name in _COARSE
