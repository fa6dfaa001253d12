"""Reads a log piece by piece into what a page shows of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Optional

import numpy as np

from fastcheck.log.history import joined
from fastcheck.log.reader import log_parts, read_event_lines, read_sites_and_meta
from fastcheck.log.record_file import count_records, read_rank, read_span
from fastcheck.log.step_table import StepRow, StepStream
from fastcheck.log.view import LogView, RankLog, lost_site, merge_ranks
from fastcheck.record.format import NONFINITE_COUNTS, RECORD_VERSION, Depth, nonfinite, overflowed
from fastcheck.record.site import Site
from fastcheck.utils.reading import reading

from .grid import Axis, Grid, PageRows, values_of

# The values of a row without records.
_EMPTY: dict[str, np.generic] = {
    **dict.fromkeys(("records", "dtype", "numel", "last_step", "peak_step"), np.int64(0)),
    **dict.fromkeys(("bad_records", "compared", "changed"), np.int64(0)),
    **dict.fromkeys(("last_abs_max", "zero_share"), np.float64(np.nan)),
    "peak": np.float64(-1),
    "first_bad_step": np.int64(-1),
}


class SiteRows(PageRows):
    """A row for each site of a rank.

    ``peak``: the largest abs max, at ``peak_step``; -1 without a record. ``last_abs_max`` and
    ``zero_share``: of the last record. ``bad_records``: those with a NaN or an infinity.
    ``compared``: how often a checksum had a predecessor, ``changed``: how often it differed.
    """

    def __init__(self) -> None:
        super().__init__(_EMPTY)
        # The last checksum of each row that has a checksum.
        self._sums = np.zeros(0, np.uint64)
        self._has_sum = np.zeros(0, bool)

    def add(self, rows: np.ndarray, records: np.ndarray, values: dict[str, np.ndarray]) -> None:
        """``values``: what values_of() has made of the records, which are in order."""
        if not len(rows):
            return
        self["records"][:] += np.bincount(rows, minlength=self.count)
        # The last of several assignments to one place stays.
        for name in ("dtype", "numel"):
            self[name][rows] = records[name]
        self["last_step"][rows] = records["step"]
        self["last_abs_max"][rows] = values["abs_max"]
        self["zero_share"][rows] = values["zero_share"]
        higher = self.raise_to("peak", rows, values["abs_max"])
        self["peak_step"][rows[higher]] = records["step"][higher]
        bad = np.flatnonzero(nonfinite(records))
        if len(bad):
            self["bad_records"][:] += np.bincount(rows[bad], minlength=self.count)
            first_rows, at = np.unique(rows[bad], return_index=True)
            first_bad_step = self["first_bad_step"]
            is_new = first_bad_step[first_rows] < 0
            first_bad_step[first_rows[is_new]] = records["step"][bad[at[is_new]]]
        self._compare(rows, records)

    def _compare(self, rows: np.ndarray, records: np.ndarray) -> None:
        full = np.flatnonzero(records["depth"] >= int(Depth.FULL))
        if not len(full):
            return
        new = self.count - len(self._sums)
        self._sums, self._has_sum = np.pad(self._sums, (0, new)), np.pad(self._has_sum, (0, new))
        order = full[np.argsort(rows[full], kind="stable")]
        at, sums = rows[order], records["checksum"][order]
        is_first = np.diff(at, prepend=-1) != 0
        before = np.concatenate([sums[:1], sums[:-1]])
        before[is_first] = self._sums[at[is_first]]
        has_before = ~is_first | self._has_sum[at]
        changed = has_before & (before != sums)
        self["compared"][:] += np.bincount(at[has_before], None, self.count)
        self["changed"][:] += np.bincount(at[changed], None, self.count)
        self._sums[at], self._has_sum[at] = sums, True


# Cells with non-finite values whose counts the page has.
_MOST_BAD = 20_000
# Steps of either sign are below it: beyond, a page's numbers, which are float64, are not exact.
_MOST_STEPS = 1 << 53


@dataclass
class Collected:
    """A log as arrays. ``name``: what the page calls it; ``sites``: those of all ranks, which the
    rows' ``site`` indexes; ``meta``, ``sites_of``: by rank; ``bad``: row, step and counts of the
    first non-finite records, int64; ``numbers_of``: by rank, the page's numbers of the rank's
    sites.
    """

    directory: str
    name: str
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

    def rows_at(self, rank: int, numbers: Iterable[int]) -> list[int]:
        """The rows of a rank's sites by its own numbers; -1 for a site without records."""
        known = self.sites_of[rank]
        sites = (known.get(number) or lost_site(number) for number in numbers)
        return [self.row_of.get((rank, site), -1) for site in sites]


