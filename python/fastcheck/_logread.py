"""The log on disk, reading side: a directory, or one file of it, back into records, sites and
events.

Takes what a crash leaves: a last record or line cut short is dropped and counted; a site whose line
is missing gets a name that says so. Ranks are merged in the order in which the devices worked, and
their sites into one numbering: a site that several ranks have is one site."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ._errors import LogError, explain
from ._record import RECORD_BYTES, RECORD_DTYPE, RECORD_VERSION, Verdict
from ._site import Site
from ._verdict import Event

__all__ = [
    "LogView",
    "find_logs",
    "first_event",
    "log_parts",
    "read_log",
    "read_logs",
    "read_sites_and_meta",
]

_NAME = re.compile(r"(records|events|sites|meta)-rank(\d+)(?:-(\d{6,}))?\.(bin|jsonl|json)")


@dataclass(frozen=True)
class LogView:
    """A log in memory. ``records["site"]`` indexes ``sites``; ``ranks[i]`` is the rank of
    ``records[i]``.

    One rank's records and events are in the order in which it wrote them; those of several are
    merged by step, then rank, then device order (``seq``). Ranks count their own steps: they are
    the same where the ranks train together. ``meta`` is by rank. ``dropped_bytes`` counts what was
    cut short by a crash and left out.
    """

    directory: str
    records: np.ndarray
    ranks: np.ndarray
    sites: dict[int, Site]
    events: tuple[Event, ...]
    meta: dict[int, dict[str, Any]]
    dropped_bytes: int = 0


def first_event(events: Iterable[Event]) -> Event | None:
    """Where it began: the first counted event (of any verdict, when none is counted) by step, then
    device order, then rank.

    Of two ranks whose events are of the same step, the one whose device had done less of it comes
    first: ranks do the same work in the same order.
    """
    counted_first = sorted(
        events, key=lambda e: (not e.counted, e.step, int(e.record["seq"]), e.rank)
    )
    return counted_first[0] if counted_first else None


def read_log(path: str | os.PathLike[str], rank: int | None = None) -> LogView:
    """Reads a log directory (all ranks), or one file of it (that rank; a ``records-`` file: only
    its records).

    With ``rank``, a directory's other ranks are left out, and ``records["site"]`` is as written.
    Raises LogError when there is nothing at ``path``, or it is not a log of fastcheck.
    """
    place = os.fspath(path)
    if os.path.isdir(place):
        return _read_directory(place, rank)
    if not os.path.exists(place):
        raise LogError(
            explain(
                "there is no log here",
                expected="a log directory, or a file in it",
                came=f"{place}, which does not exist",
                do="give the directory that the stop message ends with (or fastcheck_log/)",
            )
        )
    directory, name = os.path.split(place)
    match = _NAME.fullmatch(name)
    if match is None:
        return _read_stray(place)
    its_rank = int(match.group(2))
    only = name if match.group(1) in ("records", "events") and match.group(4) == "bin" else None
    return _merge(directory or ".", [_read_rank(directory or ".", its_rank, only)])


def read_logs(path: str, directories: Iterable[str]) -> LogView:
    """Several directories as one log, which goes by ``path``: what a dump has of its steps."""
    parts = [
        _read_rank(directory, rank, None)
        for directory in directories
        for rank in _ranks_in(directory)
    ]
    return _merge(path, parts)


def find_logs(path: str) -> list[str]:
    """The log directories at ``path`` and one level below it, the newest last."""
    if not os.path.isdir(path):
        return []
    below = sorted(entry.path for entry in os.scandir(path) if entry.is_dir())
    found = [place for place in [path, *below] if os.access(place, os.R_OK) and _ranks_in(place)]
    return sorted(found, key=lambda place: (_changed(place), place))


def log_parts(directory: str) -> dict[int, list[str]]:
    """The paths of each rank's segments, oldest first: for whoever reads them piece by piece."""
    return {
        rank: [os.path.join(directory, name) for name in _segments(directory, rank)]
        for rank in _ranks_in(directory)
    }


def read_sites_and_meta(directory: str, rank: int) -> tuple[dict[int, Site], dict[str, Any]]:
    """One rank's sites by number, and its meta file; empty where a crash left none."""
    lines, _ = _read_lines(os.path.join(directory, f"sites-rank{rank}.jsonl"))
    return _sites(lines), _read_meta(os.path.join(directory, f"meta-rank{rank}.json"))


