"""``fastcheck export``: writes a log as a table: CSV, Parquet or Arrow; or as a trace."""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from itertools import chain
from typing import Any, Callable

import numpy as np

from fastcheck.dump.storage.files import places_in
from fastcheck.errors import CompareError, ConfigError, needed_module
from fastcheck.log.reader import (
    find_logs,
    log_parts,
    read_event_lines,
    read_log,
    read_sites_and_meta,
    read_watch,
)
from fastcheck.log.record_file import read_pieces
from fastcheck.log.step_table import STEP_NUMBERS, StepRow, StepStream, step_rows
from fastcheck.log.table import COLUMNS, log_table
from fastcheck.record.format import Verdict, nonfinite
from fastcheck.record.statistics import LARGEST_FINITE, statistics_columns
from fastcheck.utils.private import new_file, writing
from fastcheck.utils.text.layout import csv_text

from .console import print_json

_STEP_MICROSECONDS = 1000
_VERDICTS = [int(verdict) for verdict in Verdict]


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
            for name in STEP_NUMBERS:
                value = getattr(row, name)
                if value is not None and math.isfinite(value):
                    yield _counter(f"step: {name}", rank, row.step, {name: value})
    for line in read_watch(directory):
        yield _watched(line)


def _counters(records: np.ndarray, names: dict[int, str], rank: int) -> Iterator[dict[str, Any]]:
    columns = statistics_columns(records)
    with np.errstate(all="ignore"):
        headroom = np.log2(LARGEST_FINITE[records["dtype"]] / columns["abs_max"])
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


HELP = "a log as CSV, Parquet or Arrow"

DESCRIPTION = """\
Writes the records of a log, or of a dump, as a table, one row a record, with its place, counts,
statistics and checksum: for pandas, DuckDB, Polars, a spreadsheet. Works in pieces, so that its
size doesn't matter. The format is that of the name: .csv, .parquet, or .arrow; or .trace.json, a
trace for Perfetto: a counter track for each tensor's headroom and rms, events as instants."""

EPILOG = """\
examples:
  fastcheck export fastcheck_log records.parquet
  fastcheck export LOG records.csv
  fastcheck export LOG steps.csv --steps
  fastcheck export dump/step3 step3.csv
  fastcheck export LOG run.trace.json            for https://ui.perfetto.dev
  duckdb -c "select step, max(l2_norm) from 'records.parquet' where module = 'head' group by step"

.parquet and .arrow need pyarrow: pip install 'fastcheck[tools]'. .csv needs nothing; its checksums
are 16 hexadecimal digits, and a cell is empty where install(record=) left it out. A name that
a spreadsheet would take for a formula (it begins with = + - @) has an apostrophe before it.

exit codes: 0 written; 2 no log or dump, a file that is there already or can't be written, wrong
usage"""

Piece = dict[str, np.ndarray]

_TRACE = ".trace.json"
_STEP_COLUMNS = tuple(field.name for field in fields(StepRow))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "log", help="log directory, the fastcheck_log/ above it (the newest), or a dump"
    )
    parser.add_argument("file", help="what to write: NAME.csv, .parquet, .arrow or .trace.json")
    parser.add_argument("--force", action="store_true", help="replace the file if it is there")
    parser.add_argument(
        "--steps",
        action="store_true",
        help="of a log: a row for each step, with loss, overflow, scale, learning rate, norm",
    )
    parser.add_argument("--json", action="store_true", help="say what was written as JSON")