def collect(directory: str) -> Collected:
    """Reads the log in ``directory``. Takes the memory of what the page shows, not of the log.

    Raises:
        LogError: a file of the log can't be read, or a newer fastcheck has written it.
    """
    segments = log_parts(directory)
    first, last = _span(segments)
    while True:
        attempt = _Reading(directory, segments, first, last)
        attempt.read()
        if not attempt.outside:
            return attempt.collected
        # A record lies outside of what the ends of the segments had shown.
        first, last = min(first, *attempt.outside), max(last, *attempt.outside)


def _span(segments: Mapping[int, list[str]]) -> tuple[int, int]:
    """The least and the largest step at the ends of the segments."""
    steps: list[int] = []
    for path in (path for paths in segments.values() for path in paths):
        with reading(path):
            count = count_records(path)
            ends = [read_span(path, 0, 1), read_span(path, max(count - 1, 0), count)]
        records = np.concatenate(ends)
        records = records[(records["version"] == RECORD_VERSION) & _has_place(records)]
        steps += records["step"].tolist()
    return (min(steps), max(steps)) if steps else (0, 0)


def _has_place(records: np.ndarray) -> np.ndarray:
    """A boolean array of the records of a step that a run can have reached."""
    return (records["step"] > -_MOST_STEPS) & (records["step"] < _MOST_STEPS)


class _Reading:
    """One pass over the log."""

    def __init__(
        self, directory: str, segments: Mapping[int, list[str]], first: int, last: int
    ) -> None:
        both = {rank: read_sites_and_meta(directory, rank) for rank in segments}
        self._sites_of = {rank: sites for rank, (sites, _) in both.items()}
        meta = {rank: rank_meta for rank, (_, rank_meta) in both.items()}
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
            directory,
            meta,
            self._sites_of,
            self._sites,
            SiteRows(),
            Grid(Axis.spanning(first, last, rows), rows),
            [],
            Evidence({rank: events for rank, (events, _) in lines.items()}),
            np.zeros((0, 5), np.int64),
            {rank: self._number_sites(sites) for rank, sites in self._sites_of.items()},
            dropped_bytes=sum(lost for _, lost in lines.values()),
        )

    def read(self) -> None:
        """Fills ``collected``; stops early where ``outside`` has the steps of a piece."""
        contents = self.collected
        for rank, paths in self._segments.items():
            sites = self._sites_of[rank]
            stream = StepStream(sites, contents.meta[rank], rank)
            number_of = contents.numbers_of[rank]
            for piece in read_rank(contents.directory, rank, paths):
                has_place = _has_place(piece.records)
                contents.damaged += piece.damaged + int((~has_place).sum())
                contents.dropped_bytes += piece.dropped_bytes
                records = piece.records if has_place.all() else piece.records[has_place]
                if len(records) and not self._take(rank, records, number_of):
                    return
                stream.add(records)
            contents.steps += stream.rows()
        if self._bad:
            bad = np.concatenate(self._bad)
            contents.bad = bad[np.argsort(bad[:, 1], kind="stable")][:_MOST_BAD]

    def _take(self, rank: int, records: np.ndarray, number_of: np.ndarray) -> bool:
        contents = self.collected
        steps = records["step"]
        low, high = int(steps.min()), int(steps.max())
        if low < self._first or high > self._last:
            self.outside = [low, high]
            return False
        sites = records["site"]
        is_lost = number_of[sites] < 0
        for index in np.unique(sites[is_lost]).tolist():
            number_of[index] = self._number(lost_site(index))
        rows = contents.rows.number(rank, number_of[sites])
        values = values_of(records)
        contents.grid.add(rows, steps, values)
        contents.rows.add(rows, records, values)
        contents.evidence.add(rank, records)
        contents.records += len(records)
        at = np.flatnonzero(nonfinite(records))
        if len(at) and sum(map(len, self._bad)) < 2 * _MOST_BAD:
            counts = [records[name][at] for name in NONFINITE_COUNTS]
            self._bad.append(np.stack([rows[at], steps[at], *counts], axis=1))
        return True

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


EventLines = list[dict[str, Any]]

