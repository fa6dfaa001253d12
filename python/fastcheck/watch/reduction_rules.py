"""Rules for what the reduction over the ranks makes of gradients.

The norm of the mean of gradients is at most the mean of their norms. Where the gradients of the
ranks have independent noise it is smaller than each: by up to the root of the number of ranks. So
the ratio of this rank's norm to that of the mean is usually above 1, and it is 1 for all parameters
where the ranks have the same gradients: or another constant where they are not divided by the
number of ranks, but by something else.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

from fastcheck.utils.text.numbers import format_number

from .numbers import Found, Reading

__all__ = ["ReductionRules"]

# The ratios of the last readings, of whatever parameter, as log2; judged from so many on.
_PAST, _LEAST_READINGS = 64, 16
# Out of their range: so many robust standard deviations, and by this factor.
_SCORE, _FACTOR = 6.0, 2.0
_MAD_TO_DEVIATION, _LEAST_SPREAD = 1.4826, 0.1
# The same ratio, but for rounding, in so many readings in a row.
_SAME, _SAME_IN_A_ROW = 1e-5, 8


class ReductionRules:
    """Of one rank."""

    def __init__(self) -> None:
        self._past: deque[float] = deque(maxlen=_PAST)
        # How many readings in a row had the last ratio.
        self._same, self._last = 0, math.nan
        #: The last readings, by number of the site.
        self.ratios: dict[int, float] = {}

    def add(self, site: int, ratio: float) -> list[Found]:
        """A parameter's gradient on this rank has so many times the norm that it has after the
        reduction.
        """
        if not 0 < ratio < math.inf:  # one of them is 0 or not finite
            return []
        self.ratios[site] = ratio
        self._same = self._same + 1 if abs(ratio / self._last - 1) <= _SAME else 1
        self._last = ratio
        if self._same == _SAME_IN_A_ROW:
            return [_no_effect(site, ratio)]
        if self._same > _SAME_IN_A_ROW or abs(ratio - 1) <= _SAME:
            return []
        level, past = math.log2(ratio), self._past
        if len(past) >= _LEAST_READINGS:
            middle = statistics.median(past)
            deviation = statistics.median(abs(one - middle) for one in past)
            score = (level - middle) / max(_MAD_TO_DEVIATION * deviation, _LEAST_SPREAD)
            if abs(score) >= _SCORE and abs(level - middle) >= math.log2(_FACTOR):
                return [_unusual(site, ratio, 2.0**middle, score)]
        past.append(level)
        return []


def _no_effect(site: int, ratio: float) -> Found:
    is_mean = abs(ratio - 1) <= _SAME
    factor = format_number(1 / ratio)
    effect = "does not change its norm" if is_mean else f"multiplies its norm by {factor}"
    text = (
        f"the reduction over the ranks {effect}, as in the {_SAME_IN_A_ROW - 1} readings before: "
        "all ranks compute the same gradient. Each should have batches of its own "
        "(DistributedSampler)"
    )
    if is_mean:
        text += ". Or gradients are not reduced (no_sync())"
        ratio = 1.0
    else:
        text += ". Or this rank alone has a gradient"
    return Found(site, Reading("reduction", ratio, math.nan, math.nan, True), text)


def _unusual(site: int, ratio: float, usual: float, score: float) -> Found:
    size = "larger" if ratio > usual else "smaller"
    text = (
        f"on this rank its norm is {format_number(ratio)} times that of the mean over the ranks, "
        f"usual is {format_number(usual)}: it is {size} here than on the others"
    )
    return Found(site, Reading("reduction", ratio, usual, score, False), text)
