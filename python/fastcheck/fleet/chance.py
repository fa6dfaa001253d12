"""How often chance makes a rank an outlier, given how many rows of its fleet are outliers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["Chance", "fewest_by_chance", "usual_count"]

_BY_CHANCE = 1e-4
_FEWEST_STEPS = 3
Row = Mapping[str, Any]


class Chance:
    """In how many steps a rank is an outlier at one site by chance, in this fleet."""

    def __init__(self, answers: Mapping[str, list[dict[str, Any]]]) -> None:
        found = answers["looked_at"][0]
        rows, steps = int(found["row_count"] or 0), int(found["step_count"] or 0)
        outlying = sum(int(row["steps"]) for row in answers["outliers"])
        self._fewest = math.inf
        if rows:
            self._fewest = fewest_by_chance(outlying / rows * steps, rows / steps)

    def excludes(self, place: Row) -> bool:
        """Whether chance does not explain this row of the outliers."""
        return int(place["steps"]) >= self._fewest


def fewest_by_chance(mean: float, tries: float) -> int:
    """The smallest number, three at least, that fewer than ``_BY_CHANCE`` of ``tries`` Poisson
    variables of this mean reach or exceed, as expected.
    """
    term, below, number = math.exp(-mean), 0.0, 0
    tail = 1.0
    while number < _FEWEST_STEPS or tail * tries > _BY_CHANCE:
        below += term
        number += 1
        term *= mean / number
        # Beyond the mean the tail is at most a geometric series, which cancels nothing.
        tail = 1.0 - below if number <= mean + 1 else term / (1.0 - mean / (number + 1))
        if number > 1_000_000:
            break
    return number


def usual_count(values: Iterable[int]) -> float:
    """The mean of the lower three quarters, doubled, and 0.3: what is usual, whatever some ranks
    do. At least the mean of ``values`` where these are Poisson variables.
    """
    ordered = sorted(values)
    kept = ordered[: max(1, math.ceil(len(ordered) * 0.75))]
    # The rest lies above by construction; doubled it covers the mean of a Poisson variable. Where
    # three quarters are 0 that mean is up to ln(4 / 3) = 0.288.
    return 2 * sum(kept) / len(kept) + 0.3
