"""Reads a log directory into records, sites and events.

A log that a crash cut short can be read: an incomplete last record or line is dropped and counted,
and a site whose line is missing gets the name "name lost". So can a damaged log: records that no
fastcheck can have written are left out and counted. Ranks are merged in the order in which the
devices worked; a site that several ranks have is one site.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from fastcheck.errors import LogError
from fastcheck.record.site import MAX_SITES, Site
from fastcheck.utils.reading import read_json, read_json_lines, reading, why_missing

from .history import joined
from .record_file import read_rank
from .view import LogView, RankLog, merge_ranks

_NAME = re.compile(
    r"(records|events|sites|meta)-rank([0-9]{1,9})(?:-([0-9]{6,18}))?\.(bin|jsonl|json)"
)
_MAX_META_BYTES = 1 << 28


def read_log(path: str | os.PathLike[str], rank: int | None = None) -> LogView:
    """Reads a log directory: all ranks, or ``rank`` alone, with ``records["site"]`` as written.

    Raises LogError when there is nothing at ``path``, or it is not a log of fastcheck.
    """
    place = os.fspath(path)
    is_there = os.path.isdir(place)
    ranks = [each for each in _ranks_in(place) if rank in (None, each)] if is_there else []
    if not ranks:
        raise no_log(place)
    return merge_ranks(place, [_read_rank(place, each) for each in ranks])


def no_log(path: str) -> LogError:
    got, hint = "which is no directory", "give the directory that the stop message names"
    if os.path.isdir(path):
        got = "a directory that holds no log"
        hint = f"did you mean {below[-1]}?" if (below := find_logs(path)) else hint
    elif not os.path.exists(path):
        got, hint = "which is not there", why_missing(path)
    return LogError(
        "there is no log here",
        expected="a log directory (records-rank0-000000.bin, ...), or the fastcheck_log/ above it",
        got=f"{path}, {got}",
        hint=hint,
    )


def newest_log(path: str) -> str:
    """The newest log directory at ``path`` or right below it.

    Raises:
        LogError: there is none.
    """
    logs = find_logs(path)
    if not logs:
        raise no_log(path)
    return logs[-1]


def read_logs(path: str, directories: Iterable[str]) -> LogView:
    """Several directories as one log with the name ``path``: the steps of a dump."""
    parts = [
        _read_rank(directory, rank) for directory in directories for rank in _ranks_in(directory)
    ]
    return merge_ranks(path, parts)


def find_logs(path: str) -> list[str]:
    """The log directories at ``path`` and one level below it, the newest last."""
    if not os.path.isdir(path):
        return []
    with reading(f"the logs in {path}"):
        below = sorted(entry.path for entry in os.scandir(path) if entry.is_dir())
    logs = [place for place in [path, *below] if os.access(place, os.R_OK) and _ranks_in(place)]
    return sorted(logs, key=lambda place: (_changed(place), place))


def log_parts(directory: str) -> dict[int, list[str]]:
    """The paths of each rank's segments, oldest first."""
    segments: dict[int, list[tuple[int, str]]] = {}
    for match in _files_in(directory):
        parts = segments.setdefault(int(match.group(2)), [])
        if match.group(1) == "records":
            parts.append((int(match.group(3) or 0), match.group()))
    return {
        rank: [os.path.join(directory, name) for _, name in sorted(segments[rank])]
        for rank in sorted(segments)
    }


def read_sites_and_meta(directory: str, rank: int) -> tuple[dict[int, Site], dict[str, Any]]:
    """A rank's sites by number, and its meta file; empty where a crash left none."""
    lines, _ = _read_lines(os.path.join(directory, f"sites-rank{rank}.jsonl"))
    return sites_of_lines(lines), read_meta(os.path.join(directory, f"meta-rank{rank}.json"))


def read_event_lines(directory: str, rank: int) -> tuple[list[dict[str, Any]], int]:
    """The lines of one rank's events, and how many bytes of the file are no such line."""
    return _read_lines(os.path.join(directory, f"events-rank{rank}.jsonl"))


def read_schedule(directory: str, rank: int) -> list[dict[str, Any]]:
    """A rank's lines of what the run changed by plan; empty where it changed nothing."""
    return _read_lines(os.path.join(directory, f"schedule-rank{rank}.jsonl"))[0]


