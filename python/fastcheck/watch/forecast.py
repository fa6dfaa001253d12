"""Forecasts when a tensor leaves the range of its dtype, from how its magnitude grows.

The slope of log2(abs max) over the last steps is the median of the slopes of all pairs (Theil and
Sen), which a single spike does not move. If growth stays exponential the limit is reached after
``headroom / slope`` steps, if it becomes linear later: between the two the overflow is expected.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .columns import Columns
from .signals import Signals

__all__ = ["Forecasts"]

# How many steps a slope is of: a short one follows the last steps, a long one is less noisy.
_SHORT, _LONG = 12, 48
# A tensor with more room, in doublings, is not forecast.
_MOST_BITS = 10.0
# What share of the pairs of steps has to rise, in one of the two: growth, not noise.
_LEAST_RISING = {_SHORT: 0.9, _LONG: 0.8}
_NOISE = 2.0


class Forecasts:
    """One tensor for each number from 0 on."""

    def __init__(self, horizon: int) -> None:
        self._horizon = horizon
        self._of = Columns(past=np.full((_LONG, 1), np.nan), count=np.zeros(1, np.int64))

    def grow(self, count: int) -> None:
        """Makes room for the numbers below ``count``."""
        self._of.grow(count)

    def add(self, now: Signals) -> tuple[np.ndarray, np.ndarray]:
        """In how many steps each tensor reaches the end of its dtype's range, at the earliest and
        at the latest, as of each step; inf: nothing points to it within the horizon.
        """
        near = np.full(now.abs_max.shape, np.inf)
        far = near.copy()
        for k in range(len(near)):
            at = np.flatnonzero(now.is_read[k])
            for tensor, interval in self._add(
                now.sites[at], now.abs_max[k, at], now.headroom[k, at]
            ):
                near[k, at[tensor]], far[k, at[tensor]] = interval
        return near, far

    def _add(
        self, numbers: np.ndarray, abs_max: np.ndarray, headroom: np.ndarray
    ) -> Iterator[tuple[int, tuple[float, float]]]:
        past, count = self._of["past"], self._of["count"]
        with np.errstate(all="ignore"):
            logs = np.log2(abs_max)
        place = count[numbers] % _LONG
        oldest = past[place, numbers]
        past[place, numbers] = logs
        count[numbers] += 1
        with np.errstate(all="ignore"):
            earlier = past[(place - _SHORT) % _LONG, numbers]
            rise = np.fmax((logs - earlier) / _SHORT, (logs - oldest) / _LONG)
            is_candidate = (headroom < _MOST_BITS) & (headroom < 4 * self._horizon * rise)
        is_candidate &= count[numbers] > _SHORT
        for at in np.flatnonzero(is_candidate).tolist():
            number = int(numbers[at])
            ordered = np.roll(past[:, number], -(int(count[number]) % _LONG))
            interval = _interval(ordered, float(headroom[at]))
            if interval is not None:
                yield at, interval


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
