"""Reads a log piece by piece into what a page shows of it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fastcheck.errors import LogError
from fastcheck.log.reader import find_logs, log_parts, read_event_lines, read_sites_and_meta
from fastcheck.log.record_file import count_records, read_pieces, read_span
from fastcheck.log.step_table import StepRow, StepStream
from fastcheck.log.view import lost_site
from fastcheck.record.format import NONFINITE_COUNTS, RECORD_DTYPE, RECORD_VERSION, Depth, nonfinite
from fastcheck.record.site import Site

from .evidence import Evidence
from .grid import Axis, Grid, values_of

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
        # The last of several assignments to one place stays.
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


# Cells with non-finite values whose counts the page has.
_MOST_BAD = 20_000
# Steps of either sign are below it: beyond, a page's numbers, which are float64, are not exact.
_MOST_STEPS = 1 << 53


@dataclass
class Collected:
    """A log as arrays. ``sites``: those of all ranks, which the rows' ``site`` indexes; ``meta``,
    ``sites_of``: by rank; ``bad``: row, step and counts of the first non-finite records, int64;
    ``numbers_of``: by rank, the page's numbers of the rank's sites.
    """

    directory: str
    meta: dict[int, dict[str, Any]]
    sites_of: dict[int, dict[int, Site]]
    sites: list[Site]
    rows: SiteRows
    grid: Grid
    steps: list[StepRow]
    evidence: Evidence
    bad: np.ndarray
    numbers_of: dict[int, np.ndarray]
    records: int = 0
    damaged: int = 0
    dropped_bytes: int = 0

    @cached_property
    def row_of(self) -> dict[tuple[int, Site], int]:
        """The row of each rank and site that has records."""
        rows = self.rows.columns()
        places = zip(rows["rank"].tolist(), rows["site"].tolist())
        return {(rank, self.sites[site]): row for row, (rank, site) in enumerate(places)}


def newest_log(path: str) -> str:
    """The newest log directory at ``path`` or right below it.

    Raises:
        LogError: there is none.
    """
    found = find_logs(path)
    if found:
        return found[-1]
    raise LogError(
        "there is no log here",
        expected="a log directory, or the fastcheck_log/ above it",
        got=path + ("" if os.path.exists(path) else ", which does not exist"),
        hint="give the directory that the stop message ends with; `fastcheck show` reads dumps",
    )


def collect(directory: str) -> Collected:
    """Reads the log in ``directory``. Takes the memory of what the page shows, not of the log.

    Raises:
        LogError: a file of the log can't be read, or a newer fastcheck has written it.
    """
    segments = log_parts(directory)
    first, last = _span(directory, segments)
    while True:
        reading = _Reading(directory, segments, first, last)
        reading.read()
        if not reading.outside:
            return reading.collected
        # A record lies outside of what the ends of the segments had shown.
        first, last = min(first, *reading.outside), max(last, *reading.outside)


def _span(directory: str, segments: Mapping[int, list[str]]) -> tuple[int, int]:
    """The least and the largest step at the ends of the segments."""
    steps: list[int] = []
    for path in (path for paths in segments.values() for path in paths):
        try:
            count = count_records(path)
            ends = [read_span(path, 0, 1), read_span(path, max(count - 1, 0), count)]
        except OSError as error:
            raise LogError(f"{path} can't be read: {error.strerror}") from error
        found = np.concatenate(ends)
        found = found[(found["version"] == RECORD_VERSION) & _has_place(found)]
        steps += found["step"].tolist()
    return (min(steps), max(steps)) if steps else (0, 0)


def _has_place(records: np.ndarray) -> np.ndarray:
    """A boolean array of the records of a step that a run can have reached."""
    found: np.ndarray = (records["step"] > -_MOST_STEPS) & (records["step"] < _MOST_STEPS)
    return found


class _Reading:
    """One pass over the log."""

    def __init__(
        self, directory: str, segments: Mapping[int, list[str]], first: int, last: int
    ) -> None:
        both = {rank: read_sites_and_meta(directory, rank) for rank in segments}
        self._sites_of = {rank: sites for rank, (sites, _) in both.items()}
        meta = {rank: found for rank, (_, found) in both.items()}
        lines = {rank: read_event_lines(directory, rank) for rank in segments}
        rows = sum(map(len, self._sites_of.values()))
        self._segments = segments
        self._first, self._last = first, last
        self.outside: list[int] = []
        self._bad: list[np.ndarray] = []
        self._numbers: dict[Site, int] = {}
        self._sites: list[Site] = []
        self.collected = Collected(
            directory,
            meta,
            self._sites_of,
            self._sites,
            SiteRows(),
            Grid(Axis.spanning(first, last, rows), rows),
            [],
            Evidence({rank: found for rank, (found, _) in lines.items()}),
            np.zeros((0, 5), np.int64),
            {rank: self._number_sites(sites) for rank, sites in self._sites_of.items()},
            dropped_bytes=sum(lost for _, lost in lines.values()),
        )

    def read(self) -> None:
        """Fills ``collected``; stops early where ``outside`` has the steps of a piece."""
        found = self.collected
        for rank, paths in self._segments.items():
            sites = self._sites_of[rank]
            stream = StepStream(sites, found.meta[rank], rank)
            number_of = found.numbers_of[rank]
            for records in self._pieces(rank, paths):
                if len(records) and not self._take(rank, records, number_of):
                    return
                stream.add(records)
            found.steps += stream.rows()
        if self._bad:
            bad = np.concatenate(self._bad)
            found.bad = bad[np.argsort(bad[:, 1], kind="stable")][:_MOST_BAD]

    def _take(self, rank: int, records: np.ndarray, number_of: np.ndarray) -> bool:
        found = self.collected
        steps = records["step"]
        low, high = int(steps.min()), int(steps.max())
        if low < self._first or high > self._last:
            self.outside = [low, high]
            return False
        self._name_lost(records["site"], number_of)
        rows = found.rows.number(rank, records["site"], number_of)
        values = values_of(records)
        found.grid.add(rows, steps, values)
        found.rows.add(rows, records, values)
        found.evidence.add(rank, records)
        found.records += len(records)
        at = np.flatnonzero(nonfinite(records))
        if len(at) and sum(map(len, self._bad)) < 2 * _MOST_BAD:
            counts = [records[name][at] for name in NONFINITE_COUNTS]
            self._bad.append(np.stack([rows[at], steps[at], *counts], axis=1))
        return True

    def _pieces(self, rank: int, paths: list[str]) -> Iterator[np.ndarray]:
        """The records that were kept of evicted segments, then those of the segments."""
        path = os.path.join(self.collected.directory, f"events-rank{rank}.bin")
        if os.path.exists(path):
            for kept in self._of_file(path):
                # A crash may have left them in their segment too.
                for piece in read_pieces(paths[0]) if paths else ():
                    kept = kept[~np.isin(kept["seq"], piece.records["seq"])]
                yield kept
        for path in paths:
            yield from self._of_file(path)

    def _of_file(self, path: str) -> Iterator[np.ndarray]:
        for piece in read_pieces(path):
            has_place = _has_place(piece.records)
            self.collected.damaged += piece.damaged + int((~has_place).sum())
            self.collected.dropped_bytes += piece.unwritten * RECORD_DTYPE.itemsize
            yield piece.records if has_place.all() else piece.records[has_place]
        self.collected.dropped_bytes += os.path.getsize(path) % RECORD_DTYPE.itemsize

    def _number_sites(self, sites: dict[int, Site]) -> np.ndarray:
        """The page's numbers of one rank's sites, -1 where a name is lost."""
        number_of = np.full(1 << 16, -1, np.int64)
        for index in sorted(sites):
            number_of[index] = self._number(sites[index])
        return number_of

    def _number(self, site: Site) -> int:
        number = self._numbers.setdefault(site, len(self._numbers))
        if number == len(self._sites):
            self._sites.append(site)
        return number

    def _name_lost(self, sites: np.ndarray, number_of: np.ndarray) -> None:
        lost = np.unique(sites[number_of[sites] < 0])
        for index in lost.tolist():
            number_of[index] = self._number(lost_site(index))
