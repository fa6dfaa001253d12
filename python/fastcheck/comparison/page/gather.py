"""Collects what a comparison's page shows, step by step while the comparison runs."""

from __future__ import annotations

from typing import Optional

import numpy as np

from fastcheck.comparison.block import Kind, Phase, Source
from fastcheck.comparison.compared import Compared
from fastcheck.comparison.measure import NONFINITE, State
from fastcheck.comparison.over_time.step_pairs import Pairing
from fastcheck.log.reader import read_sites_and_meta
from fastcheck.log.step_table import StepRow, StepStream
from fastcheck.report.page.grid import Axis, Grid, values_of

from .pair_rows import PairRows

# The smallest number above 1, in the coarsest codes of a page.
_ABOVE = 2.0**0.125
_MOST_EXCESS = 2.0**1000


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
    is_close = (found.states == State.CLOSE) | (found.states == State.REORDERED)
    excess = np.where(is_close, np.clip(excess, 2.0**-40, 1.0), excess)
    excess = np.where(found.states == State.DIFFERENT, np.maximum(excess, _ABOVE), excess)
    excess = np.where(found.states == State.SAME, 0.0, excess)
    return np.where(found.states == State.UNREADABLE, np.nan, excess)


def _values(records: np.ndarray) -> dict[str, np.ndarray]:
    values = values_of(records)
    readable = records["version"] > 0
    for name, column in values.items():
        if name != "bad":
            values[name] = np.where(readable & ~(column < 0) | (name == "mean"), column, np.nan)
    return values
