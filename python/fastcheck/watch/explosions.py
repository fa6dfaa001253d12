"""The rule for tensors that grow by orders of magnitude from one step to the next."""

from __future__ import annotations

from typing import NamedTuple, Optional

import numpy as np

from fastcheck.record.site import SiteTable

from .gradient_rules import NOISE
from .signals import ACTIVATION, GRADIENT, NOTHING, UPDATE, WEIGHT, StepSignals

__all__ = ["Exploded", "Explosions"]

# So many doublings more than in all steps before.
_EXPLOSION = 10.0
# Of these steps there are so many in which the tensor was not as much smaller than its largest: one
# that was zero, or used in one of them, has no past to explode from. Gradients and weights may be
# tiny in the first steps of a healthy run.
_AFTER = {ACTIVATION: 8, GRADIENT: 16, WEIGHT: 16}
_NEVER = 2**40
_RMS = 1
# One module explodes once in so many steps. Another one does so by itself.
_PAUSE = 32


class Exploded(NamedTuple):
    """Where in the step's signals, the row of NAMES, and how high it was before, as log2."""

    at: int
    row: int
    highest: float


class Explosions:
    """Of one rank, whose sites are found in ``sites`` by number."""

    def __init__(self, sites: SiteTable) -> None:
        self._sites = sites
        # The highest that abs max and rms of each tensor were.
        self._highest = np.zeros((2, 0))
        # In how many steps the rms was not far below that.
        self._steps = np.zeros(0, np.int64)
        self._after = np.full(UPDATE + 1, _NEVER)
        self._after[list(_AFTER)] = list(_AFTER.values())
        # When each module exploded, but for what came within the pause.
        self._exploded_at: dict[str, int] = {}

    def grow(self, count: int) -> None:
        """Makes room for the sites with numbers below ``count``."""
        held = self._highest.shape[1]
        if count > held:
            more = max(count - held, held, 64)
            self._highest = np.pad(self._highest, ((0, 0), (0, more)), constant_values=-np.inf)
            self._steps = np.pad(self._steps, (0, more))

    def add(self, step: int, signals: StepSignals, is_skipped: bool) -> Optional[Exploded]:
        """One step: the first tensor that is far above all that it ever was, of a module that has
        not exploded a moment ago. ``is_skipped``: there was no update, as with a loss scale.
        """
        sites, level = signals.sites, signals.values[:2]
        before = self._highest[:, sites]
        with np.errstate(invalid="ignore"):
            far = level - before >= _EXPLOSION
            is_usual = level[_RMS] > np.fmax(before[_RMS] - _EXPLOSION, NOTHING)
        self._highest[:, sites] = np.fmax(before, level)
        phases, steps = signals.phases, self._steps[sites]
        has_past = steps >= self._after[phases]
        # Of one without a past, what came before such a rise was none of it.
        self._steps[sites] = np.where(far[_RMS] & ~has_past, 1, steps + is_usual)
        if not far.any():
            return None
        is_gradient = phases == GRADIENT
        if is_gradient.any():
            # Gradients that are the rounding of 0 may become anything.
            largest = float(np.nanmax(before[_RMS, is_gradient]))
            has_past &= ~is_gradient | (before[_RMS] > largest + np.log2(NOISE))
            if is_skipped:
                has_past &= ~is_gradient
        found = None
        places, rows = np.nonzero((far & has_past).T)
        # In the order of a step: weights are read after the gradients, and show the step before.
        order = np.lexsort((rows, places, phases[places]))
        for at, row in zip(places[order].tolist(), rows[order].tolist()):
            module = self._sites[int(sites[at])].module
            last = self._exploded_at.get(module)
            if last == step:
                continue
            if last is None or step - last >= _PAUSE:
                found = found or Exploded(at, row, float(before[row, at]))
                self._exploded_at[module] = step
        return found
