"""The state of a log that grows, for ``fastcheck top``: its ranks, and how fast it goes on."""

from __future__ import annotations

import fnmatch
import os
import socket
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Callable, NamedTuple, Optional

import numpy as np

from fastcheck.errors import printable
from fastcheck.log.follow import Growth
from fastcheck.log.step_table import StepRow, StepStream
from fastcheck.log.view import RankLog, merge_ranks
from fastcheck.record.event import Event
from fastcheck.record.format import RECORD_DTYPE, overflowed
from fastcheck.record.site import Site
from fastcheck.report.render import headline
from fastcheck.report.stop_report import StopReport
from fastcheck.utils.names.style import row_name

from .trends import STEPS, SiteTrends

_MOST_LINES, _MOST_WATCH, _MOST_RECORDS = 4096, 256, 4096

Key = tuple[int, int, int]


class LiveEvent(NamedTuple):
    """One line of the picture. ``kind``: ``counted``, ``other``, ``warning`` or ``watch``."""

    step: int
    rank: int
    kind: str
    text: str


class RankEvents:
    """Holds the first counted event, and the youngest of all."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lines: dict[Key, dict[str, Any]] = {}
        self._first: Optional[Key] = None
        self._records: deque[np.ndarray] = deque()
        self._watch: deque[LiveEvent] = deque(maxlen=_MOST_WATCH)
        #: Numbers of events: counted, others, warnings of the watch, and the others of the watch.
        self.counts: Counter[str] = Counter()

    def add(
        self, records: list[np.ndarray], lines: list[dict[str, Any]], watch: list[dict[str, Any]]
    ) -> None:
        """Adds the new records and events of the rank, and the new events of the watch."""
        for some in records:
            bad = some[overflowed(some)]
            if len(bad):
                self._records.append(bad)
        while len(self._records) > 1 and sum(map(len, self._records)) > _MOST_RECORDS:
            self._records.popleft()
        for line in lines:
            self._add_line(line)
        for line in watch:
            step, text = line.get("step"), line.get("text")
            if isinstance(step, int) and isinstance(text, str):
                kind = "warning" if line.get("is_warning") else "watch"
                self.counts[kind] += 1
                self._watch.append(LiveEvent(step, self._rank, kind, text))

    def first(self, sites: dict[int, Site], world_size: int) -> Optional[LiveEvent]:
        """The first counted event, as the first line of a stop report; None without a counted
        event.
        """
        return None if self._first is None else self._shown([self._first], sites, world_size)[0]

    def latest(self, sites: dict[int, Site], world_size: int, most: int) -> list[LiveEvent]:
        """The youngest events, oldest first; the watch's at the end of their step."""
        keys = [key for key in self._lines if key != self._first][-most:] if most else []
        events = [*self._shown(keys, sites, world_size), *list(self._watch)[-most:]]
        return sorted(events, key=lambda event: event.step)[-most:]

    def _add_line(self, line: dict[str, Any]) -> None:
        key = (line.get("step"), line.get("seq"), line.get("site"))
        if not all(type(number) is int for number in key):
            return
        place: Key = key  # type: ignore[assignment]  # checked one line above
        before = self._lines.pop(place, None)
        if before is not None:  # its verdict has changed
            self.counts[_kind(before)] -= 1
        self._lines[place] = line
        self.counts[_kind(line)] += 1
        is_counted = _kind(line) == "counted"
        if self._first == place and not is_counted:
            counted = [
                candidate for candidate, other in self._lines.items() if _kind(other) == "counted"
            ]
            self._first = min(counted, default=None)
        elif is_counted and (self._first is None or place < self._first):
            self._first = place
        if len(self._lines) > _MOST_LINES:
            del self._lines[next(other for other in self._lines if other != self._first)]

    def _shown(self, keys: list[Key], sites: dict[int, Site], world_size: int) -> list[LiveEvent]:
        if not keys:
            return []
        held = [some[np.isin(some["seq"], [seq for _, seq, _ in keys])] for some in self._records]
        records = np.concatenate([np.zeros(0, RECORD_DTYPE), *held])
        lines = [self._lines[key] for key in keys]
        view = merge_ranks("", [RankLog(self._rank, records, dict(sites), lines, {}, 0)])
        return [
            LiveEvent(
                event.step,
                self._rank,
                "counted" if event.counted else "other",
                _text(event, world_size),
            )
            for event in view.events
        ]


def _text(event: Event, world_size: int) -> str:
    text = headline(StopReport(event, event.step, rank=event.rank, world_size=world_size))
    # The event's record was read before, or is gone: only the verdict is known.
    return text.replace("no NaN or Inf", "NaN or Inf", 1) if not event.record["numel"] else text


