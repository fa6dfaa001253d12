"""The range of updates of single parameters, for the first mover.

A parameter is read once in a round of all of them, so that a range of its own would take thousands
of steps. Each reading is divided by what is usual for its parameter; all of them have one range.
"""

from __future__ import annotations

import statistics
from collections import deque

import numpy as np

from .bands import Band
from .signals import UPDATE, StepSignals

__all__ = ["UpdateRange"]

# What is usual is the median of the last few readings of a parameter.
_PAST, _LEAST_READINGS = 8, 3
_LEAST_SPREAD = 0.1
# An update is out of the range by so many spreads and, as log2, by a factor: readings of a bias are
# noisier than those of a matrix.
_LEFT_AT, _LEAST_RISE = 4.0, 2.0


class UpdateRange:
    """Of one rank. ``threshold``: what is so many spreads above does not enter the range."""

    def __init__(self, threshold: float, window: int, warm_up: int) -> None:
        self._threshold = threshold
        self._band = Band(window, warm_up, _LEAST_SPREAD)
        self._past: dict[int, deque[float]] = {}

    def put_into(self, signals: StepSignals, scores: np.ndarray, outside: np.ndarray) -> None:
        """One step: in ``scores`` and ``outside`` the columns of updates become those of this
        range. Only the first row has them: all signals of one number are the same.
        """
        for at in np.flatnonzero(signals.phases == UPDATE).tolist():
            scores[:, at], outside[:, at] = np.nan, False
            value = float(signals.values[0, at])
            if value > -np.inf and signals.abs_max[at] > 0:  # else there was no update
                scores[0, at], outside[0, at] = self._add(int(signals.sites[at]), value)

    def _add(self, site: int, value: float) -> tuple[float, bool]:
        past = self._past.setdefault(site, deque(maxlen=_PAST))
        usual = statistics.median(past) if len(past) >= _LEAST_READINGS else None
        past.append(value)
        if usual is None:
            return np.nan, False
        rise = value - usual
        score = self._band.score(rise)
        is_far = rise - self._band.median >= _LEAST_RISE
        self._band.add(rise, is_far and score >= self._threshold)
        return score, is_far and score >= _LEFT_AT
