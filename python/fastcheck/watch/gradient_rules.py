"""Rules for gradients of single parameters: out of their range, or below the optimizer's eps."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from fastcheck.record.site import SiteTable
from fastcheck.utils.text.numbers import format_number

from .numbers import Found, Reading
from .signals import GRADIENT, StepSignals

__all__ = ["NOISE", "GradientRules"]

# A gradient is out of its range by this factor too, as log2.
_LEAST_RISE = 3.0
# With an rms of half of eps, at most a quarter of the elements is above eps (Markov's inequality).
_BELOW_EPSILON, _STEPS_BELOW = 0.5, 20
# The elements of all parameters of which so many have to be below eps for a warning.
_MOST_ELEMENTS = 0.5
#: What is so much smaller than the largest gradient may be the rounding of one that is 0: as of the
#: bias of keys in attention, or of one before a BatchNorm.
NOISE = 2.0**-19
_RMS = 1


class GradientRules:
    """Of one rank, whose sites are found in ``sites`` by number."""

    def __init__(self, sites: SiteTable, threshold: float) -> None:
        self._sites = sites
        self._threshold = threshold
        self._is_of_parameter = np.zeros(0, bool)
        self._epsilon = np.zeros(0)
        self._steps_below = np.zeros(0, np.int64)
        self._is_reported = False

    def set_epsilon(self, epsilon: Mapping[int, float]) -> None:
        """The eps of the optimizer by number of the gradient that it divides by the root of a mean
        of squares.
        """
        self._grow(max(epsilon, default=-1) + 1)
        for number, value in epsilon.items():
            self._epsilon[number] = value
        self._is_reported = False

    def add(self, signals: StepSignals, scores: np.ndarray, usual: np.ndarray) -> list[Found]:
        """One step: its signals, how far each is out of its range, and by number of the site the
        median of its rms. At most two findings.
        """
        self._grow(len(self._sites))
        chosen = np.flatnonzero(signals.phases == GRADIENT)
        chosen = chosen[self._is_of_parameter[signals.sites[chosen]]]
        if not len(chosen):
            return []
        found = self._rise(signals, chosen, scores[_RMS, chosen], usual)
        return found + self._below_epsilon(signals, chosen)

    def epsilon_of(self, number: int) -> float:
        """The eps that divides this gradient; NaN: none is known."""
        return float(self._epsilon[number]) or math.nan

    def _grow(self, count: int) -> None:
        held = len(self._is_of_parameter)
        more = count - held
        if more <= 0:
            return
        last = min(count, len(self._sites))
        new = np.zeros(more, bool)
        new[: last - held] = [self._sites[n].role == "param_grad" for n in range(held, last)]
        self._is_of_parameter = np.concatenate([self._is_of_parameter, new])
        self._epsilon = np.pad(self._epsilon, (0, more))
        self._steps_below = np.pad(self._steps_below, (0, more))

    def _rise(
        self, signals: StepSignals, chosen: np.ndarray, scores: np.ndarray, medians: np.ndarray
    ) -> list[Found]:
        sites, rms = signals.sites[chosen], signals.values[_RMS, chosen]
        with np.errstate(invalid="ignore"):
            is_out = (scores >= self._threshold) & (rms - medians[sites] >= _LEAST_RISE)
        count = int(is_out.sum())
        if not count:
            return []
        at = int(np.argmax(np.where(is_out, scores, -np.inf)))
        size = math.sqrt(float(signals.numel[chosen[at]]))
        value = 2.0 ** float(rms[at]) * size
        usual = 2.0 ** float(medians[sites[at]]) * size
        text = f"its norm is {format_number(value)}, usual is {format_number(usual)}"
        if count > 1:
            text += f"; {count - 1:,} other gradients of parameters are out of their range too"
        reading = Reading("gradient", value, usual, float(scores[at]), False)
        return [Found(int(sites[at]), reading, text)]

    def _below_epsilon(self, signals: StepSignals, chosen: np.ndarray) -> list[Found]:
        sites, numel = signals.sites[chosen], signals.numel[chosen]
        used = np.maximum(1.0 - signals.zero_share[chosen], 1e-30)
        with np.errstate(all="ignore"):
            # Of the elements that are not 0: of an embedding, the rows that were used.
            rms = 2.0 ** signals.values[_RMS, chosen] / np.sqrt(used)
            largest = 2.0 ** signals.values[0, chosen]
            is_live = largest > NOISE * np.nanmax(largest, initial=0.0)
            is_live &= (self._epsilon[sites] > 0) & (signals.zero_share[chosen] < 1)
            is_below = is_live & (rms < _BELOW_EPSILON * self._epsilon[sites])
        steps = self._steps_below[sites] = np.where(is_below, self._steps_below[sites] + 1, 0)
        are = is_below & (steps >= _STEPS_BELOW)
        live = float(numel[is_live].sum())
        if self._is_reported or not are.any() or numel[are].sum() < _MOST_ELEMENTS * live:
            return []
        self._is_reported = True
        at = int(np.argmax(np.where(are, numel, -1)))
        value, limit = float(rms[at]), float(self._epsilon[sites[at]])
        text = (
            f"its rms is {format_number(value)}, below the optimizer's eps of {limit:g} in "
            f"{_STEPS_BELOW} steps in a row, as with {int(are.sum()):,} of {int(is_live.sum()):,} "
            "gradients. Most of its elements are divided by eps, not by their own size: updates "
            "are smaller than the learning rate, and shrink with the gradient. A smaller eps, or a "
            "larger loss, changes that"
        )
        return [Found(int(sites[at]), Reading("epsilon", value, limit, math.nan, True), text)]
