"""The dtype whose rounding a tensor carries: its own, or that of what it was computed from."""

from __future__ import annotations

from typing import Optional

import numpy as np

from fastcheck.statistics.thresholds import BY_COARSENESS, COARSENESS

__all__ = ["inherited_formats"]


def inherited_formats(
    codes: np.ndarray, is_exact: np.ndarray, before: Optional[int]
) -> tuple[np.ndarray, Optional[int]]:
    """By pair, the code of the coarsest dtype among itself and what was computed before it with
    other last bits: a float32 that is made of bfloat16 carries the rounding of bfloat16.

    ``before`` is that of the steps before; the second result is the same for the steps after.
    """
    own = COARSENESS[codes]
    start = 0 if before is None else COARSENESS[before]
    reached = np.maximum.accumulate(np.r_[start, np.where(is_exact, 0, own)])
    # What holds no rounding inherits none.
    inherits = (reached[:-1] > own) & (own > 0)
    found: np.ndarray = np.where(inherits, BY_COARSENESS[reached[:-1]], codes)
    return found, int(BY_COARSENESS[reached[-1]]) if reached[-1] else before
