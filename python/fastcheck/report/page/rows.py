"""The data of the table of sites: a row for each site of each rank, from all of its records."""

from __future__ import annotations

import numpy as np

from fastcheck.record.format import Depth, nonfinite

__all__ = ["SiteRows"]

_FIELDS = {
    "rank": np.int64,
    "site": np.int64,
    "records": np.int64,
    "dtype": np.int64,
    "numel": np.int64,
    "last_step": np.int64,
    "last_abs_max": np.float64,
    "peak": np.float64,
    "peak_step": np.int64,
    "zero_share": np.float64,
    "bad_records": np.int64,
    "first_bad_step": np.int64,
    "compared": np.int64,
    "changed": np.int64,
}
_NONE = {"last_abs_max": np.nan, "peak": -1.0, "zero_share": np.nan, "first_bad_step": -1}


class SiteRows:
    """Columns, one row a site of a rank, in the order of their first records.

    ``peak``: the largest abs max, at ``peak_step``; -1 without one. ``last_abs_max`` and
    ``zero_share``: of the last record. ``bad_records``: those with a NaN or an infinity.
    ``compared``: how often a checksum had a predecessor, ``changed``: how often it differed.
    """

    def __init__(self) -> None:
        self._columns = {n: np.full(64, _NONE.get(n, 0), kind) for n, kind in _FIELDS.items()}
        self._checksum = np.zeros(64, np.uint64)
        self._has_checksum = np.zeros(64, bool)
        self._row_of: dict[int, np.ndarray] = {}
        self.count = 0

    def number(self, rank: int, sites: np.ndarray, number_of: np.ndarray) -> np.ndarray:
        """The row of each record of ``rank``. ``sites``: their own numbers, below the length of
        ``number_of``, which has those of the page.
        """
        known = self._row_of.setdefault(rank, np.full(len(number_of), -1, np.int64))
        rows: np.ndarray = known[sites]
        if (rows < 0).any():
            new, first = np.unique(sites[rows < 0], return_index=True)
            new = new[np.argsort(first)]
            self._grow(self.count + len(new))
            known[new] = np.arange(self.count, self.count + len(new))
            self._columns["rank"][known[new]] = rank
            self._columns["site"][known[new]] = number_of[new]
            self.count += len(new)
            rows = known[sites]
        return rows

    def find(self, rank: int, sites: np.ndarray) -> np.ndarray:
        """The rows of sites of ``rank`` by their own numbers; -1 for one without records."""
        known = self._row_of.get(rank)
        if known is None:
            return np.full(len(sites), -1, np.int64)
        inside = (sites >= 0) & (sites < len(known))
        found: np.ndarray = np.where(inside, known[np.where(inside, sites, 0)], -1)
        return found

    def add(self, rows: np.ndarray, records: np.ndarray, values: dict[str, np.ndarray]) -> None:
        """``values``: what values_of() has made of the records, which are in order."""
        if not len(rows):
            return
        mine = self._columns
        mine["records"][: self.count] += np.bincount(rows, minlength=self.count)
        # Of several assignments to one place the last one stays.
        for name in ("dtype", "numel"):
            mine[name][rows] = records[name]
        mine["last_step"][rows] = records["step"]
        mine["last_abs_max"][rows] = values["abs_max"]
        mine["zero_share"][rows] = values["zero_share"]
        self._peak(rows, records["step"], values["abs_max"])
        bad = np.flatnonzero(nonfinite(records))
        if len(bad):
            mine["bad_records"][: self.count] += np.bincount(rows[bad], minlength=self.count)
            first_rows, at = np.unique(rows[bad], return_index=True)
            is_new = mine["first_bad_step"][first_rows] < 0
            mine["first_bad_step"][first_rows[is_new]] = records["step"][bad[at[is_new]]]
        self._compare(rows, records)

    def columns(self) -> dict[str, np.ndarray]:
        """The columns, as long as there are rows."""
        return {name: column[: self.count] for name, column in self._columns.items()}

    def _peak(self, rows: np.ndarray, steps: np.ndarray, abs_max: np.ndarray) -> None:
        higher = np.flatnonzero(abs_max > self._columns["peak"][rows])[::-1]
        # Few, once some steps are over. The ascending order leaves the largest one of each row, and
        # of equal ones the first.
        higher = higher[np.argsort(abs_max[higher], kind="stable")]
        self._columns["peak"][rows[higher]] = abs_max[higher]
        self._columns["peak_step"][rows[higher]] = steps[higher]

    def _compare(self, rows: np.ndarray, records: np.ndarray) -> None:
        full = np.flatnonzero(records["depth"] >= int(Depth.FULL))
        if not len(full):
            return
        order = full[np.argsort(rows[full], kind="stable")]
        at, sums = rows[order], records["checksum"][order]
        is_first = np.diff(at, prepend=-1) != 0
        before = np.concatenate([sums[:1], sums[:-1]])
        before[is_first] = self._checksum[at[is_first]]
        has_before = ~is_first | self._has_checksum[at]
        changed = has_before & (before != sums)
        self._columns["compared"][: self.count] += np.bincount(at[has_before], None, self.count)
        self._columns["changed"][: self.count] += np.bincount(at[changed], None, self.count)
        self._checksum[at], self._has_checksum[at] = sums, True

    def _grow(self, rows: int) -> None:
        room = len(self._checksum)
        if rows <= room:
            return
        more = max(rows, 2 * room) - room
        for name, column in self._columns.items():
            self._columns[name] = np.concatenate(
                [column, np.full(more, _NONE.get(name, 0), column.dtype)]
            )
        self._checksum = np.concatenate([self._checksum, np.zeros(more, np.uint64)])
        self._has_checksum = np.concatenate([self._has_checksum, np.zeros(more, bool)])
