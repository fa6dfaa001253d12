"""Rules for what updates do to single parameters: how far they move one, and what is lost of them.

The numbers are records of their own (monitor/hooks/stored/update_readings.py), of one parameter a
step: each has its next one some steps later.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fastcheck.record.site import UPDATE_ROLES, SiteTable
from fastcheck.utils.text.numbers import format_number

from .numbers import Reading

__all__ = ["Found", "UpdateRules"]

# Most of a parameter is not moved, in so many of its readings in a row.
_LOST, _LOST_IN_A_ROW = 0.9, 3
# An update is large against the weight, and against the updates of that parameter before.
_LARGE_RATIO, _LARGE_FACTOR, _LEAST_READINGS = 0.05, 8.0, 4
_PAST = 16


class Found(NamedTuple):
    """What a rule found at the site of this number, and the sentence for it."""

    site: int
    reading: Reading
    text: str


class UpdateRules:
    """Of one rank, whose sites are found in ``sites`` by number."""

    def __init__(self, sites: SiteTable) -> None:
        self._sites = sites
        self._codes = np.zeros(0, np.int8)
        self._ratios: dict[int, deque[float]] = {}
        self._lost: dict[int, int] = {}

    def add(self, chunks: Sequence[np.ndarray], is_skipped: bool) -> list[Found]:
        """The records of a step, whose update was skipped or not."""
        known = len(self._codes)
        if known < len(self._sites):
            roles = (self._sites[number].role for number in range(known, len(self._sites)))
            new = [UPDATE_ROLES.index(r) + 1 if r in UPDATE_ROLES else 0 for r in roles]
            self._codes = np.concatenate([self._codes, np.array(new, np.int8)])
        found: list[Found] = []
        for records in () if is_skipped else chunks:
            sites = records["site"]
            is_known = (sites >= 0) & (sites < len(self._codes))
            for at in np.flatnonzero(self._codes[np.where(is_known, sites, 0)] * is_known):
                site, value = int(sites[at]), float(records["sum"][at])
                if self._codes[site] == 1:
                    found += self._add_ratio(site, value)
                else:
                    found += self._add_lost(site, value)
        return found

    def _add_ratio(self, site: int, ratio: float) -> list[Found]:
        if not 0 < ratio < math.inf:  # there was no update, or no weight to compare it with
            return []
        past = self._ratios.setdefault(site, deque(maxlen=_PAST))
        usual = float(np.median(past)) if len(past) >= _LEAST_READINGS else math.inf
        past.append(ratio)
        if ratio < max(_LARGE_RATIO, _LARGE_FACTOR * usual):
            return []
        reading = Reading("update_ratio", ratio, usual, math.nan, False)
        text = f"norm(update) / norm(weight) is {format_number(ratio)}, "
        return [Found(site, reading, f"{text}usual is {format_number(usual)}")]

    def _add_lost(self, site: int, share: float) -> list[Found]:
        count = self._lost[site] = self._lost.get(site, 0) + 1 if share >= _LOST else 0
        if count != _LOST_IN_A_ROW:
            return []
        text = (
            f"updates do not change {share:.1%} of the elements that have a gradient: they are "
            "smaller than half the distance to the next number of its dtype. Keep the weights, or "
            "a copy that the optimizer updates, in float32; or round stochastically"
        )
        return [Found(site, Reading("lost_updates", share, 0.0, math.nan, True), text)]