@dataclass
class _Rank:
    rank: int
    records: np.ndarray
    sites: dict[int, Site]
    events: list[dict[str, Any]]
    meta: dict[str, Any]
    dropped_bytes: int


def _read_directory(place: str, only: int | None) -> LogView:
    ranks = [rank for rank in _ranks_in(place) if only is None or rank == only]
    if not ranks:
        below = find_logs(place)
        raise LogError(
            explain(
                "this directory holds no log",
                expected="files named records-rank0-000000.bin, sites-rank0.jsonl, ...",
                came=f"{place}, with none of them",
                do=f"did you mean {below[-1]}?"
                if below
                else "give the directory that the stop message names",
            )
        )
    return _merge(place, [_read_rank(place, rank, None) for rank in ranks])


def _ranks_in(place: str) -> list[int]:
    try:
        names = os.listdir(place)
    except OSError as error:
        raise LogError(f"the log in {place} can't be read: {error.strerror}") from error
    matches = [match for match in map(_NAME.fullmatch, names) if match]
    return sorted({int(match.group(2)) for match in matches})


def _changed(place: str) -> float:
    times = [entry.stat().st_mtime for entry in os.scandir(place) if _NAME.fullmatch(entry.name)]
    return max(times, default=0.0)


def _read_rank(directory: str, rank: int, only: str | None) -> _Rank:
    names = [only] if only is not None else [f"events-rank{rank}.bin", *_segments(directory, rank)]
    dropped = 0
    chunks = []
    for name in names:
        chunk, lost = _read_records(os.path.join(directory, name), must_exist=only is not None)
        chunks.append(chunk)
        dropped += lost
    records = np.concatenate(chunks)
    if only is None and len(chunks[0]):
        records = _without_doubles(records)
    site_lines, lost_sites = _read_lines(os.path.join(directory, f"sites-rank{rank}.jsonl"))
    event_lines, lost_events = _read_lines(os.path.join(directory, f"events-rank{rank}.jsonl"))
    return _Rank(
        rank=rank,
        records=records,
        sites=_sites(site_lines),
        events=event_lines,
        meta=_read_meta(os.path.join(directory, f"meta-rank{rank}.json")),
        dropped_bytes=dropped + lost_sites + lost_events,
    )


def _sites(lines: Iterable[dict[str, Any]]) -> dict[int, Site]:
    sites: dict[int, Site] = {}
    for line in lines:
        try:
            index = int(line.pop("id"))
            sites[index] = Site.from_dict(line)
        except (KeyError, TypeError, ValueError):
            continue
    return sites


def _segments(directory: str, rank: int) -> list[str]:
    found = []
    for name in os.listdir(directory):
        match = _NAME.fullmatch(name)
        if match and match.group(1) == "records" and int(match.group(2)) == rank:
            found.append((int(match.group(3) or 0), name))
    return [name for _, name in sorted(found)]


def _read_records(path: str, must_exist: bool = False) -> tuple[np.ndarray, int]:
    try:
        size = os.path.getsize(path)
        records = np.fromfile(path, RECORD_DTYPE)
    except FileNotFoundError:
        if must_exist:
            raise
        return np.zeros(0, RECORD_DTYPE), 0
    except OSError as error:
        raise LogError(f"{path} can't be read: {error.strerror}") from error
    lost = size - len(records) * RECORD_BYTES
    # A machine that lost power can leave a tail of zero bytes: no record, since its version would
    # be 0.
    written = records["version"] != 0
    lost += int((~written).sum()) * RECORD_BYTES
    records = records[written]
    strange = np.flatnonzero(records["version"] != RECORD_VERSION)
    if len(strange):
        version = int(records["version"][strange[0]])
        raise LogError(
            explain(
                "this is not a log that this fastcheck reads",
                expected=f"records of version {RECORD_VERSION}, {RECORD_BYTES} bytes each",
                came=f"{path}, whose record {int(strange[0])} says version {version}",
                do="if a newer fastcheck wrote it, read it with that one",
            )
        )
    return records, lost


