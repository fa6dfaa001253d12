"""Sweeps that run whole in ``make test-release`` (FASTCHECK_WHOLE=1), and as a sample elsewhere.

The sample is fixed, so that a failure repeats. What a run left out is said at its end.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

__all__ = ["IS_WHOLE", "left_out", "sample"]

IS_WHOLE = os.environ.get("FASTCHECK_WHOLE") == "1"
#: Cases of sweeps that were not taken, and all of them.
left_out, total = 0, 0

Case = TypeVar("Case")


def sample(cases: Iterable[Case], count: int) -> list[Case]:
    """``count`` of the cases, evenly spaced from the first to the last; all of them in a whole run.

    The rule knows nothing of the cases: one that has to be in every run stands outside the sweep.
    """
    global left_out, total
    every = list(cases)
    taken = every
    if not IS_WHOLE and count < len(every):
        step = (len(every) - 1) / max(1, count - 1)
        taken = [every[round(i * step)] for i in range(count)]
    total += len(every)
    left_out += len(every) - len(taken)
    return taken
