"""``Watch(skip_above=)``: the limit, and the updates that were skipped for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Optional

import numpy as np

from fastcheck.record.site import SiteTable

from .numbers import Reading

__all__ = ["Skips"]


class Skips:
    """Which updates were skipped, by the records of what the device decided."""

    def __init__(self, sites: SiteTable, factor: Optional[float]) -> None:
        self._sites = sites
        self._factor = factor
        self._known = 0
        # The sites of the role: one for each optimizer.
        self._numbers: list[int] = []
        self._usual: Optional[float] = None

    def add(self, chunks: Sequence[np.ndarray]) -> bool:
        """The records of a step; whether one of its updates was skipped."""
        for number in range(self._known, len(self._sites)):
            if self._sites[number].role == "skipped_update":
                self._numbers.append(number)
        self._known = len(self._sites)
        return bool(self._numbers) and any(
            bool((records["sum"][np.isin(records["site"], self._numbers)] == 1.0).any())
            for records in chunks
        )

    def limit(self, usual: Optional[float]) -> Optional[float]:
        """The largest norm that an update may have, by what is usual: the last number that was
        known, while the range of norms is learned anew. None: no limit yet.
        """
        if usual is not None:
            self._usual = usual
        return None if self._usual is None or self._factor is None else self._factor * self._usual

    def event(self, norm: Optional[float]) -> tuple[Reading, str]:
        """Of a step whose update was skipped, whose gradients had this norm if it is known."""
        limit = self.limit(None)
        if norm is not None and limit is not None and norm > limit:
            text = f"the norm of its gradients is {norm:,.4g}, and the limit {limit:,.4g}"
        else:
            text = "a gradient is not finite, or the norm of those of one optimizer is too large"
        reading = Reading("skipped", _or_nan(norm), _or_nan(limit), math.nan, False)
        return reading, f"the update was skipped: {text}"


def _or_nan(number: Optional[float]) -> float:
    return math.nan if number is None else number
