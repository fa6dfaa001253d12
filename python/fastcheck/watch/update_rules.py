"""Rules for what updates do to single parameters: how far they move one, and what is lost of them.

The numbers are records of their own (monitor/hooks/stored/update_readings.py), of one parameter a
step: each has its next one some steps later. So are those of ``reduction_rules``.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import Optional

import numpy as np

from fastcheck.record.site import NUMBER_ROLES, SiteTable
from fastcheck.utils.text.numbers import format_number

from .numbers import Found, Reading
from .reduction_rules import ReductionRules

__all__ = ["UpdateRules"]

# Most of a parameter is not moved, in so many of its readings in a row; again after this share.
_LOST, _LOST_IN_A_ROW, _LOST_NO_MORE = 0.9, 3, 0.5
# Of all parameters it calls for a look, unless a schedule has brought the rate down to this share.
_LOST_OF_ALL, _RATE = 0.95, 0.5
# An update is large against the weight, and against the updates of that parameter before.
_LARGE_RATIO, _LARGE_FACTOR, _LEAST_READINGS = 0.05, 8.0, 4
_PAST = 16


class UpdateRules:
    """Of one rank, whose sites are found in ``sites`` by number."""

    def __init__(self, sites: SiteTable) -> None:
        self._sites = sites
        self._codes = np.zeros(0, np.int8)
        self._past: dict[int, deque[float]] = {}
        # In how many readings in a row; after an event more than is counted.
        self._lost: dict[int, int] = {}
        # How many readings there were, and the elements of the parameter.
        self._readings: dict[int, int] = {}
        self._numel: dict[int, int] = {}
        # The number of each parameter by module and label.
        self._parameters: dict[tuple[str, str], int] = {}
        self._highest_rate = 0.0
        self._has_warned = False
        self.reductions = ReductionRules()
        #: The last readings, by number of the site.
        self.ratios: dict[int, float] = {}
        self.shares: dict[int, float] = {}

    def add(
        self, chunks: Sequence[np.ndarray], is_skipped: bool, rate: Optional[float]
    ) -> list[Found]:
        """The records of a step, whose update was skipped or not. ``rate``: for learning."""
        self._highest_rate = max(self._highest_rate, rate or 0.0)
        has_decayed = rate is not None and rate < _RATE * self._highest_rate
        known = len(self._codes)
        if known < len(self._sites):
            roles = (self._sites[number].role for number in range(known, len(self._sites)))
            new = [NUMBER_ROLES.index(r) + 1 if r in NUMBER_ROLES else 0 for r in roles]
            self._codes = np.concatenate([self._codes, np.array(new, np.int8)])
            for number in range(known, len(self._sites)):
                site = self._sites[number]
                if site.role == "param":
                    self._parameters[site.module, site.label] = number
        found: list[Found] = []
        for records in () if is_skipped else chunks:
            sites = records["site"]
            is_known = (sites >= 0) & (sites < len(self._codes))
            for at in np.flatnonzero(self._codes[np.where(is_known, sites, 0)] * is_known):
                number, value = int(sites[at]), float(records["sum"][at])
                if self._codes[number] == 1:
                    found += self._add_ratio(number, value)
                elif self._codes[number] == 3:
                    found += self.reductions.add(number, value)
                else:
                    self._numel[number] = self._elements(number, chunks)
                    found += self._add_lost(number, value, has_decayed)
        return found

    def scalars(self) -> dict[str, float]:
        """Over all parameters with a reading: the median of the last ratios, and the mean of the
        last shares by elements.
        """
        found = {}
        if self.ratios:
            found["update_ratio"] = float(np.median(list(self.ratios.values())))
        if self.shares:
            found["lost_updates"] = self._mean()
        return found

    def _elements(self, number: int, chunks: Sequence[np.ndarray]) -> int:
        """Of the parameter that this site is about: as many as were read of it in the step."""
        site = self._sites[number]
        parameter = self._parameters.get((site.module, site.label), -1)
        counts = [records["numel"][records["site"] == parameter] for records in chunks]
        return max((int(one[-1]) for one in counts if len(one)), default=1)

    def _add_ratio(self, site: int, ratio: float) -> list[Found]:
        if not 0 < ratio < math.inf:  # there was no update, or no weight to compare it with
            return []
        self.ratios[site] = ratio
        past = self._past.setdefault(site, deque(maxlen=_PAST))
        usual = statistics.median(past) if len(past) >= _LEAST_READINGS else math.inf
        past.append(ratio)
        if ratio < max(_LARGE_RATIO, _LARGE_FACTOR * usual):
            return []
        reading = Reading("update_ratio", ratio, usual, math.nan, False)
        text = f"norm(update) / norm(weight) is {format_number(ratio)}, "
        return [Found(site, reading, f"{text}usual is {format_number(usual)}")]

    def _add_lost(self, site: int, share: float, has_decayed: bool) -> list[Found]:
        self.shares[site] = share
        self._readings[site] = self._readings.get(site, 0) + 1
        count = self._lost.get(site, 0)
        is_over = share < _LOST_NO_MORE or (share < _LOST and count < _LOST_IN_A_ROW)
        count = self._lost[site] = 0 if is_over else count + (share >= _LOST)
        warns = self._is_of_all() and not has_decayed and not self._has_warned
        if share < _LOST or count < _LOST_IN_A_ROW or (count > _LOST_IN_A_ROW and not warns):
            return []
        self._has_warned = self._has_warned or warns
        text = (
            f"updates do not change {share:.1%} of the elements that have a gradient: they are "
            "smaller than half the distance to the next number of its dtype. "
        )
        if warns:
            text += f"Of the elements of all such parameters it is {self._mean():.1%}. "
        text += "Keep the weights, or a copy that the optimizer updates, in float32; or round "
        text += "stochastically"
        return [Found(site, Reading("lost_updates", share, 0.0, math.nan, warns), text)]

    def _is_of_all(self) -> bool:
        """Whether nearly all is lost, in enough readings of each parameter."""
        is_enough = min(self._readings.values()) >= _LOST_IN_A_ROW
        return is_enough and self._mean() >= _LOST_OF_ALL

    def _mean(self) -> float:
        weights = [self._numel[site] for site in self.shares]
        return float(np.average(list(self.shares.values()), weights=weights))