# Records before the event, and around it; events of a rank whose records are looked for.
_MOST_BEFORE, _MOST_AROUND, _MOST_EVENTS = 1 << 15, 1 << 18, 4096
#: Steps before and after the first event that the page shows in full.
STEPS_BEFORE, STEPS_AFTER = 24, 8


class FirstEvent(NamedTuple):
    """The first event of a log by its line, with the rank and the site's number there."""

    rank: int
    step: int
    site: int


class Evidence:
    """The parts of a log's pieces that the page needs, collected as the pieces are read."""

    def __init__(self, lines: Mapping[int, EventLines]) -> None:
        self._lines = {rank: _important(events) for rank, events in lines.items()}
        self.first = _first(self._lines)
        #: True if any event is counted; the first is a counted event then.
        self.is_counted = any(
            bool(line.get("counted")) for events in self._lines.values() for line in events
        )
        self._seqs = {
            rank: np.array(sorted({line["seq"] for line in events}), np.int64)
            for rank, events in self._lines.items()
        }
        self._kept: dict[int, list[np.ndarray]] = {rank: [] for rank in lines}
        self._before: deque[np.ndarray] = deque()
        self._around: list[np.ndarray] = []

    def add(self, rank: int, records: np.ndarray) -> None:
        seqs = self._seqs.get(rank)
        if seqs is not None and len(seqs):
            self._keep(rank, records[np.isin(records["seq"], seqs)])
        first = self.first
        if first is None or first.rank != rank:
            return
        distance = records["step"] - first.step
        is_near = (distance >= -STEPS_BEFORE) & (distance <= STEPS_AFTER)
        if is_near.any() and sum(map(len, self._around)) < _MOST_AROUND:
            self._around.append(records[is_near])
        is_before = distance <= 0
        if not is_before.any():
            return
        self._before.append(records if is_before.all() else records[is_before])
        while sum(map(len, self._before)) - len(self._before[0]) > _MOST_BEFORE:
            old = self._before.popleft()
            self._keep(rank, old[old["site"] == first.site])

    def around(self) -> np.ndarray:
        """The records of the steps around the first event on its rank; ``site`` as written."""
        return joined(self._around)

    def view(
        self, directory: str, sites: Mapping[int, dict[int, Site]], meta: Mapping[int, Any]
    ) -> LogView:
        """The evidence as a log of its own: events with their records, and what came before the
        first event on its rank. ``sites``, ``meta``: by rank.
        """
        parts = []
        for rank, lines in sorted(self._lines.items()):
            held = list(self._kept[rank])
            if self.first is not None and self.first.rank == rank:
                held += self._before
            parts.append(RankLog(rank, _in_order(joined(held)), sites[rank], lines, meta[rank], 0))
        return merge_ranks(directory, parts)

    def spread(self) -> np.ndarray:
        """The records of the first event's step on its rank that overflowed, in device order."""
        records = joined(self._before)
        if self.first is not None:
            records = records[records["step"] == self.first.step]
        return _in_order(records[overflowed(records)])

    def _keep(self, rank: int, records: np.ndarray) -> None:
        if len(records):
            self._kept[rank].append(records)


def _important(lines: EventLines) -> EventLines:
    """The events with a place, counted events first where there are too many."""
    whole = [
        line
        for line in lines
        if all(type(line.get(name)) is int for name in ("step", "seq", "site"))
        and all(abs(line[name]) < 1 << 63 for name in ("step", "seq", "site"))
    ]
    if len(whole) > _MOST_EVENTS:
        whole = sorted(whole, key=lambda line: not line.get("counted"))[:_MOST_EVENTS]
    return whole


def _first(lines: Mapping[int, EventLines]) -> Optional[FirstEvent]:
    events = [
        (not line.get("counted"), line["step"], line["seq"], rank, line["site"])
        for rank, some in lines.items()
        for line in some
    ]
    if not events:
        return None
    _, step, _, rank, site = min(events)
    return FirstEvent(rank, step, site)


def _in_order(records: np.ndarray) -> np.ndarray:
    """The records in the order of step and sequence number, each once."""
    ordered = records[np.lexsort((records["seq"], records["step"]))]
    if len(ordered) < 2:
        return ordered
    same = np.ones(len(ordered) - 1, bool)
    for name in ("step", "seq", "site"):
        same &= ordered[name][1:] == ordered[name][:-1]
    return ordered[np.concatenate([[True], ~same])]
