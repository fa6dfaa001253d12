"""A log as a trace for https://ui.perfetto.dev: sites as counter tracks, events as instants.

The format is that of Chrome's trace events (JSON), which Perfetto and chrome://tracing open. A log
has steps and no times: a step is a millisecond.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from fastcheck.log.reader import log_parts, read_event_lines, read_sites_and_meta, read_watch
from fastcheck.log.record_file import read_pieces
from fastcheck.log.step_table import StepStream
from fastcheck.record.format import Verdict, nonfinite
from fastcheck.record.statistics import LARGEST_FINITE, statistics_columns

__all__ = ["write_trace"]

_STEP_MICROSECONDS = 1000
_VERDICTS = [int(verdict) for verdict in Verdict]
_NUMBERS = ("loss", "scale", "learning_rate", "gradient_norm")


def write_trace(directory: str, path: str) -> int:
    """Writes the trace, a piece of the log at a time; returns how many entries it has.

    Raises:
        LogError: the log can't be read.
        OSError: ``path`` can't be written.
    """
    count = 0
    with open(path, "w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[')
        for entry in _entries(directory):
            file.write(("," if count else "") + "\n" + json.dumps(entry, allow_nan=False))
            count += 1
        file.write("\n]}\n")
    return count


def _entries(directory: str) -> Iterator[dict[str, Any]]:
    for rank, paths in log_parts(directory).items():
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        sites, meta = read_sites_and_meta(directory, rank)
        stream = StepStream(sites, meta, rank)
        names = {number: str(site) for number, site in sites.items()}
        for path in paths:
            for piece in read_pieces(path):
                stream.add(piece.records)
                yield from _counters(piece.records, names, rank)
        for line in read_event_lines(directory, rank)[0]:
            yield from _instant(line, names, rank)
        for row in stream.rows():
            for name in _NUMBERS:
                value = getattr(row, name)
                if value is not None and math.isfinite(value):
                    yield _counter(f"step: {name}", rank, row.step, {name: value})
    for line in read_watch(directory):
        yield _watched(line)


def _counters(records: np.ndarray, names: dict[int, str], rank: int) -> Iterator[dict[str, Any]]:
    columns = statistics_columns(records)
    with np.errstate(all="ignore"):
        abs_max = np.fmax(np.abs(columns["min"]), np.abs(columns["max"]))
        headroom = np.log2(LARGEST_FINITE[records["dtype"]] / abs_max)
    values = {"headroom bits": headroom, "rms": columns["rms"]}
    bad = nonfinite(records)
    for index, (site, step) in enumerate(zip(records["site"].tolist(), records["step"].tolist())):
        shown = {
            name: float(column[index])
            for name, column in values.items()
            if np.isfinite(column[index])
        }
        if bad[index]:
            shown["not finite"] = 1.0
        for name, value in shown.items():
            track = f"{names.get(site, f'site {site}')}: {name}"
            yield _counter(track, rank, step, {name: value})


def _counter(name: str, rank: int, step: int, values: dict[str, float]) -> dict[str, Any]:
    time = step * _STEP_MICROSECONDS
    return {"ph": "C", "name": name, "pid": rank, "ts": time, "args": values}


def _watched(line: dict[str, Any]) -> dict[str, Any]:
    """An event of install(watch=)."""
    rank = line.get("rank")
    text = {"text": line["text"], "warns": bool(line.get("is_warning"))}
    return {
        "ph": "i",
        "s": "p",
        "name": f"watch: {line.get('kind', 'event')}",
        "pid": rank if isinstance(rank, int) else 0,
        "tid": 0,
        "ts": line["step"] * _STEP_MICROSECONDS,
        "args": text,
    }


def _instant(line: dict[str, Any], names: dict[int, str], rank: int) -> Iterator[dict[str, Any]]:
    step, site, verdict = line.get("step"), line.get("site"), line.get("verdict")
    if not isinstance(step, int) or not isinstance(site, int) or verdict not in _VERDICTS:
        return
    name = f"{Verdict(verdict).name.lower()}: {names.get(site, f'site {site}')}"
    reason = {"reason": str(line.get("reason", "")), "counted": bool(line.get("counted"))}
    time = step * _STEP_MICROSECONDS
    yield {"ph": "i", "s": "p", "name": name, "pid": rank, "tid": 0, "ts": time, "args": reason}
