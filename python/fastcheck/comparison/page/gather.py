"""Collects what a comparison's page shows, step by step while the comparison runs: for the table,
the numbers of each pair of tensors.
"""

from __future__ import annotations

from typing import Optional

import numpy as np

from fastcheck.comparison.block import Kind, Phase, Source
from fastcheck.comparison.measure import NONFINITE, PairState
from fastcheck.comparison.over_time import Pairing
from fastcheck.comparison.steps.pairs import Pairs
from fastcheck.log.reader import read_sites_and_meta
from fastcheck.log.step_table import StepRow, StepStream
from fastcheck.report.page.grid import Axis, Grid, PageRows, values_of

# The smallest number above 1, in the coarsest codes of a page.
_ABOVE = 2.0**0.125
_MOST_EXCESS = 2.0**1000

#: Stands for no step: -1 is the place of the first weights where the first step is 0.
NEVER = -(1 << 53)

# The values of a row without pairs.
_EMPTY: dict[str, np.generic] = {
    **dict.fromkeys(("dtype", "numel", "phase", "records", "same", "different"), np.int64(0)),
    "bad_records": np.int64(0),
    **dict.fromkeys(("peak_step", "first_inexact", "first_different"), np.int64(NEVER)),
    **dict.fromkeys(("worst_step", "first_bad_step", "last_step"), np.int64(NEVER)),
    "reason": np.int64(-1),
    **dict.fromkeys(("peak", "reference_peak"), np.float64(-1)),
    **dict.fromkeys(("worst", "worst_error"), np.float64(0)),
}


class PairRows(PageRows):
    """A row for each name of each rank.

    ``excess``: the error over its limit. It is at most 1 where the pair is equal within the
    thresholds, and above 1 where it differs, whatever the reason.
    """

    def __init__(self) -> None:
        super().__init__(_EMPTY)

    def add(
        self,
        pairs: Pairs,
        rows: np.ndarray,
        steps: np.ndarray,
        excess: np.ndarray,
        peaks: tuple[np.ndarray, np.ndarray],
    ) -> None:
        """``steps``: to which each pair belongs; ``peaks``: abs max of actual and reference."""
        self["dtype"][rows] = pairs.right["dtype"]
        self["numel"][rows] = pairs.right["numel"]
        self["phase"][rows] = pairs.phases
        self["last_step"][rows] = steps
        is_different = pairs.states == PairState.DIFFERENT
        is_bad = pairs.reasons == NONFINITE
        np.add.at(self["records"], rows, 1)
        np.add.at(self["same"], rows, pairs.states == PairState.SAME)
        np.add.at(self["different"], rows, is_different)
        np.add.at(self["bad_records"], rows, is_bad)
        inexact = (pairs.states != PairState.SAME) & (pairs.states != PairState.UNREADABLE)
        self._first("first_inexact", rows, steps, inexact)
        new = self._first("first_different", rows, steps, is_different)
        self["reason"][rows[new]] = pairs.reasons[new]
        self._first("first_bad_step", rows, steps, is_bad)
        higher = self.raise_to("peak", rows, peaks[0])
        self["peak_step"][rows[higher]] = steps[higher]
        self.raise_to("reference_peak", rows, peaks[1])
        worse = self.raise_to("worst", rows, excess)
        self["worst_error"][rows[worse]] = pairs.shown_errors[worse]
        self["worst_step"][rows[worse]] = steps[worse]

    def _first(
        self, name: str, rows: np.ndarray, steps: np.ndarray, which: np.ndarray
    ) -> np.ndarray:
        """Notes the first step of the rows that have none yet; returns their positions."""
        column = self[name]
        new = np.flatnonzero(which & (column[rows] == NEVER))
        new = new[np.sort(np.unique(rows[new], return_index=True)[1])]
        column[rows[new]] = steps[new]
        return new


class Gathered:
    """``rows``: the pairs; ``sides``: the values of actual and of reference by row and step, and
    ``excess``: the largest error over its limit, 0 where all is equal to the bit, on the axis of
    ``sides``. Memory is that of what is shown.

    A parameter that is read in step 8 shows the update of step 7, and stands there; weights before
    the first update stand one step before the first.
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

    def take(self, pairs: Pairs) -> None:
        """Adds the pairs of the next step."""
        self._follow_steps(pairs)
        if not len(pairs.names):
            return
        rows = self.rows.number(pairs.rank, pairs.names)
        steps = np.full(len(rows), pairs.step)
        if self._is_run:
            steps[pairs.phases == Phase.UPDATE] = pairs.before
            steps[pairs.phases == Phase.WEIGHTS] = pairs.step - 1
        steps = np.clip(steps, *self._span)
        excess = _excess(pairs)
        values = [_values(records) for records in (pairs.left, pairs.right)]
        self.rows.add(pairs, rows, steps, excess, (values[0]["abs_max"], values[1]["abs_max"]))
        values[0]["bad"] = (pairs.reasons == NONFINITE).astype(np.uint8)
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

    def _follow_steps(self, pairs: Pairs) -> None:
        if not self.is_timed:
            return
        for source, streams, block in zip(self._sources, self._streams, (pairs.ours, pairs.theirs)):
            if pairs.rank not in streams:
                sites, _ = read_sites_and_meta(source.title, pairs.rank)
                streams[pairs.rank] = StepStream(sites, {}, pairs.rank)
            streams[pairs.rank].add(block.records)


def _excess(pairs: Pairs) -> np.ndarray:
    """The error of each pair over its limit, so that it is above 1 where the pair differs."""
    with np.errstate(all="ignore"):
        excess = np.where(pairs.shown_errors == 0, 0.0, pairs.shown_errors / pairs.limits)
    excess = np.clip(np.nan_to_num(excess, nan=0.0, posinf=_MOST_EXCESS), 0.0, _MOST_EXCESS)
    is_close = (pairs.states == PairState.CLOSE) | (pairs.states == PairState.REORDERED)
    excess = np.where(is_close, np.clip(excess, 2.0**-40, 1.0), excess)
    excess = np.where(pairs.states == PairState.DIFFERENT, np.maximum(excess, _ABOVE), excess)
    excess = np.where(pairs.states == PairState.SAME, 0.0, excess)
    return np.where(pairs.states == PairState.UNREADABLE, np.nan, excess)


def _values(records: np.ndarray) -> dict[str, np.ndarray]:
    values = values_of(records)
    readable = records["version"] > 0
    for name, column in values.items():
        if name != "bad":
            values[name] = np.where(readable & ~(column < 0) | (name == "mean"), column, np.nan)
    return values
