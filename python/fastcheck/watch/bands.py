"""Robust ranges of many signals at once: the median and the spread of each one's own past.

The spread is 1.4826 times the median absolute deviation (MAD), which estimates the standard
deviation of normal noise and which half of the values may be spoilt without spoiling it (Hampel,
1974). A value outside of the range does not enter the past, so that a spike does not hide the next
one; a signal that stays outside for half a window has a new level, and is learned anew.
"""

from __future__ import annotations

import numpy as np

__all__ = ["Bands"]

_MAD_TO_DEVIATION = 1.4826
# Medians are made again for one signal in so many at each step, in turn.
_TURNS = 16


class Bands:
    """One signal for each number from 0 on. ``least_spread``: what the spread is at least, so that
    noise around a constant is not measured in millionths of it.
    """

    def __init__(self, window: int, warm_up: int, least_spread: float) -> None:
        self._window = window
        self._warm_up = warm_up
        self._least_spread = least_spread
        self._values = np.zeros((0, window), np.float32)
        self._counts = np.zeros(0, np.int64)
        self._rejected = np.zeros(0, np.int64)
        self._turn = 0
        self.median = np.zeros(0)
        self.spread = np.zeros(0)

    def grow(self, count: int) -> None:
        """Makes room for the signals with numbers below ``count``."""
        held = len(self._counts)
        if count <= held:
            return
        size = max(count, 2 * held, 64)
        values = np.zeros((size, self._window), np.float32)
        values[:held] = self._values
        self._values = values
        for name in ("_counts", "_rejected"):
            grown = np.zeros(size, np.int64)
            grown[:held] = getattr(self, name)
            setattr(self, name, grown)
        for name in ("median", "spread"):
            unknown = np.full(size, np.nan)
            unknown[:held] = getattr(self, name)
            setattr(self, name, unknown)

    def scores(self, numbers: np.ndarray, values: np.ndarray) -> np.ndarray:
        """By how many spreads each value is above (below: negative) the median of its signal; NaN:
        not known yet, or the value is NaN. ``numbers``: int array, each at most once.
        """
        with np.errstate(invalid="ignore"):
            found: np.ndarray = (values - self.median[numbers]) / self.spread[numbers]
        return found

    def counts(self, numbers: np.ndarray) -> np.ndarray:
        """How many values of each signal were added."""
        found: np.ndarray = self._counts[numbers]
        return found

    def add(self, numbers: np.ndarray, values: np.ndarray, is_outside: np.ndarray) -> None:
        """Adds one value to each signal; not those outside, unless there were many in a row."""
        rejected = np.where(is_outside, self._rejected[numbers] + 1, 0)
        is_new_level = rejected >= self._window // 2
        rejected[is_new_level] = 0
        self._rejected[numbers] = rejected
        renewed = numbers[is_new_level]
        self._counts[renewed] = 0
        self.median[renewed] = self.spread[renewed] = np.nan
        kept = np.isfinite(values) & (~is_outside | is_new_level)
        numbers, values = numbers[kept], values[kept]
        self._values[numbers, self._counts[numbers] % self._window] = values
        self._counts[numbers] += 1
        self._turn = (self._turn + 1) % _TURNS
        counts = self._counts[numbers]
        is_due = (numbers % _TURNS == self._turn) | (counts == self._warm_up)
        self._renew(numbers[is_due & (counts >= self._warm_up)])

    def _renew(self, numbers: np.ndarray) -> None:
        """Makes the medians of these signals again."""
        if not len(numbers):
            return
        counts = np.minimum(self._counts[numbers], self._window)
        for count in np.unique(counts):  # one, but while some are warming up
            chosen = numbers[counts == count]
            values = self._values[chosen, :count]
            median = np.median(values, axis=1)
            deviation = np.median(np.abs(values - median[:, None]), axis=1)
            self.median[chosen] = median
            self.spread[chosen] = np.maximum(_MAD_TO_DEVIATION * deviation, self._least_spread)
