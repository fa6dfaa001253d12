"""Compares the losses of both sides by step, and finds where they drift apart."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple, Optional

import numpy as np

from fastcheck.record.format import NONFINITE_COUNTS

#: Two losses that differ by more than this have drifted apart.
LOSS_DRIFT = 0.01
_SHOWN = 12


class Loss(NamedTuple):
    """The losses of one step. ``error``: their difference relative to the reference."""

    step: int
    actual: float
    reference: float

    @property
    def error(self) -> float:
        apart = abs(self.actual - self.reference)
        if self.actual == self.reference:
            return 0.0
        return apart / abs(self.reference) if self.reference and math.isfinite(apart) else math.inf


def loss_of(record: np.void) -> Optional[float]:
    """The value of a record of one number; None of any other."""
    if record["numel"] != 1 or not record["version"]:
        return None
    nan, positive, negative = (record[field] > 0 for field in NONFINITE_COUNTS)
    if nan or positive or negative:
        return math.nan if nan else math.inf if positive else -math.inf
    return float(record["sum"])


def drift_start(losses: Iterable[Loss], allowed: float) -> Optional[int]:
    """The first step whose losses differ by more; None where none does."""
    return next((loss.step for loss in losses if loss.error > allowed), None)


def shown_losses(losses: list[Loss], start: Optional[int]) -> list[Loss]:
    """At most a dozen: the first that differs, where the drift starts, and a regular rest."""
    if len(losses) <= _SHOWN:
        return losses
    chosen = {round(place * (len(losses) - 1) / (_SHOWN - 3)) for place in range(_SHOWN - 2)}
    for place, loss in enumerate(losses):
        if loss.error > 0:
            chosen.add(place)
            break
    chosen |= {place for place, loss in enumerate(losses) if loss.step == start}
    return [losses[place] for place in sorted(chosen)]
