"""Robust ranges of many signals at once: the median and the spread of each signal's own past.

The spread is 1.4826 times the median absolute deviation (MAD), which estimates the standard
deviation of normal noise and which half of the values may be spoilt without spoiling it (Hampel,
1974). A value outside of the range does not enter the past, so that a spike does not hide the next
spike; a signal that stays outside for half a window has a new level, and is learned anew.
"""

from __future__ import annotations

from typing import Union

import numpy as np

from .columns import Columns

_MAD_TO_DEVIATION = 1.4826
# Medians are made again when a signal has so many more values: at each step for one signal in so
# many. Its own count says when, for not every signal has a value at each step.
_TURNS = 16
# The number of signals whose values are sorted together: these stay in the processor's cache.
_TOGETHER = 1024


class Bands:
    """The robust ranges of signals: one signal for each number from 0 on. ``least_spread``: what
    the spread is at least, so that noise around a constant is not measured in millionths of it; of
    each, or of all. ``of`` has the ``median`` and the ``spread`` of each signal, by number, and the
    ``lowest`` and ``highest`` value of its past; NaN: there are too few values yet.
    """

    def __init__(self, window: int, warm_up: int, least_spread: Union[float, np.ndarray]) -> None:
        self._window = window
        self._warm_up = warm_up
        self._least_spread = np.asarray(least_spread)
        # A signal in a row: rows are sorted several times as fast as columns.
        self._values = np.zeros((0, window), np.float32)
        self.of = Columns(
            count=np.zeros(1, np.int64),
            rejected=np.zeros(1, np.int64),
            median=np.full(1, np.nan),
            spread=np.full(1, np.nan),
            lowest=np.full(1, np.nan),
            highest=np.full(1, np.nan),
        )

    def grow(self, count: int) -> None:
        """Makes room for the signals with numbers below ``count``."""
        self.of.grow(count)
        more = len(self.of["median"]) - len(self._values)
        if more:
            new = np.zeros((more, self._window), np.float32)
            self._values = np.concatenate([self._values, new])

    def scores(self, numbers: np.ndarray, values: np.ndarray) -> np.ndarray:
        """The number of spreads by which each value is above (below: negative) the median of its
        signal; NaN: not known yet, or the value is NaN. ``numbers`` has the shape of ``values``, or
        a shape that broadcasts to it.
        """
        with np.errstate(invalid="ignore"):
            scores: np.ndarray = (values - self.of["median"][numbers]) / self.of["spread"][numbers]
        return scores

    def add(self, numbers: np.ndarray, values: np.ndarray, is_outside: np.ndarray) -> None:
        """Adds the values of some steps, which are rows, to each signal; not those outside, unless
        there were many in a row. ``numbers``: each at most once.
        """
        counts, rejected, steps = self.of["count"], self.of["rejected"], len(values)
        with np.errstate(over="ignore"):  # what is beyond float32 enters no range
            values = values.astype(np.float32)
        run, kept = rejected[numbers], np.isfinite(values)
        if np.count_nonzero(run) or np.count_nonzero(is_outside):
            for outside in is_outside:
                run = np.where(outside, run + 1, 0)
            is_new_level = run >= self._window // 2
            rejected[numbers] = np.where(is_new_level, 0, run)
            renewed = numbers[is_new_level]
            counts[renewed] = 0
            for name in ("median", "spread", "lowest", "highest"):
                self.of[name][renewed] = np.nan
            kept &= ~is_outside | is_new_level
        before = counts[numbers]
        most = int(before.max(initial=0))
        begin, end = most % self._window, most % self._window + steps
        # Most signals have had a value in each step, and their places follow each other.
        if kept.all() and end <= self._window and (before == most).all():
            after = counts[numbers] = before + steps
            self._values[numbers, begin:end] = values.T
            if steps == _TURNS and most >= self._warm_up:
                self._renew(numbers)  # it is the turn of each of them
                return
        else:
            added = kept.sum(axis=0)
            after = counts[numbers] = before + added
            is_usual = (before == most) & (added == steps) & (end <= self._window)
            (others,) = np.nonzero(~is_usual)
            if len(others) < len(numbers):
                # All are written, and the few others as they were: it takes half the time.
                before_of_others = self._values[numbers[others], begin:end]
                self._values[numbers, begin:end] = values.T
                self._values[numbers[others], begin:end] = before_of_others
            is_there = kept[:, others]
            place = before[others] + np.cumsum(is_there, axis=0) - 1
            step, at = np.nonzero(is_there)
            row, value = numbers[others[at]], values[step, others[at]]
            self._values[row, place[step, at] % self._window] = value
        turn = numbers % _TURNS
        is_due = (after - turn) // _TURNS > (before - turn) // _TURNS
        is_due |= before < self._warm_up
        is_due &= after >= self._warm_up
        due = numbers[is_due]
        for begin in range(0, len(due), _TOGETHER):
            self._renew(due[begin : begin + _TOGETHER])

    def _renew(self, numbers: np.ndarray) -> None:
        """Makes the medians of these signals again."""
        of, counts = self.of, np.minimum(self.of["count"][numbers], self._window)
        # One count of all, but while some are warming up.
        for count in set(counts.tolist()):
            chosen = numbers[counts == count]
            values = self._values[chosen, :count]
            values.sort(axis=1)
            median = _middle(values)
            of["median"][chosen] = median
            of["lowest"][chosen], of["highest"][chosen] = values[:, 0], values[:, -1]
            distances = np.abs(values - median[:, None])
            distances.sort(axis=1)
            spread = _middle(distances)
            least = self._least_spread[chosen] if self._least_spread.ndim else self._least_spread
            of["spread"][chosen] = np.maximum(np.float32(_MAD_TO_DEVIATION) * spread, least)


def _middle(values: np.ndarray) -> np.ndarray:
    """The median of each row, whose values are sorted."""
    half = values.shape[1] // 2
    if values.shape[1] % 2:
        return values[:, half]
    return (values[:, half - 1] + values[:, half]) / np.float32(2)