def read_batches(directory: str, rank: int) -> dict[int, int | str]:
    """Reads the batches that the steps of a rank were trained on, where the training loop named
    them: from its lines, or from the meta file of a log that was written by a stop.
    """
    written = read_meta(os.path.join(directory, f"meta-rank{rank}.json")).get("batches")
    lines = written if isinstance(written, list) else []
    lines = lines + _read_lines(os.path.join(directory, f"batches-rank{rank}.jsonl"))[0]
    return {
        line["step"]: line["batch"]
        for line in lines
        if isinstance(line, dict)
        and type(line.get("step")) is int
        and isinstance(line.get("batch"), (int, str))
    }


def read_watch(path: str) -> list[dict[str, Any]]:
    """The events of ``install(watch=)`` of all ranks of a log, by step; empty where there is none.
    What is no such event is left out.
    """
    lines = [
        line
        for rank in _ranks_in(path)
        for line in _read_lines(os.path.join(path, f"watch-rank{rank}.jsonl"))[0]
        if isinstance(line.get("step"), int) and isinstance(line.get("text"), str)
    ]
    return sorted(lines, key=lambda line: int(line["step"]))


def read_ranges(path: str) -> list[dict[str, Any]]:
    """The exponents of ``install(record="range")`` of all ranks of a log, one line for each site:
    the last that was written, with the Site. What is no such line is left out.
    """
    ranges: list[dict[str, Any]] = []
    for rank in _ranks_in(path):
        lines = _read_lines(os.path.join(path, f"range-rank{rank}.jsonl"))[0]
        sites = read_sites_and_meta(path, rank)[0] if lines else {}
        numbered = [line for line in lines if isinstance(line.get("site"), int)]
        last = {line["site"]: line for line in numbered if line["site"] in sites}
        ranges += [{**line, "rank": rank, "site": sites[number]} for number, line in last.items()]
    return ranges


def _files_in(place: str) -> list[re.Match[str]]:
    """The names of a log's files: kind, rank, number and ending."""
    with reading(f"the log in {place}"):
        names = os.listdir(place)
    return [match for match in map(_NAME.fullmatch, names) if match]


def _ranks_in(place: str) -> list[int]:
    return sorted({int(match.group(2)) for match in _files_in(place)})


def _changed(place: str) -> float:
    times = [0.0]
    for entry in os.scandir(place):
        if _NAME.fullmatch(entry.name):
            with contextlib.suppress(OSError):  # a link to nothing
                times.append(entry.stat().st_mtime)
    return max(times)


def _read_rank(directory: str, rank: int) -> RankLog:
    pieces = list(read_rank(directory, rank, log_parts(directory).get(rank, [])))
    records = joined([piece.records for piece in pieces])
    if os.path.exists(os.path.join(directory, f"events-rank{rank}.bin")):
        # Kept events come from another file than their neighbours, and go back to these.
        records = records[np.lexsort((records["seq"], records["step"]))]
    site_lines, lost_sites = _read_lines(os.path.join(directory, f"sites-rank{rank}.jsonl"))
    event_lines, lost_events = _read_lines(os.path.join(directory, f"events-rank{rank}.jsonl"))
    return RankLog(
        rank=rank,
        records=records,
        sites=sites_of_lines(site_lines),
        events=event_lines,
        meta=read_meta(os.path.join(directory, f"meta-rank{rank}.json")),
        dropped_bytes=sum(piece.dropped_bytes for piece in pieces) + lost_sites + lost_events,
        damaged_records=sum(piece.damaged for piece in pieces),
    )


def sites_of_lines(lines: Iterable[dict[str, Any]]) -> dict[int, Site]:
    sites: dict[int, Site] = {}
    for line in lines:
        try:
            index = line.pop("id")
            if isinstance(index, int) and 0 <= index < MAX_SITES:
                sites[index] = Site.from_dict(line)
        except (KeyError, TypeError):
            continue
    return sites


def _read_lines(path: str) -> tuple[list[dict[str, Any]], int]:
    """The objects in a file's lines, and how many bytes are in lines that are none."""
    lines: list[dict[str, Any]] = []
    lost = 0
    with reading(path), contextlib.suppress(FileNotFoundError):
        for value, size in read_json_lines(path):
            lost += size
            if isinstance(value, dict):
                lines.append(value)
    return lines, lost


def read_meta(path: str) -> dict[str, Any]:
    """The contents of a meta file; empty where there is none. Of one that is damaged, the reason
    under ``unreadable``.
    """
    try:
        meta = read_json(path, _MAX_META_BYTES)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        return {"unreadable": f"{os.path.basename(path)} can't be read: {reason}"}
    if not isinstance(meta, dict):
        return {"unreadable": f"{os.path.basename(path)} can't be read: it is no JSON object"}
    return meta
