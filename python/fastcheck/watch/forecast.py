"""Forecasts when a tensor leaves the range of its dtype, from how its magnitude grows.

The slope of log2(abs max) over the last steps is the median of the slopes of all pairs (Theil and
Sen), which a single spike does not move. If growth stays exponential the limit is reached after
``headroom / slope`` steps, if it becomes linear later: between the two the overflow is expected.
"""

from __future__ import annotations

import numpy as np

__all__ = ["Forecasts"]

# How many steps a slope is of: a short one follows the last steps, a long one is less noisy.
_SHORT, _LONG = 12, 48
# A tensor with more room, in doublings, is not forecast.
_MOST_BITS = 10.0
# What share of the pairs of steps has to rise, in one of the two: growth, not noise.
_LEAST_RISING = {_SHORT: 0.9, _LONG: 0.8}
_NOISE = 2.0
# The forecast has to be below the horizon so many times in a row.
_IN_A_ROW = 3


class Forecasts:
    """One tensor for each number from 0 on."""

    def __init__(self, horizon: int) -> None:
        self._horizon = horizon
        self._past = np.zeros((0, _LONG))
        self._count = np.zeros(0, np.int64)
        self._near = np.zeros(0, np.int64)
        self._is_warned = np.zeros(0, bool)

    def grow(self, count: int) -> None:
        """Makes room for the numbers below ``count``."""
        more = count - len(self._count)
        if more <= 0:
            return
        more = max(more, len(self._count), 64)
        self._past = np.pad(self._past, ((0, more), (0, 0)), constant_values=np.nan)
        self._count = np.pad(self._count, (0, more))
        self._near = np.pad(self._near, (0, more))
        self._is_warned = np.pad(self._is_warned, (0, more))

    def add(
        self, numbers: np.ndarray, abs_max: np.ndarray, headroom: np.ndarray
    ) -> list[tuple[int, float, float]]:
        """One step: the magnitudes of these tensors, and how many doublings are left. The places in
        ``numbers`` of those that are newly forecast to overflow within the horizon, with the
        earliest and the latest number of steps.
        """
        with np.errstate(all="ignore"):
            logs = np.log2(abs_max)
        place = self._count[numbers] % _LONG
        oldest = self._past[numbers, place]
        self._past[numbers, place] = logs
        self._count[numbers] += 1
        with np.errstate(all="ignore"):
            earlier = self._past[numbers, (place - _SHORT) % _LONG]
            rise = np.fmax((logs - earlier) / _SHORT, (logs - oldest) / _LONG)
            is_candidate = (headroom < _MOST_BITS) & (headroom < 4 * self._horizon * rise)
        is_candidate &= self._count[numbers] > _SHORT
        is_near = np.zeros(len(numbers), bool)
        intervals: dict[int, tuple[float, float]] = {}
        for at in np.flatnonzero(is_candidate).tolist():
            number = int(numbers[at])
            turn = int(self._count[number]) % _LONG
            interval = _interval(np.roll(self._past[number], -turn), float(headroom[at]))
            if interval is not None and interval[0] <= self._horizon:
                is_near[at] = True
                intervals[at] = interval
        in_a_row = np.where(is_near, self._near[numbers] + 1, 0)
        self._near[numbers] = in_a_row
        is_new = (in_a_row >= _IN_A_ROW) & ~self._is_warned[numbers]
        # Once it is far from the limit again it may be warned of again.
        has_room = headroom > _MOST_BITS
        self._is_warned[numbers] = (self._is_warned[numbers] | is_new) & ~has_room
        return [(at, *intervals[at]) for at in np.flatnonzero(is_new).tolist()]


def _interval(logs: np.ndarray, headroom: float) -> tuple[float, float] | None:
    """In how many steps the limit is reached, at the earliest and at the latest; None: no growth.
    ``logs``: log2 of the last magnitudes, oldest first.
    """
    logs = logs[np.isfinite(logs)]
    parts = [logs[-count:] for count in (_SHORT, _LONG) if len(logs) >= count]
    slopes = [_slopes(part) for part in parts]
    if not any(
        float((one > 0).mean()) >= _LEAST_RISING[len(part)] for part, one in zip(parts, slopes)
    ):
        return None
    rates = [float(np.median(one)) for one in slopes]
    if max(rates) <= 0:
        return None
    # A value above the line overflows before the line does.
    last = parts[0]
    line = np.arange(len(last)) * rates[0]
    noise = np.median(np.abs(last - line - np.median(last - line)))
    near = max(0.0, headroom - _NOISE * float(noise)) / max(rates)
    # The same in numbers instead of logs: as multiples of the last magnitude.
    values = np.exp2(logs - logs[-1])
    linear = [float(np.median(_slopes(values[-len(part) :]))) for part in parts]
    slowest = min((one for one in linear if one > 0), default=0.0)
    far = (2.0**headroom - 1.0) / slowest if slowest > 0 else np.inf
    return near, max(near, far)


_PAIRS = {count: np.triu_indices(count, 1) for count in (_SHORT, _LONG)}


def _slopes(values: np.ndarray) -> np.ndarray:
    """The slopes of all pairs."""
    first, second = _PAIRS[len(values)]
    found: np.ndarray = (values[second] - values[first]) / (second - first)
    return found
