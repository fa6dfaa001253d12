"""``fastcheck export``: writes a log as a table: CSV, Parquet or Arrow."""

from __future__ import annotations

import argparse
import csv
import os
from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import partial
from itertools import chain
from typing import Any, Callable

import numpy as np

from fastcheck.dump.storage.files import places_in
from fastcheck.errors import CompareError, ConfigError, needed_module
from fastcheck.log.reader import newest_log, read_log
from fastcheck.log.step_table import STEP_NUMBERS, StepRow, step_rows
from fastcheck.log.table import COLUMNS, log_table
from fastcheck.utils.private import new_file, replacing, writing
from fastcheck.utils.text.layout import csv_text

from .console import print_json

HELP = "a log as CSV, Parquet or Arrow"

DESCRIPTION = """\
Writes the records of a log, or of a dump, as a table, one row a record, with its place, counts,
statistics and checksum: for pandas, DuckDB, Polars, a spreadsheet. Works in pieces, so that its
size doesn't matter. The format is that of the name: .csv, .parquet, or .arrow."""

EPILOG = """\
examples:
  fastcheck export fastcheck_log records.parquet
  fastcheck export LOG records.csv
  fastcheck export LOG steps.csv --steps
  fastcheck export dump/step3 step3.csv
  duckdb -c "select step, max(l2_norm) from 'records.parquet' where module = 'head' group by step"

.parquet and .arrow need pyarrow: pip install 'fastcheck[tools]'. .csv needs nothing; its checksums
are 16 hexadecimal digits, and a cell is empty where install(record=) left it out. A name that
a spreadsheet would take for a formula (it begins with = + - @) has an apostrophe before it.

exit codes: 0 written; 2 no log or dump, a file that is there already or can't be written, wrong
usage"""

Piece = dict[str, np.ndarray]

_STEP_COLUMNS = tuple(field.name for field in fields(StepRow))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "log", help="log directory, the fastcheck_log/ above it (the newest), or a dump"
    )
    parser.add_argument("file", help="what to write: NAME.csv, .parquet or .arrow")
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
    if suffix not in _WRITERS:
        endings = " or ".join(_WRITERS)
        raise ConfigError(f"the name of the output must end in {endings}, got {options.file}")
    if os.path.exists(options.file) and not options.force:
        raise ConfigError(f"{options.file} exists already; --force replaces it")
    path, places = options.log, [place for _, _, place in sorted(places_in(options.log))]
    if options.steps and places:
        raise ConfigError(f"--steps is for logs, and {path} is a dump")
    if not places:
        path = newest_log(options.log)
        places = [path]
    damaged: list[int] = []
    columns = _STEP_COLUMNS if options.steps else COLUMNS
    # Half a table must not pass for a table.
    with writing(options.file, "the table", CompareError), replacing(options.file) as part:
        os.close(new_file(part, 0o666))
        tables = (log_table(place, damaged.append) for place in places)
        pieces = [_step_columns(path)] if options.steps else chain.from_iterable(tables)
        rows = _WRITERS[suffix](pieces, part, columns)
    size = os.path.getsize(options.file)
    if options.json:
        written = {"log": path, "file": options.file, "rows": rows, "bytes": size}
        written["damaged_records"] = sum(damaged)
        print_json("export", {**written, "columns": columns})
    else:
        print(f"{options.file}: {rows:,} rows of {len(columns)} columns, {size:,} bytes")
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
    return column.tolist()


def _write_batches(
    module: str, function: str, pieces: Iterable[Piece], path: str, names: Sequence[str]
) -> int:
    """Writes with a function of a module of pyarrow, which takes a path and a schema."""
    open_writer, arrow = getattr(_need(module), function), _need("pyarrow")
    types = [arrow.type_for_alias(_TYPES.get(name, "int64")) for name in names]
    schema = arrow.schema(list(zip(names, types)))
    rows = 0
    with open_writer(path, schema) as writer:
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


_WRITERS: dict[str, Callable[[Iterable[Piece], str, Sequence[str]], int]] = {
    ".csv": _write_csv,
    ".parquet": partial(_write_batches, "pyarrow.parquet", "ParquetWriter"),
    ".arrow": partial(_write_batches, "pyarrow.ipc", "new_file"),
}
_TEXTS = ("module", "module_type", "op", "direction", "role", "label", "dtype")
_TYPES = {
    **dict.fromkeys((*_TEXTS, "order", "record", "verdict"), "string"),
    **dict.fromkeys(("min", "max", "sum", "abs_sum", "sum_sq", "mean", "rms", "l2_norm"), "double"),
    **dict.fromkeys(STEP_NUMBERS, "double"),
    **dict.fromkeys(("recomputed", "scaled", "event", "overflow"), "bool"),
    "checksum": "uint64",
}


def _need(name: str) -> Any:
    hint = "pip install 'fastcheck[tools]', or write .csv, which needs nothing"
    return needed_module(name, "this format", hint)
