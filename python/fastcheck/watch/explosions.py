"""The rule for tensors that grow by orders of magnitude from one step to the next."""

from __future__ import annotations

from typing import NamedTuple, Optional

import numpy as np

from fastcheck.record.site import SiteTable

from .signals import ACTIVATION, StepSignals

__all__ = ["Exploded", "Explosions"]

# So many doublings more than in all steps before, of which there are so many.
_EXPLOSION, _EXPLOSION_AFTER = 10.0, 8
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
        # When each module exploded, but for what came within the pause.
        self._exploded_at: dict[str, int] = {}

    def grow(self, count: int) -> None:
        """Makes room for the sites with numbers below ``count``."""
        held = self._highest.shape[1]
        if count > held:
            more = max(count - held, held, 64)
            self._highest = np.pad(self._highest, ((0, 0), (0, more)), constant_values=-np.inf)

    def add(self, step: int, signals: StepSignals, counts: np.ndarray) -> Optional[Exploded]:
        """One step: the first activation that is far above all that it ever was, of a module that
        has not exploded a moment ago. ``counts``: how many values of each tensor are known.
        """
        sites, level = signals.sites, signals.values[:2]
        before = self._highest[:, sites]
        with np.errstate(invalid="ignore"):
            far = level - before >= _EXPLOSION
        self._highest[:, sites] = np.fmax(before, level)
        if not far.any():
            return None
        far &= (counts >= _EXPLOSION_AFTER) & (signals.phases == ACTIVATION)
        found = None
        places, rows = np.nonzero(far.T)
        for at, row in zip(places.tolist(), rows.tolist()):
            module = self._sites[int(sites[at])].module
            last = self._exploded_at.get(module)
            if last is None or step - last >= _PAUSE:
                found = found or Exploded(at, row, float(before[row, at]))
                self._exploded_at[module] = step
        return found
