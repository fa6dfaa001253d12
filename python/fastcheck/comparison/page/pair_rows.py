"""The numbers of each pair of tensors over all steps, for the table of a comparison's page."""

from __future__ import annotations

import numpy as np

from fastcheck.comparison.compared import Compared
from fastcheck.comparison.measure import NONFINITE, State

#: No step: the first weights stand at -1, where the first step is 0.
NEVER = -(1 << 53)

_NONE = {
    "peak": -1.0,
    "reference_peak": -1.0,
    "peak_step": NEVER,
    "first_inexact": NEVER,
    "first_different": NEVER,
    "worst_step": NEVER,
    "reason": -1,
    "first_bad_step": NEVER,
    "last_step": NEVER,
}
_INTEGERS = ("site", "rank", "dtype", "numel", "phase", "records", "same", "different")
_MORE_INTEGERS = ("bad_records", "peak_step", "first_inexact", "first_different", "worst_step")
_REST = ("reason", "first_bad_step", "last_step")


class PairRows:
    """One row for each name of each rank, numbered in the order in which they are met.

    ``excess``: the error over its limit. It is at most 1 where the pair is equal within the
    thresholds, and above 1 where it differs, whatever the reason.
    """

    def __init__(self) -> None:
        self.count = 0
        self._row_of: dict[int, np.ndarray] = {}
        self._columns: dict[str, np.ndarray] = {
            name: np.zeros(0, np.int64) for name in _INTEGERS + _MORE_INTEGERS + _REST
        }
        for name in ("peak", "reference_peak", "worst", "worst_error"):
            self._columns[name] = np.zeros(0)

    def columns(self) -> dict[str, np.ndarray]:
        """By name, of length ``count``."""
        return {name: column[: self.count] for name, column in self._columns.items()}

    def number(self, found: Compared) -> np.ndarray:
        """The row of each pair."""
        known = self._row_of.get(found.rank, np.full(0, -1))
        size = int(found.names.max()) + 1
        if size > len(known):
            known = np.concatenate([known, np.full(2 * size - len(known), -1)])
            self._row_of[found.rank] = known
        new, first = np.unique(found.names, return_index=True)
        first = np.sort(first[known[new] < 0])
        names = found.names[first]
        known[names] = self.count + np.arange(len(names))
        self._grow(self.count + len(names))
        self._columns["site"][known[names]] = names
        self._columns["rank"][known[names]] = found.rank
        self.count += len(names)
        rows: np.ndarray = known[found.names]
        return rows

    def add(
        self,
        found: Compared,
        rows: np.ndarray,
        steps: np.ndarray,
        excess: np.ndarray,
        peaks: tuple[np.ndarray, np.ndarray],
    ) -> None:
        """``steps``: to which each pair belongs; ``peaks``: abs max of actual and reference."""
        columns = self._columns
        columns["dtype"][rows] = found.records[1]["dtype"]
        columns["numel"][rows] = found.records[1]["numel"]
        columns["phase"][rows] = found.phases
        columns["last_step"][rows] = steps
        np.add.at(columns["records"], rows, 1)
        np.add.at(columns["same"], rows, found.states == State.SAME)
        is_different = found.states == State.DIFFERENT
        np.add.at(columns["different"], rows, is_different)
        is_bad = found.reasons == NONFINITE
        np.add.at(columns["bad_records"], rows, is_bad)
        inexact = (found.states != State.SAME) & (found.states != State.UNREADABLE)
        self._first("first_inexact", rows, steps, inexact)
        new = self._first("first_different", rows, steps, is_different)
        columns["reason"][rows[new]] = found.reasons[new]
        self._first("first_bad_step", rows, steps, is_bad)
        for name, values in (("peak", peaks[0]), ("reference_peak", peaks[1])):
            higher = np.flatnonzero(values > columns[name][rows])
            higher = higher[np.argsort(values[higher], kind="stable")]
            columns[name][rows[higher]] = values[higher]
            if name == "peak":
                columns["peak_step"][rows[higher]] = steps[higher]
        worse = np.flatnonzero(excess > columns["worst"][rows])
        worse = worse[np.argsort(excess[worse], kind="stable")]
        columns["worst"][rows[worse]] = excess[worse]
        columns["worst_error"][rows[worse]] = found.errors[worse]
        columns["worst_step"][rows[worse]] = steps[worse]

    def _first(
        self, name: str, rows: np.ndarray, steps: np.ndarray, which: np.ndarray
    ) -> np.ndarray:
        """Notes the step of those that have none yet; returns their positions."""
        column = self._columns[name]
        new = np.flatnonzero(which & (column[rows] == NEVER))
        new = new[np.sort(np.unique(rows[new], return_index=True)[1])]
        column[rows[new]] = steps[new]
        return new

    def _grow(self, rows: int) -> None:
        room = len(self._columns["site"])
        if rows <= room:
            return
        more = max(rows, 2 * room) - room
        for name, column in self._columns.items():
            added = np.full(more, _NONE.get(name, 0), column.dtype)
            self._columns[name] = np.concatenate([column, added])
