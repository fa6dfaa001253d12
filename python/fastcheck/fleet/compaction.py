"""Merges the small files of a span of steps, so that questions read few large files; names the
damaged file of a run, since an engine says what it could not do, and often not with what.

The merged files are written first, then a note that makes them count in place of those that they
were made of, which are then deleted. Killed at any point, each row counts exactly once.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fastcheck.errors import ConfigError, FastcheckError, LogError, first_line

from .engines import files_of_run
from .manifest import counted_files, read_merges, record_files, write_merge
from .schema import KEYS, RECORD_COLUMNS, TABLES, need, table_bytes
from .store import Folder

#: Of one merged file, and of what is sorted at once: about 1.5 GB.
_ROWS = 1 << 23
_MERGED = "merged."

_COLUMNS = {"records": RECORD_COLUMNS, "all_sites": TABLES["sites"], "all_ranks": TABLES["ranks"]}


@contextlib.contextmanager
def naming_damage(folder: Folder, run: str) -> Iterator[None]:
    """Raises a LogError with the name of a damaged file in place of what the file made an engine,
    or the judgement of its answers, raise.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # a damaged file may raise anything
        damage = _first_damage(folder, run)
        if isinstance(error, FastcheckError) and not damage:
            raise
        raise LogError(
            "the files of this run can't be read",
            expected="files that fastcheck collect has written",
            got=damage or f"{folder.url(f'run={run}')}: {first_line(error)}",
            hint="delete a damaged file, and collect its node again",
        ) from error


def _first_damage(folder: Folder, run: str) -> str:
    for table, files in files_of_run(folder, run).items():
        for path in files:
            why = _damage(folder, path, _COLUMNS[table])
            if why:
                return f"{folder.url(path)}: {why}"
    return ""


def _damage(folder: Folder, path: str, columns: Mapping[str, str]) -> str:
    """The reason why a file is no such table; "": it is such a table."""
    parquet, types = need("pyarrow.parquet"), need("pyarrow.types")
    is_kind = {
        "int": types.is_integer,
        "float": types.is_floating,
        "string": lambda dtype: types.is_string(dtype) or types.is_large_string(dtype),
        "bool": types.is_boolean,
    }
    try:
        file: Any = parquet.ParquetFile(folder.open(path))
        schema = {field.name: field.type for field in file.schema_arrow}
        for name, kind in columns.items():
            if name not in schema:
                return f"it has no column {name}"
            if not is_kind[kind.rstrip("0123456789")](schema[name]):
                return f"its column {name} holds {schema[name]}"
        for number in range(file.num_row_groups):
            rows = file.read_row_group(number)
            for name in KEYS.keys() & columns.keys():
                if rows[name].null_count:
                    return f"its column {name} has rows without a number"
    except Exception as error:  # a damaged file may raise anything
        return first_line(error)
    return ""


@dataclass(frozen=True)
class Merged:
    """The result of a merge: spans of steps, and the files and bytes before and after."""

    spans: int = 0
    rows: int = 0
    files_before: int = 0
    files_after: int = 0
    bytes_before: int = 0
    bytes_after: int = 0


def merge_run(folder: Folder, run: str, *, rows_per_file: int = _ROWS) -> Merged:
    """Merges the files of each span of steps into files of at most about ``rows_per_file`` rows.

    A span with one file is left as it is. Collectors may run meanwhile, but no second merge.

    Raises:
        LogError: the folder can't be read or written; nothing that counted is lost.
        Exception: whatever a damaged file makes pyarrow raise; likewise.
    """
    start = f"run={run}/"
    _finish(folder, run)
    sizes = {path[len(start) :]: size for path, size in folder.files(start[:-1]).items()}
    spans: dict[str, list[str]] = defaultdict(list)
    for path in counted_files(folder, run):
        spans[path.partition("/")[0]].append(path)
    notes = read_merges(folder, run)
    totals = [0] * 6
    for span, sources in sorted(spans.items()):
        batch = notes.get(span, {}).get("batch", 0) + 1
        rows = _row_count(folder, start, sources)
        if len(sources) <= max(1, math.ceil(rows / rows_per_file)):
            continue
        written: dict[str, int] = {}
        for number, table in enumerate(_sorted(folder, start, sources, rows, rows_per_file)):
            data = table_bytes(table)
            name = f"{span}/{_MERGED}{batch:06d}{number:04d}.parquet"
            folder.write(start + name, data)
            written[name] = len(data)
        if _row_count(folder, start, list(written)) != rows:
            raise ValueError(f"the merged files of {span} have another number of rows: not used")
        write_merge(folder, run, span, batch, list(written), sources)
        for source in sources:
            folder.delete(start + source)
        before = sum(sizes.get(source, 0) for source in sources)
        here = (1, rows, len(sources), len(written), before, sum(written.values()))
        totals = [total + more for total, more in zip(totals, here)]
    return Merged(*totals)


def _finish(folder: Folder, run: str) -> None:
    """Deletes what a merge that was killed has left: files that were replaced, or never counted."""
    start = f"run={run}/"
    notes = read_merges(folder, run)
    replaced = {path for note in notes.values() for path in note["replaced"]}
    counted = {path for note in notes.values() for path in note["files"]}
    for full in folder.files(start[:-1]):
        path = full[len(start) :]
        is_merged = path.startswith("step=") and path.partition("/")[2].startswith(_MERGED)
        is_replaced = path in replaced and path in record_files([path])
        if is_replaced or (is_merged and path not in counted):
            folder.delete(full)


def _row_count(folder: Folder, start: str, paths: list[str]) -> int:
    parquet = need("pyarrow.parquet")
    return sum(parquet.read_metadata(folder.open(start + path)).num_rows for path in paths)


def _sorted(folder: Folder, start: str, sources: list[str], rows: int, most: int) -> Iterator[Any]:
    """The rows of all sources as tables, in the order of the collector's files."""
    compute = need("pyarrow.compute")
    dataset = folder.dataset([start + source for source in sources])
    steps = compute.unique(dataset.to_table(columns=["step"])["step"]).sort()
    at_once = max(1, len(steps) * most // max(rows, 1))
    order = [(name, "ascending") for name in ("step", "site", "rank", "call")]
    for first in range(0, len(steps), at_once):
        some = steps[first : first + at_once]
        step = compute.field("step")
        table = dataset.to_table(filter=(step >= some[0]) & (step <= some[-1]))
        table = table.select(list(RECORD_COLUMNS)).sort_by(order)
        if table.num_rows:
            yield table