def _read_stray(path: str) -> LogView:
    """A file that doesn't have a log's name: still shown when it is made of records (a renamed
    segment).
    """
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        first = file.read(RECORD_BYTES)
    looks_right = (
        len(first) == RECORD_BYTES
        and int(np.frombuffer(first, RECORD_DTYPE)["version"][0]) == RECORD_VERSION
    )
    if not looks_right:
        raise LogError(
            explain(
                "this file is not a log of fastcheck",
                expected=f"a log directory, or a .bin file of {RECORD_BYTES}-byte records",
                came=f"{path}, {size:,} bytes of something else",
                do="give the directory that the stop message ends with (or fastcheck_log/)",
            )
        )
    records, lost = _read_records(path)
    return _merge(os.path.dirname(path) or ".", [_Rank(0, records, {}, [], {}, lost)])


def _read_lines(path: str) -> tuple[list[dict[str, Any]], int]:
    try:
        with open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise LogError(f"{path} can't be read: {error.strerror}") from error
    lines: list[dict[str, Any]] = []
    lost = 0
    for raw in data.splitlines(keepends=True):
        try:
            value = json.loads(raw)
        except ValueError:
            lost += len(raw)
            continue
        if isinstance(value, dict):
            lines.append(value)
    return lines, lost


def _read_meta(path: str) -> dict[str, Any]:
    lines: Any = {}
    try:
        with open(path, "rb") as file:
            lines = json.load(file)
    except (OSError, ValueError):
        pass
    return lines if isinstance(lines, dict) else {}


def _without_doubles(records: np.ndarray) -> np.ndarray:
    """One of each record: an eviction that a crash interrupted leaves an event both kept and in its
    segment.
    """
    _, first = np.unique(records[["step", "seq", "site"]], return_index=True)
    kept = records[np.sort(first)]
    # Kept events come from another file than their neighbours: put them back in the order of the
    # device.
    return kept[np.lexsort((kept["seq"], kept["step"]))]


def lost_site(index: int) -> Site:
    """Stands for a site whose line the log doesn't have."""
    return Site(
        module=f"site {index}",
        module_type="name lost",
        direction="forward",
        role="output",
        index=0,
        label="?",
    )


def _merge(directory: str, parts: list[_Rank]) -> LogView:
    sites: dict[int, Site] = {}
    numbers: dict[Site, int] = {}
    events: list[Event] = []
    chunks, ranks = [], []
    for part in parts:
        named = np.isin(part.records["seq"], [line.get("seq", -1) for line in part.events])
        by_key = {_key(record): record.copy() for record in part.records[named]}
        number_of = _number_sites(part, sites, numbers)
        # An event written again (its verdict changed) stands for the earlier one.
        lines = {
            (line.get("step"), line.get("seq"), line.get("site")): line for line in part.events
        }
        for line in lines.values():
            event = _event(line, number_of, sites, by_key, part.rank)
            if event is not None:
                events.append(event)
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
    )


def _number_sites(part: _Rank, sites: dict[int, Site], numbers: dict[Site, int]) -> dict[int, int]:
    """Adds the part's sites to the merged ones; returns their numbers there by those of the part.

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


def _event(
    line: dict[str, Any],
    number_of: dict[int, int],
    sites: dict[int, Site],
    records: dict[tuple[int, int, int], np.void],
    rank: int,
) -> Event | None:
    try:
        step, seq, index = int(line["step"]), int(line["seq"]), int(line["site"])
        site = number_of.get(index, index)
        record = records.get((step, seq, index))
        if record is None:
            # The reason was written, its record not (a crash between the two): show what is known.
            empty = np.zeros(1, RECORD_DTYPE)
            empty["step"], empty["seq"], empty["site"], empty["version"] = step, seq, site, 1
            record = empty[0]
        record["site"] = site
        blamed = line.get("blamed")
        where = Site.from_dict(blamed) if isinstance(blamed, dict) else sites.get(site)
        return Event(
            site=where or lost_site(index),
            record=record,
            step=step,
            verdict=Verdict(int(line["verdict"])),
            reason=str(line["reason"]),
            counted=bool(line["counted"]),
            rank=rank,
            line=str(line.get("line", "")),
            api=str(line.get("api", "")),
            inputs=tuple((str(name), int(at)) for name, at in line.get("inputs", ())),
        )
    except (KeyError, TypeError, ValueError):
        return None
