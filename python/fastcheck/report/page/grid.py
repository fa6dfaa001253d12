"""The data of the heat map and the curves: extremes of each site in each bucket of steps.

A bucket keeps the smallest and the largest value of its steps, so no spike is lost. Where all steps
fit, a bucket is one step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fastcheck.record.format import COUNTS, DeviceMode, Flag
from fastcheck.record.statistics import component_counts, statistics_columns

#: Bits of the plane ``bad``.
BAD_NAN, BAD_POSINF, BAD_NEGINF, BAD_SATURATED, BAD_EVENT = 1, 2, 4, 8, 16

# Cells of all sites together that are held one bucket a step, and at most.
_WHOLE_CELLS, _MOST_CELLS = 1_300_000, 6_000_000
_MOST_BUCKETS, _FEWEST_BUCKETS, _USUAL_BUCKETS = 4000, 32, 600
# The curves of rms, mean and zero share: coarser, at most so many buckets in all and for a site.
_COARSE_CELLS, _COARSE_BUCKETS = 100_000, 100
_FINE = ("abs_max",)
_COARSE = ("rms", "mean", "zero_share")


class Axis(NamedTuple):
    """Buckets of ``width`` steps from step ``base`` on."""

    base: int
    width: int
    buckets: int

    @classmethod
    def spanning(cls, first: int, last: int, sites: int) -> Axis:
        """The axis of the steps ``first`` to ``last``, for so many sites."""
        steps = last - first + 1
        most = max(_WHOLE_CELLS // max(sites, 1), _USUAL_BUCKETS)
        most = max(min(most, _MOST_CELLS // max(sites, 1), _MOST_BUCKETS), _FEWEST_BUCKETS)
        width = -(-steps // most)
        return cls(first, width, -(-steps // width))

    def coarser(self, sites: int) -> Axis:
        """The axis of the coarse statistics: each bucket is several of this axis."""
        most = max(_COARSE_CELLS // max(sites, 1), _COARSE_BUCKETS)
        factor = -(-self.buckets // most)
        return Axis(self.base, self.width * factor, -(-self.buckets // factor))

    def starts(self) -> np.ndarray:
        """The first step of each bucket, int64."""
        return self.base + self.width * np.arange(self.buckets, dtype=np.int64)


class Grid:
    """Extremes of each row (a site of a rank) in each bucket, float64, NaN where there is nothing.

    ``high`` and ``low`` are by statistic: ``abs_max`` on ``axis``, the others on ``coarse``.
    ``bad``: what was not finite, uint8, on ``axis``.
    """

    def __init__(self, axis: Axis, sites: int) -> None:
        self.axis = axis
        self.coarse = axis.coarser(sites)
        rows = max(sites, 1)
        of_names = (*((n, axis) for n in _FINE), *((n, self.coarse) for n in _COARSE))
        self.high = {n: np.full((rows, own.buckets), np.nan) for n, own in of_names}
        self.low = {name: plane.copy() for name, plane in self.high.items()}
        self.bad = np.zeros((rows, axis.buckets), np.uint8)
        self.seen = np.zeros((rows, axis.buckets), bool)

    def add(self, rows: np.ndarray, steps: np.ndarray, values: dict[str, np.ndarray]) -> None:
        """``rows``, ``steps``: of each record; ``values``: what values_of() has made of them. Steps
        must lie on the axis.
        """
        if not len(rows):
            return
        self._grow(int(rows.max()) + 1)
        columns = (steps - self.axis.base) // self.axis.width
        keys = rows * self.axis.buckets + columns
        order = slice(None) if (np.diff(keys) > 0).all() else np.argsort(keys, kind="stable")
        keys = keys[order]
        starts = _starts(keys)
        cells = keys[starts]
        self.seen.reshape(-1)[cells] = True
        bad = self.bad.reshape(-1)
        bad[cells] |= np.bitwise_or.reduceat(values["bad"][order], starts)
        self._merge("abs_max", values["abs_max"][order], starts, cells)
        factor = self.coarse.width // self.axis.width
        keys = rows[order] * self.coarse.buckets + columns[order] // factor
        starts = _starts(keys)
        for name in _COARSE:
            self._merge(name, values[name][order], starts, keys[starts])

    def _merge(self, name: str, values: np.ndarray, starts: np.ndarray, cells: np.ndarray) -> None:
        for planes, smaller in ((self.high, np.fmax), (self.low, np.fmin)):
            plane = planes[name].reshape(-1)
            plane[cells] = smaller(plane[cells], smaller.reduceat(values, starts))

    def _grow(self, rows: int) -> None:
        """Rows that no list of sites has announced: their names are lost."""
        more = rows - len(self.bad)
        if more <= 0:
            return
        for planes in (self.high, self.low):
            for name, plane in planes.items():
                planes[name] = np.pad(plane, ((0, more), (0, 0)), constant_values=np.nan)
        self.bad = np.pad(self.bad, ((0, more), (0, 0)))
        self.seen = np.pad(self.seen, ((0, more), (0, 0)))


def _starts(keys: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.diff(keys, prepend=keys[:1] - 1))


def values_of(records: np.ndarray) -> dict[str, np.ndarray]:
    """abs_max, rms, mean and zero_share of each record, float64, NaN where there is none; ``bad``
    as uint8.
    """
    columns = statistics_columns(records)
    counts = {name: records[name] for name in COUNTS}
    components = component_counts(records)
    bad = (counts["nan_count"] != 0) * np.uint8(BAD_NAN)
    bad |= (counts["posinf_count"] != 0) * np.uint8(BAD_POSINF)
    bad |= (counts["neginf_count"] != 0) * np.uint8(BAD_NEGINF)
    saturating = records["device_mode"] == int(DeviceMode.SATURATING)
    bad |= (saturating & (counts["saturated_count"] != 0)) * np.uint8(BAD_SATURATED)
    bad |= ((records["flags"] & int(Flag.EVENT)) != 0) * np.uint8(BAD_EVENT)
    with np.errstate(all="ignore"):
        share = np.where(components > 0, counts["zero_count"] / components, np.nan)
    mean = np.where(np.isfinite(columns["mean"]), columns["mean"], np.nan)
    rms = np.where(np.isfinite(columns["rms"]), columns["rms"], np.nan)
    return {
        "abs_max": columns["abs_max"],
        "rms": rms,
        "mean": mean,
        "zero_share": share,
        "bad": bad,
    }


class PageRows:
    """One row for each name of each rank, in the order in which they are met. Names are numbers.

    ``rows[column]`` is a view. ``empty``: what a new row holds in each column, beside its ``rank``
    and its ``site``, which is its name.
    """

    def __init__(self, empty: Mapping[str, np.generic]) -> None:
        self._empty = {"rank": np.int64(0), "site": np.int64(0), **empty}
        self._columns = {name: np.zeros(0, value.dtype) for name, value in self._empty.items()}
        self._row_of: dict[int, np.ndarray] = {}
        self.count = 0

    def __getitem__(self, name: str) -> np.ndarray:
        return self._columns[name][: self.count]

    def columns(self) -> dict[str, np.ndarray]:
        """The columns by name, of length ``count``."""
        return {name: self[name] for name in self._columns}

    def number(self, rank: int, names: np.ndarray) -> np.ndarray:
        """The row of each of these names of ``rank``."""
        known = self._row_of.get(rank, np.zeros(0, np.int64))
        size = int(names.max(initial=-1)) + 1
        if size > len(known):
            known = np.concatenate([known, np.full(2 * size - len(known), -1)])
            self._row_of[rank] = known
        is_new = known[names] < 0
        if is_new.any():
            new, first = np.unique(names[is_new], return_index=True)
            new = new[np.argsort(first)]
            known[new] = self.count + np.arange(len(new))
            self._add(len(new))
            self["rank"][known[new]] = rank
            self["site"][known[new]] = new
        return known[names]

    def raise_to(self, name: str, rows: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Sets a column to the largest value of each row; returns the positions of the values that
        raised it: of several for a row the last position stays, which is the first of the largest.
        """
        # Few, once some steps are over.
        higher = np.flatnonzero(values > self[name][rows])[::-1]
        higher = higher[np.argsort(values[higher], kind="stable")]
        self[name][rows[higher]] = values[higher]
        return higher

    def _add(self, rows: int) -> None:
        self.count += rows
        room = len(self._columns["rank"])
        if self.count > room:
            more = max(self.count, 2 * room) - room
            for name, column in self._columns.items():
                added = np.full(more, self._empty[name], column.dtype)
                self._columns[name] = np.concatenate([column, added])
