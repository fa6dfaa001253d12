"""Where the numbers of each step part: loss, loss scale, learning rate, gradient norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Optional

from fastcheck.comparison.over_time.losses import LOSS_DRIFT
from fastcheck.log.step_table import StepRow

__all__ = ["parted_signals"]

_SIGNALS = ("learning_rate", "loss", "scale", "gradient_norm", "overflow")
_TITLES = {
    "learning_rate": "learning rate",
    "scale": "loss scale",
    "gradient_norm": "gradient norm",
    "overflow": "skipped update",
}


def parted_signals(
    actual: Sequence[StepRow], reference: Sequence[StepRow], allowed: float = LOSS_DRIFT
) -> list[dict[str, Any]]:
    """Of each number that differs anywhere: the first step where it is not equal, with both values,
    and the first where it differs by more than ``allowed`` of the reference. On the lowest rank.
    """
    ranks = {row.rank for row in actual} & {row.rank for row in reference}
    if not ranks:
        return []
    rank = min(ranks)
    ours, theirs = (
        {row.step: row for row in rows if row.rank == rank} for rows in (actual, reference)
    )
    steps = sorted(ours.keys() & theirs.keys())
    found = []
    for name in _SIGNALS:
        pairs = [(step, getattr(ours[step], name), getattr(theirs[step], name)) for step in steps]
        apart = [(step, mine, other) for step, mine, other in pairs if not _same(mine, other)]
        if apart:
            step, mine, other = apart[0]
            far = (step for step, mine, other in apart if _distance(mine, other) > allowed)
            found.append(
                {
                    "signal": _TITLES.get(name, name),
                    "first_inexact": step,
                    "first_different": next(far, None),
                    "actual": _cell(mine),
                    "reference": _cell(other),
                    "row": -1,
                }
            )
    return found


def _same(mine: Optional[float], other: Optional[float]) -> bool:
    if mine is None or other is None:
        return True  # one side has not read it
    return mine == other or (math.isnan(mine) and math.isnan(other))


def _distance(mine: float, other: float) -> float:
    apart = abs(float(mine) - float(other))
    if not math.isfinite(apart) or not other:
        return math.inf
    return apart / abs(other)


def _cell(value: Any) -> Any:
    return ("yes" if value else "no") if isinstance(value, bool) else value
