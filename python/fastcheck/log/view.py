"""A log in memory: the records, sites and events of all ranks, merged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastcheck.record.event import Event
from fastcheck.record.format import RECORD_DTYPE, Verdict
from fastcheck.record.site import MAX_SITES, Site

_INT64 = 1 << 63


@dataclass(frozen=True)
class LogView:
    """A log in memory. ``records["site"]`` indexes ``sites``; ``ranks[i]`` is the rank of
    ``records[i]``.

    One rank's records and events are in the order in which it wrote them; those of several are
    merged by step, then rank, then device order (``seq``). Ranks count their own steps: they are
    the same where the ranks train together. ``meta`` is by rank. ``dropped_bytes`` counts what was
    cut short by a crash and left out; ``damaged_records`` those that no fastcheck can have written.
    """

    directory: str
    records: np.ndarray
    ranks: np.ndarray
    sites: dict[int, Site]
    events: tuple[Event, ...]
    meta: dict[int, dict[str, Any]]
    dropped_bytes: int = 0
    damaged_records: int = 0


def first_event(events: Iterable[Event]) -> Event | None:
    """The first counted event (of any verdict, when none is counted) by step, then device order,
    then rank.

    Of two ranks whose events are of the same step, the rank whose device had done less of it comes
    first: ranks do the same work in the same order. A weight, which is read late, was not finite
    before the step's first tensor was made, on any rank.
    """
    by_rank: dict[int, Event] = {}
    for event in sorted(events, key=lambda e: (not e.counted, e.step, int(e.record["seq"]))):
        by_rank.setdefault(event.rank, event)
    return min(
        by_rank.values(),
        key=lambda e: (
            *(not e.counted, e.step, e.site.role != "param"),
            *(int(e.record["seq"]), e.rank),
        ),
        default=None,
    )


@dataclass
class RankLog:
    """The contents of the files of one rank. ``events`` are the lines of its events file."""

    rank: int
    records: np.ndarray
    sites: dict[int, Site]
    events: list[dict[str, Any]]
    meta: dict[str, Any]
    dropped_bytes: int
    damaged_records: int = 0


def lost_site(index: int) -> Site:
    """Stands for a site whose line the log doesn't have."""
    return Site(f"site {index}", "name lost", "forward", "output", 0, "?")


def merge_ranks(directory: str, parts: list[RankLog]) -> LogView:
    """The logs of these ranks as a single log, with one numbering of sites."""
    sites: dict[int, Site] = {}
    numbers: dict[Site, int] = {}
    events: list[Event] = []
    chunks, ranks = [], []
    for part in parts:
        lines: dict[tuple[int, int, int], dict[str, Any]] = {}
        for line in part.events:
            if (key := _line_key(line)) is not None:
                # An event written again (its verdict changed) stands for the earlier line.
                lines[key] = line
        named = np.isin(part.records["seq"], [seq for _, seq, _ in lines])
        by_key = {_key(record): record.copy() for record in part.records[named]}
        number_of = _number_sites(part, sites, numbers)
        made = (_event(*pair, number_of, sites, by_key, part.rank) for pair in lines.items())
        events += (event for event in made if event is not None)
        records = part.records.copy()
        if len(records):
            used, places = np.unique(records["site"], return_inverse=True)
            records["site"] = np.array([number_of[index] for index in used.tolist()])[places]
        chunks.append(records)
        ranks.append(np.full(len(records), part.rank, np.int32))
    all_records, all_ranks = np.concatenate(chunks), np.concatenate(ranks)
    if len(parts) > 1:
        order = np.lexsort((all_records["seq"], all_ranks, all_records["step"]))
        all_records, all_ranks = all_records[order], all_ranks[order]
        events.sort(key=lambda event: (event.step, event.rank, int(event.record["seq"])))
    return LogView(
        directory=directory,
        records=all_records,
        ranks=all_ranks,
        sites=sites,
        events=tuple(events),
        meta={part.rank: part.meta for part in parts},
        dropped_bytes=sum(part.dropped_bytes for part in parts),
        damaged_records=sum(part.damaged_records for part in parts),
    )


def _number_sites(
    part: RankLog, sites: dict[int, Site], numbers: dict[Site, int]
) -> dict[int, int]:
    """Adds the part's sites to the merged sites; returns their numbers there by those of the part.

    The first part keeps its own numbers.
    """
    number_of: dict[int, int] = {}
    shift = max(sites, default=-1) + 1
    used = set(np.unique(part.records["site"]).tolist()) | set(part.sites)
    for index in sorted(used):
        site = part.sites.get(index)
        # Two lost names may be those of different sites.
        known = None if site is None or shift == 0 else numbers.get(site)
        number = number_of[index] = index + shift if known is None else known
        sites.setdefault(number, site or lost_site(index))
        if site is not None:
            numbers.setdefault(site, number)
    return number_of


def _key(record: np.void) -> tuple[int, int, int]:
    return int(record["step"]), int(record["seq"]), int(record["site"])


def _line_key(line: dict[str, Any]) -> tuple[int, int, int] | None:
    """Step, sequence number and site of an event's line; None if one of them is invalid."""
    step, seq, site = line.get("step"), line.get("seq"), line.get("site")
    if not (isinstance(step, int) and isinstance(seq, int) and isinstance(site, int)):
        return None
    is_possible = -_INT64 <= step < _INT64 and -_INT64 <= seq < _INT64 and 0 <= site < MAX_SITES
    return (step, seq, site) if is_possible else None


def _event(
    key: tuple[int, int, int],
    line: dict[str, Any],
    number_of: dict[int, int],
    sites: dict[int, Site],
    records: dict[tuple[int, int, int], np.void],
    rank: int,
) -> Event | None:
    step, seq, index = key
    site = number_of.get(index, index)
    record = records.get(key)
    if record is None:
        # The reason was written, its record not (a crash between the two): show what is known.
        empty = np.zeros(1, RECORD_DTYPE)
        empty["step"], empty["seq"], empty["site"], empty["version"] = step, seq, site, 1
        record = empty[0]
    record["site"] = site
    blamed = line.get("blamed")
    try:
        where = Site.from_dict(blamed) if isinstance(blamed, dict) else sites.get(site)
        return Event(
            site=where or lost_site(index),
            record=record,
            step=step,
            verdict=Verdict(line["verdict"]),
            reason=str(line["reason"]),
            counted=bool(line["counted"]),
            rank=rank,
            line=str(line.get("line", "")),
            api=str(line.get("api", "")),
            inputs=tuple((str(name), _seq(at)) for name, at in line.get("inputs", ())),
        )
    except (KeyError, TypeError, ValueError):
        return None


def _seq(value: Any) -> int:
    if not isinstance(value, int) or not -_INT64 <= value < _INT64:
        raise ValueError(f"{value!r:.80} is not a sequence number")
    return value
