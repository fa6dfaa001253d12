"""Names the damaged file of a run, because the error of an engine often does not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from fastcheck.errors import ConfigError, FastcheckError, LogError, first_line

from .engines import files_of_run
from .schema import KEYS, RECORD_COLUMNS, TABLES, need
from .store import Folder

_COLUMNS = {"records": RECORD_COLUMNS, "all_sites": TABLES["sites"], "all_ranks": TABLES["ranks"]}


@contextlib.contextmanager
def naming_damage(folder: Folder, run: str) -> Iterator[None]:
    """A context: an exception that a damaged file caused, in an engine or in the judgement of its
    answers, becomes a LogError that names the file.
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
