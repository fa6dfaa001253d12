"""Robust ranges of many signals at once: the median and the spread of each one's own past.

The spread is 1.4826 times the median absolute deviation (MAD), which estimates the standard
deviation of normal noise and which half of the values may be spoilt without spoiling it (Hampel,
1974). A value outside of the range does not enter the past, so that a spike does not hide the next
one; a signal that stays outside for half a window has a new level, and is learned anew.
"""

from __future__ import annotations

import math

import numpy as np

__all__ = ["Band", "Bands"]

_MAD_TO_DEVIATION = 1.4826
# Medians are made again when a signal has so many more values: at each step for one signal in so
# many. Its own count says when, for not every signal has a value at each step.
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
        counts = self._counts[numbers]
        is_due = (counts % _TURNS == numbers % _TURNS) | (counts == self._warm_up)
        self._renew(numbers[is_due & (counts >= self._warm_up)])

    def _renew(self, numbers: np.ndarray) -> None:
        """Makes the medians of these signals again."""
        if not len(numbers):
            return
        counts = np.minimum(self._counts[numbers], self._window)
        same = int(counts[0])  # of all, but while some are warming up
        for count in [same] if (counts == same).all() else np.unique(counts).tolist():
            chosen = numbers[counts == count]
            median, spread = _range_of(self._values[chosen, :count])
            self.median[chosen] = median
            self.spread[chosen] = np.maximum(spread, self._least_spread)


class Band:
    """The same of a single signal, by the same rules: arrays of one element cost ten times more."""

    def __init__(self, window: int, warm_up: int, least_spread: float) -> None:
        self._window = window
        self._warm_up = warm_up
        self._least_spread = least_spread
        self._values = np.zeros((1, window), np.float32)
        self._count = self._rejected = 0
        self.median = self.spread = math.nan

    def score(self, value: float) -> float:
        """By how many spreads it is above (below: negative) the median; NaN: not known yet."""
        return (value - self.median) / self.spread

    def add(self, value: float, is_outside: bool) -> None:
        """Adds a value; not one outside, unless there were many in a row."""
        self._rejected = self._rejected + 1 if is_outside else 0
        is_new_level = self._rejected >= self._window // 2
        if is_new_level:
            self._rejected = self._count = 0
            self.median = self.spread = math.nan
        is_kept = math.isfinite(value) and (is_new_level or not is_outside)
        if not is_kept:
            return
        self._values[0, self._count % self._window] = value
        self._count += 1
        is_due = self._count % _TURNS == 0 or self._count == self._warm_up
        if is_due and self._count >= self._warm_up:
            median, spread = _range_of(self._values[:, : self._count])
            self.median, self.spread = float(median[0]), max(float(spread[0]), self._least_spread)


def _range_of(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each row the median and the spread, as float32."""
    median = _medians(values)
    return median, np.float32(_MAD_TO_DEVIATION) * _medians(np.abs(values - median[:, None]))


def _medians(values: np.ndarray) -> np.ndarray:
    """As np.median() has them, in a quarter of its time: rows are short."""
    values = np.sort(values, axis=1)
    half = values.shape[1] // 2
    if values.shape[1] % 2:
        odd: np.ndarray = values[:, half]
        return odd
    even: np.ndarray = (values[:, half - 1] + values[:, half]) / np.float32(2)
    return even
