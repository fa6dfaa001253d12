"""Rules for activations and gradients that have become zero, or the same everywhere."""

from __future__ import annotations

import numpy as np

from .signals import ACTIVATION, GRADIENT, StepSignals

__all__ = ["STUCK_STEPS", "StuckTensors"]

_ZERO = 0.99
#: In so many steps in a row.
STUCK_STEPS = 50
# A gradient underflows: most of it is zero, and much more than it was in its first steps.
_UNDERFLOW, _UNDERFLOW_RISE, _UNDERFLOW_STEPS = 0.9, 0.3, 10
_FIRST = 16
# A tensor with fewer elements may well be all zero by chance.
_LEAST_ELEMENTS = 32


class StuckTensors:
    """One tensor for each number from 0 on. A tensor that was never otherwise is not reported."""

    def __init__(self) -> None:
        self._seen = np.zeros(0, np.int64)
        self._dead = np.zeros(0, np.int64)
        self._constant = np.zeros(0, np.int64)
        self._underflow = np.zeros(0, np.int64)
        self._has_lived = np.zeros(0, bool)
        self._has_varied = np.zeros(0, bool)
        self._usual = np.zeros(0)

    def grow(self, count: int) -> None:
        """Makes room for the numbers below ``count``."""
        more = count - len(self._seen)
        if more > 0:
            more = max(more, len(self._seen), 64)
            for name, old in list(vars(self).items()):
                setattr(self, name, np.pad(old, (0, more)))

    def add(self, signals: StepSignals) -> list[tuple[int, str]]:
        """One step: the places of tensors that are newly stuck, and the kind of event."""
        sites = signals.sites
        is_large = signals.numel >= _LEAST_ELEMENTS
        is_activation = (signals.phases == ACTIVATION) & is_large
        is_zero = signals.zero_share >= _ZERO
        is_constant = ~is_zero & signals.is_equal
        dead = self._count(self._dead, sites, is_activation & is_zero)
        constant = self._count(self._constant, sites, is_activation & is_constant)
        seen = self._seen[sites]
        self._usual[sites] += np.where(seen < _FIRST, signals.zero_share / _FIRST, 0.0)
        has_underflowed = (
            (signals.phases == GRADIENT)
            & is_large
            & signals.is_narrow
            & (seen >= _FIRST)
            & (signals.zero_share >= np.maximum(_UNDERFLOW, self._usual[sites] + _UNDERFLOW_RISE))
        )
        underflow = self._count(self._underflow, sites, has_underflowed)
        found = [
            (at, kind)
            for kind, is_new in (
                ("underflow", underflow == _UNDERFLOW_STEPS),
                ("dead", (dead == STUCK_STEPS) & self._has_lived[sites]),
                ("constant", (constant == STUCK_STEPS) & self._has_varied[sites]),
            )
            for at in np.flatnonzero(is_new).tolist()
        ]
        self._has_lived[sites] |= ~is_zero
        self._has_varied[sites] |= ~is_constant & ~is_zero
        self._seen[sites] = seen + 1
        return found

    @staticmethod
    def _count(counts: np.ndarray, sites: np.ndarray, holds: np.ndarray) -> np.ndarray:
        """In how many steps in a row it holds, this one included."""
        found = np.where(holds, counts[sites] + 1, 0)
        counts[sites] = found
        return found
