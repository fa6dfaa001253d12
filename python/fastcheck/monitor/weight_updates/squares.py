"""Finds the gradients whose square their dtype does not hold: Adam's second moment may overflow."""

from __future__ import annotations

import numpy as np

from fastcheck.log.history import History
from fastcheck.record.format import DTYPES, Depth
from fastcheck.record.statistics import FLOAT_FORMATS

# By the number of a dtype: the square root of its largest number. Integers have no gradients.
_LIMITS = np.array(
    [FLOAT_FORMATS[row.name].max ** 0.5 if row.kind == "f8" else np.inf for row in DTYPES]
)


class LargeSquares:
    """The sites of finite gradients that were too large, until take(). So the optimizer's state is
    read only after an update that may have broken it.
    """

    def __init__(self, history: History) -> None:
        self._history = history
        self._sites: set[int] = set()

    def weigh(self, first: int, stop: int) -> None:
        """The records of an update's gradients have these sequence numbers, and are on the host."""
        records = self._history.between(first, stop)
        if not len(records) or records["depth"][0] < Depth.STATS:
            return
        limits = _LIMITS[records["dtype"]]
        is_large = (records["max"] > limits) | (records["min"] < -limits)
        if is_large.any():
            self._sites.update(records["site"][is_large].tolist())

    def take(self) -> set[int]:
        """The sites that were found since the last call."""
        if not self._sites:
            return self._sites
        found, self._sites = self._sites, set()
        return found