def _kind(line: dict[str, Any]) -> str:
    return "counted" if line.get("counted") else "other"


#: The columns by which the sites can be sorted.
SORTS = ("headroom", "abs max", "name")
# Shown above the sites.
_NUMBERS = ("loss_scale", "learning_rate", "found_inf", "skipped_update")
# Seconds over which a pace is measured, and without a record after which a run may be over.
_PACE_SECONDS, _QUIET_SECONDS = 30.0, 10.0


class SiteRow(NamedTuple):
    """One site of one rank, with its place in the rank's trends."""

    rank: int
    site: int
    name: str
    headroom: float


class Pace(NamedTuple):
    """The speed over the last polls; None where nothing is known yet."""

    steps_per_second: Optional[float]
    bytes_per_second: Optional[float]


@dataclass
class RankState:
    rank: int
    trends: SiteTrends = field(default_factory=SiteTrends)
    sites: dict[int, Site] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    total_bytes: int = 0
    changed: float = 0.0
    missed_bytes: int = 0
    damaged: int = 0
    #: Since the log is followed: records, the first step, and tensors by number.
    records: int = 0
    first_step: int = -1

    def __post_init__(self) -> None:
        self.steps = StepStream({}, {}, self.rank, STEPS)
        self.events = RankEvents(self.rank)
        self._names: dict[int, str] = {}
        self._numbers: list[int] = []
        self._matching: tuple[Any, np.ndarray] = (None, np.zeros(0, bool))

    def take(self, growth: Growth) -> None:
        """Adds the new data."""
        self.sites.update(growth.sites)
        self.steps.name(growth.sites)
        for number, site in growth.sites.items():
            self._names[number] = printable(row_name(site, None, "fastcheck"))
            if site.role in _NUMBERS:
                self._numbers.append(number)
        for records in growth.records:
            if self.first_step < 0 and len(records):
                self.first_step = int(records["step"][0])
            self.records += len(records)
            self.trends.add(records)
            self.steps.add(records)
        self.events.add(growth.records, growth.events, growth.watch)
        if growth.meta is not None:
            self.meta = growth.meta
        self.total_bytes, self.changed = growth.total_bytes, growth.changed
        self.missed_bytes += growth.missed_bytes
        self.damaged += growth.damaged

    @property
    def last(self) -> Optional[StepRow]:
        """The numbers of the last step that has some."""
        rows = self.steps.rows()
        return rows[-1] if rows else None

    def shown_sites(self, pattern: str = "") -> np.ndarray:
        """The numbers of the sites that have records, are tensors, and match ``pattern``."""
        seen = np.flatnonzero(self.trends.seen)
        kept = seen[~np.isin(seen, self._numbers)] if self._numbers else seen
        if not pattern:
            return kept
        count = len(self.trends.seen)
        key, mask = self._matching
        if key != (pattern, count, len(self._names)):
            matches = _matcher(pattern)
            mask = np.array([matches(self.name_of(number)) for number in range(count)], bool)
            self._matching = ((pattern, count, len(self._names)), mask)
        return kept[mask[kept]]

    def name_of(self, site: int) -> str:
        """Printable."""
        return self._names.get(site, f"site {site} (name lost)")


