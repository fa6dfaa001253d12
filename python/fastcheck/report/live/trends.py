"""The largest magnitudes of each site over the last steps, as arrays, and its last record."""

from __future__ import annotations

import numpy as np

from fastcheck.record.format import RECORD_DTYPE, overflowed
from fastcheck.record.statistics import LARGEST_FINITE, statistics_columns

#: The number of steps that are held.
STEPS = 32


class SiteTrends:
    """The last steps of the sites of one rank; a row is a site by its number.

    ``last``: the last record of each site. ``level``: the largest abs max of its last step, NaN
    without a record. ``is_bad``: whether that step has an overflow. ``seen``: whether it has a
    record.
    """

    def __init__(self) -> None:
        self.last = np.zeros(0, RECORD_DTYPE)
        self.level = np.zeros(0)
        self.is_bad = np.zeros(0, bool)
        self.seen = np.zeros(0, bool)
        #: The youngest step; -1 without records.
        self.step = -1
        # Abs max by step modulo STEPS.
        self._abs_max = np.zeros((0, STEPS))
        self._bad = np.zeros((0, STEPS), bool)

    def add(self, records: np.ndarray) -> None:
        """The next records, in order."""
        if not len(records):
            return
        sites, steps = records["site"], records["step"]
        self._grow(int(sites.max()) + 1)
        abs_max, bad = statistics_columns(records)["abs_max"], overflowed(records)
        self._set_last(records, abs_max, bad)
        self._advance(int(steps.max()))
        is_held = steps > self.step - STEPS
        if not is_held.all():
            sites, steps, abs_max, bad = (a[is_held] for a in (sites, steps, abs_max, bad))
        cells = sites.astype(np.int64) * STEPS + steps % STEPS
        np.fmax.at(self._abs_max.reshape(-1), cells, abs_max)
        self._bad.reshape(-1)[cells[bad]] = True

    def headroom(self) -> np.ndarray:
        """The headroom of each site in its last step: bits between abs max and the largest number
        of its dtype; -inf where it overflowed, NaN where there is no such number.
        """
        with np.errstate(all="ignore"):
            bits = np.log2(LARGEST_FINITE[self.last["dtype"]] / self.level)
        return np.where(self.is_bad, -np.inf, bits)

    def series(self, site: int) -> tuple[list[float | None], list[bool]]:
        """abs max of a site in each of the last STEPS steps up to the youngest step, None where
        there is none, and which of them overflowed.
        """
        order = np.arange(self.step + 1, self.step + 1 + STEPS) % STEPS
        values = self._abs_max[site, order].tolist()
        shown = [value if value == value else None for value in values]
        return shown, self._bad[site, order].tolist()

    def _set_last(self, records: np.ndarray, abs_max: np.ndarray, bad: np.ndarray) -> None:
        sites, steps = records["site"], records["step"]
        before = np.where(self.seen, self.last["step"], np.iinfo(np.int64).min)
        latest = before.copy()
        np.maximum.at(latest, sites, steps)
        is_new = latest > before
        self.level[is_new] = np.nan
        self.is_bad[is_new] = False
        at = np.flatnonzero(steps == latest[sites])
        of = sites[at]
        np.fmax.at(self.level, of, abs_max[at])
        self.is_bad[of[bad[at]]] = True
        # The last of several records of a site stays.
        self.last[of] = records[at]
        self.seen[of] = True

    def _advance(self, step: int) -> None:
        """Clears the columns of the steps after the youngest step, up to ``step``."""
        if step <= self.step:
            return
        first = max(self.step + 1, step - STEPS + 1)
        columns = np.arange(first, step + 1) % STEPS
        self._abs_max[:, columns] = np.nan
        self._bad[:, columns] = False
        self.step = step

    def _grow(self, rows: int) -> None:
        more = rows - len(self.seen)
        if more <= 0:
            return
        more = max(more, len(self.seen))
        self.last = np.concatenate([self.last, np.zeros(more, RECORD_DTYPE)])
        self.level = np.concatenate([self.level, np.full(more, np.nan)])
        self.is_bad = np.concatenate([self.is_bad, np.zeros(more, bool)])
        self.seen = np.concatenate([self.seen, np.zeros(more, bool)])
        self._abs_max = np.concatenate([self._abs_max, np.full((more, STEPS), np.nan)])
        self._bad = np.concatenate([self._bad, np.zeros((more, STEPS), bool)])