def run(options: argparse.Namespace) -> int:
    """Exit code 0; what goes wrong is raised."""
    suffix = os.path.splitext(options.file)[1].lower()
    writers: dict[str, Callable[[Iterable[Piece], str, Sequence[str]], int]] = {
        ".csv": _write_csv,
        ".parquet": _write_parquet,
        ".arrow": _write_arrow,
    }
    is_trace = options.file.lower().endswith(_TRACE)
    if suffix not in writers and not is_trace:
        raise ConfigError(
            "unknown output format",
            expected="a file name that ends in " + " or ".join(writers),
            got=options.file,
        )
    if os.path.exists(options.file) and not options.force:
        raise ConfigError(
            "the output file exists already",
            expected="a new name",
            got=options.file,
            hint="--force replaces it",
        )
    path, places = options.log, [place for _, _, place in sorted(places_in(options.log))]
    if is_trace and (options.steps or places):
        raise ConfigError(
            "a trace is made of a whole log", expected="a log directory, without --steps", got=path
        )
    if options.steps and places:
        raise ConfigError(
            "--steps is for logs only", expected="a log directory", got=f"{path}, a dump"
        )
    if not places:
        places = find_logs(options.log)[-1:]
        path = places[0] if places else path
    if not places:
        read_log(options.log)  # raises the error
        raise ConfigError("export takes a whole log", expected="a log directory", got=options.log)
    # Under another name until it is whole: half a table must not pass for a table.
    part = options.file + ".part"
    damaged: list[int] = []
    try:
        with writing(options.file, "the table", CompareError):
            os.close(new_file(part, 0o666))
            if is_trace:
                rows = write_trace(path, part)
            elif options.steps:
                rows = writers[suffix]([_step_columns(path)], part, _STEP_COLUMNS)
            else:
                pieces = (log_table(place, damaged.append) for place in places)
                rows = writers[suffix](chain.from_iterable(pieces), part, COLUMNS)
            os.replace(part, options.file)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(part)
    size = os.path.getsize(options.file)
    columns = () if is_trace else _STEP_COLUMNS if options.steps else COLUMNS
    if options.json:
        written = {"log": path, "file": options.file, "rows": rows, "bytes": size}
        written["damaged_records"] = sum(damaged)
        print_json("export", {**written, "columns": columns})
    else:
        of_what = "entries" if is_trace else f"rows of {len(columns)} columns"
        print(f"{options.file}: {rows:,} {of_what}, {size:,} bytes")
        if damaged:
            print(f"{sum(damaged):,} damaged records of the log are left out")
    return 0


def _step_columns(directory: str) -> Piece:
    rows = step_rows(read_log(directory))
    kinds = {"rank": np.int64, "step": np.int64, "overflow": np.bool_}
    return {
        name: np.array(
            [float("nan") if (v := getattr(row, name)) is None else v for row in rows],
            kinds.get(name, np.float64),
        )
        for name in _STEP_COLUMNS
    }


def _write_csv(pieces: Iterable[Piece], path: str, names: Sequence[str]) -> int:
    rows = 0
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        for piece in pieces:
            columns = [_cells(name, piece[name]) for name in names]
            writer.writerows(zip(*columns))
            rows += len(columns[0])
    return rows


def _cells(name: str, column: np.ndarray) -> list[object]:
    if column.dtype.kind == "O":
        return [csv_text(text) for text in column.tolist()]
    if name == "checksum":
        return [f"{value:016x}" for value in column.tolist()]
    if column.dtype.kind == "f":
        return ["" if value != value else repr(value) for value in column.tolist()]
    if column.dtype.kind == "b":
        return [int(value) for value in column.tolist()]
    cells: list[object] = column.tolist()
    return cells


def _write_parquet(pieces: Iterable[Piece], path: str, names: Sequence[str]) -> int:
    parquet = _need("pyarrow.parquet")
    return _write_batches(pieces, names, lambda schema: parquet.ParquetWriter(path, schema))


def _write_arrow(pieces: Iterable[Piece], path: str, names: Sequence[str]) -> int:
    ipc = _need("pyarrow.ipc")
    return _write_batches(pieces, names, lambda schema: ipc.new_file(path, schema))


def _write_batches(
    pieces: Iterable[Piece], names: Sequence[str], open_writer: Callable[[Any], Any]
) -> int:
    arrow = _need("pyarrow")
    schema = _schema(arrow, names)
    rows = 0
    with open_writer(schema) as writer:
        for piece in pieces:
            arrays = [
                # NaN of a float column means that the record doesn't cover it.
                arrow.array(piece[field.name], type=field.type, from_pandas=True)
                for field in schema
            ]
            table = arrow.table(arrays, schema=schema)
            writer.write_table(table)
            rows += len(table)
    return rows


def _schema(arrow: Any, names: Sequence[str]) -> Any:
    kinds = {
        "O": arrow.string(),
        "i": arrow.int64(),
        "f": arrow.float64(),
        "u": arrow.uint64(),
        "b": arrow.bool_(),
    }
    return arrow.schema([(name, kinds[_KINDS.get(name, "i")]) for name in names])


_KINDS = {
    **dict.fromkeys(("module", "module_type", "op", "direction", "role", "label", "dtype"), "O"),
    **dict.fromkeys(("order", "record", "verdict"), "O"),
    **dict.fromkeys(("min", "max", "sum", "abs_sum", "sum_sq", "mean", "rms", "l2_norm"), "f"),
    **dict.fromkeys(("recomputed", "scaled", "event"), "b"),
    "checksum": "u",
    **dict.fromkeys(STEP_NUMBERS, "f"),
    "overflow": "b",
}


def _need(name: str) -> Any:
    hint = "pip install 'fastcheck[tools]', or write .csv, which needs nothing"
    return needed_module(name, "this format", hint)