class LiveState:
    """All ranks of a log that is followed."""

    def __init__(self) -> None:
        self.ranks: dict[int, RankState] = {}
        self._paces: deque[tuple[float, int, int]] = deque()

    def take(self, grown: Iterable[Growth], now: float) -> None:
        """Takes in what a poll has brought; ``now``: of a clock that never goes back, in
        seconds.
        """
        for growth in grown:
            self.ranks.setdefault(growth.rank, RankState(growth.rank)).take(growth)
        if self.ranks:
            self._paces.append((now, self.step, self.total_bytes))
        while len(self._paces) > 2 and now - self._paces[1][0] >= _PACE_SECONDS:
            self._paces.popleft()

    @property
    def step(self) -> int:
        """The youngest step of all ranks; -1 without records."""
        return max((rank.trends.step for rank in self.ranks.values()), default=-1)

    @property
    def total_bytes(self) -> int:
        """The size of all records that the log holds."""
        return sum(rank.total_bytes for rank in self.ranks.values())

    def pace(self) -> Pace:
        """The speed at which the log grows."""
        if len(self._paces) < 2:
            return Pace(None, None)
        (start, first, small), (end, last, large) = self._paces[0], self._paces[-1]
        seconds = end - start
        if seconds <= 0:
            return Pace(None, None)
        # Old segments of a log with a limit are removed: the size says little then.
        size = (large - small) / seconds if large >= small else None
        return Pace((last - first) / seconds, size)

    def status(self, wall: float) -> tuple[str, bool]:
        """The state of the run in words, and True if it goes on. ``wall``: seconds since the
        epoch.
        """
        ranks = list(self.ranks.values())
        ended = [str(rank.meta["ended"]) for rank in ranks if rank.meta.get("ended")]
        if ranks and len(ended) == len(ranks):
            return f"ended {max(ended)}", False
        changed = max((rank.changed for rank in ranks), default=0.0)
        quiet = wall - changed
        gone = [rank for rank in ranks if not rank.meta.get("ended") and is_gone(rank.meta)]
        if gone and quiet > _QUIET_SECONDS:
            which = ", ".join(str(rank.rank) for rank in gone)
            of = f" of rank {which}" if len(ranks) > 1 else ""
            return f"the process{of} is gone", False
        if not changed:
            return "no record yet", True
        if quiet > _QUIET_SECONDS:
            return f"no record for {format_duration(quiet)}", True
        return "running", True

    def rows(self, sort: str, pattern: str, start: int, count: int) -> tuple[list[SiteRow], int]:
        """The sites whose name matches ``pattern`` (part of it, or a pattern as in a shell), in the
        order of SORTS: the least headroom first, the largest abs max first, or by name. What
        overflowed is first in the first two. Those from ``start`` on, and how many there are.
        """
        ranks = list(self.ranks.values())
        if not ranks:
            return [], 0
        sites = [rank.shown_sites(pattern) for rank in ranks]
        bits = np.concatenate([o.trends.headroom()[mine] for o, mine in zip(ranks, sites)])
        places = [(rank, site) for rank, mine in zip(ranks, sites) for site in mine.tolist()]
        if sort == "name":
            order = sorted(range(len(places)), key=lambda at: places[at][0].name_of(places[at][1]))
        else:
            levels = np.concatenate([o.trends.level[mine] for o, mine in zip(ranks, sites)])
            values = -levels if sort == "abs max" else bits
            values = np.where(np.isnan(values), np.inf, values)
            keys = np.where(bits == -np.inf, -np.inf, values)
            order = np.argsort(keys, kind="stable").tolist()
        rows = []
        for at in order[max(start, 0) : max(start, 0) + count]:
            rank, site = places[at]
            rows.append(SiteRow(rank.rank, site, rank.name_of(site), float(bits[at])))
        return rows, len(places)

    def least_headroom(self, rank: int) -> float:
        """The least headroom of the rank's sites, each in its last step; NaN where no site has
        headroom.
        """
        state = self.ranks[rank]
        bits = state.trends.headroom()[state.shown_sites()]
        bits = bits[~np.isnan(bits)]
        return float(bits.min()) if len(bits) else float("nan")

    def event_counts(self) -> Counter[str]:
        """The number of events, by kind."""
        return sum((rank.events.counts for rank in self.ranks.values()), Counter())

    def events(self, most: int) -> list[LiveEvent]:
        """The first counted event of all ranks, and the youngest others."""
        ranks = self.ranks.values()
        firsts = [e for rank in ranks if (e := rank.events.first(rank.sites, len(self.ranks)))]
        first = min(firsts, key=lambda event: (event.step, event.rank), default=None)
        left = most - (first is not None)
        latest = [
            event
            for rank in ranks
            for event in rank.events.latest(rank.sites, len(self.ranks), left)
        ]
        latest.sort(key=lambda event: event.step)
        return [*([first] if first is not None else []), *(latest[-left:] if left > 0 else [])]


def _matcher(pattern: str) -> Callable[[str], bool]:
    wanted = pattern.lower()
    if any(wildcard in pattern for wildcard in "*?["):
        wanted = wanted if wanted.endswith("*") else wanted + "*"
        return lambda name: fnmatch.fnmatchcase(name.lower(), wanted)
    return lambda name: wanted in name.lower()


def is_gone(meta: Mapping[str, Any]) -> bool:
    """True if the process that writes the log ran on this machine, and runs no more."""
    pid = meta.get("pid")
    if os.name != "posix" or meta.get("host") != socket.gethostname():
        return False
    if type(pid) is not int or not 0 < pid < 1 << 31:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False  # another user's
    return False


def format_duration(seconds: float) -> str:
    """``45 s``, ``12 min``, ``3 h``, ``5 days``."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.0f} s"
