"""Collects what a comparison's page shows, step by step while the comparison runs: for the table,
the numbers of each pair of tensors.
"""

from __future__ import annotations

from typing import Optional

import numpy as np

from fastcheck.comparison.block import Kind, Phase, Source
from fastcheck.comparison.measure import NONFINITE, PairState
from fastcheck.comparison.over_time import Pairing
from fastcheck.comparison.result import Compared
from fastcheck.log.reader import read_sites_and_meta
from fastcheck.log.step_table import StepRow, StepStream
from fastcheck.report.page.grid import Axis, Grid, values_of

# The smallest number above 1, in the coarsest codes of a page.
_ABOVE = 2.0**0.125
_MOST_EXCESS = 2.0**1000

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
    """The rows of the page: one for each name of each rank, numbered in the order in which they are
    met.

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
        """The columns by name, of length ``count``."""
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
        np.add.at(columns["same"], rows, found.states == PairState.SAME)
        is_different = found.states == PairState.DIFFERENT
        np.add.at(columns["different"], rows, is_different)
        is_bad = found.reasons == NONFINITE
        np.add.at(columns["bad_records"], rows, is_bad)
        inexact = (found.states != PairState.SAME) & (found.states != PairState.UNREADABLE)
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


class Gathered:
    """``rows``: the pairs; ``sides``: the values of actual and of reference by row and step, and
    ``excess``: the largest error over its limit, 0 where all is equal to the bit, on the axis of
    ``sides``. Memory is that of what is shown.

    A parameter that is read in step 8 shows the update of step 7, and stands there; weights before
    the first update stand one step before the first one.
    """

    def __init__(self, pairing: Pairing, sources: tuple[Source, Source]) -> None:
        steps = [step for _, step, _ in pairing.places]
        self._span = (min(steps, default=0) - 1, max(steps, default=0))
        self._sources = sources
        self._is_run = sources[0].kind.family == "run"
        self.rows = PairRows()
        self.sides: Optional[tuple[Grid, Grid]] = None
        self.excess = np.zeros((0, 0))
        self._streams: tuple[dict[int, StepStream], ...] = ({}, {})
        self.is_timed = all(source.kind is Kind.LOG for source in sources)

    def take(self, found: Compared) -> None:
        """The next step."""
        self._follow_steps(found)
        if not len(found.names):
            return
        rows = self.rows.number(found)
        steps = np.full(len(rows), found.step)
        if self._is_run:
            steps[found.phases == Phase.UPDATE] = found.before
            steps[found.phases == Phase.WEIGHTS] = found.step - 1
        steps = np.clip(steps, *self._span)
        excess = _excess(found)
        values = [_values(records) for records in found.records]
        self.rows.add(found, rows, steps, excess, (values[0]["abs_max"], values[1]["abs_max"]))
        values[0]["bad"] = (found.reasons == NONFINITE).astype(np.uint8)
        if self.sides is None:
            axis = Axis.spanning(*self._span, max(len(np.unique(rows)), 1))
            self.sides = Grid(axis, self.rows.count), Grid(axis, self.rows.count)
        for grid, mine in zip(self.sides, values):
            grid.add(rows, steps, mine)
        axis = self.sides[0].axis
        missing = len(self.sides[0].bad) - len(self.excess)
        if missing:
            more = np.full((missing, axis.buckets), np.nan)
            self.excess = np.concatenate([self.excess.reshape(-1, axis.buckets), more])
        columns = (steps - axis.base) // axis.width
        np.fmax.at(self.excess, (rows, columns), excess)

    def steps(self) -> tuple[list[StepRow], list[StepRow]]:
        """Loss, scale, learning rate and norm of each step of both sides; of logs only."""
        mine, other = (
            [row for stream in streams.values() for row in stream.rows()]
            for streams in self._streams
        )
        return mine, other

    def _follow_steps(self, found: Compared) -> None:
        if not self.is_timed:
            return
        for source, streams, block in zip(self._sources, self._streams, found.blocks):
            if found.rank not in streams:
                sites, _ = read_sites_and_meta(source.title, found.rank)
                streams[found.rank] = StepStream(sites, {}, found.rank)
            streams[found.rank].add(block.records)


def _excess(found: Compared) -> np.ndarray:
    """The error of each pair over its limit, so that it is above 1 where the pair differs."""
    with np.errstate(all="ignore"):
        excess = np.where(found.errors == 0, 0.0, found.errors / found.limits)
    excess = np.clip(np.nan_to_num(excess, nan=0.0, posinf=_MOST_EXCESS), 0.0, _MOST_EXCESS)
    is_close = (found.states == PairState.CLOSE) | (found.states == PairState.REORDERED)
    excess = np.where(is_close, np.clip(excess, 2.0**-40, 1.0), excess)
    excess = np.where(found.states == PairState.DIFFERENT, np.maximum(excess, _ABOVE), excess)
    excess = np.where(found.states == PairState.SAME, 0.0, excess)
    return np.where(found.states == PairState.UNREADABLE, np.nan, excess)


def _values(records: np.ndarray) -> dict[str, np.ndarray]:
    values = values_of(records)
    readable = records["version"] > 0
    for name, column in values.items():
        if name != "bad":
            values[name] = np.where(readable & ~(column < 0) | (name == "mean"), column, np.nan)
    return values
