"""Engines that answer the questions: DuckDB within the process, or Spark. The error of an engine
often does not name the damaged file of a run: ``naming_damage()`` does.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, Optional, Union

from fastcheck.errors import ConfigError, FastcheckError, LogError, first_line
from fastcheck.utils.private import without_credentials
from fastcheck.utils.reading import why_missing

from .manifest import counted_files, runs_in
from .questions import DIALECTS
from .schema import KEYS, RECORD_COLUMNS, TABLES, need
from .store import Folder

_SMALL = {"all_sites": "sites", "all_ranks": "ranks"}
# So many rows of quartiles fit into the processor's caches. But the files of a node hold all steps
# of their span, and most of them is read again for each part of the steps.
_CHUNK_ROWS = 10_000_000
_CHUNK_ROWS_OF_NODES = 100_000_000

_MEMORY = "4GB"


def run_of(folder: Folder, name: Optional[str]) -> str:
    """The run of this name, or the only run.

    Raises:
        ConfigError: there is none, or there are several and ``name`` is None.
    """
    runs = runs_in(folder)
    if name in runs:
        return str(name)
    if name is None and len(runs) == 1:
        return runs[0]
    place = without_credentials(folder.place)
    if not runs:
        raise ConfigError(
            "there is no run here",
            expected="a folder that fastcheck collect has written",
            got=f"{place}, with no folder named run=...",
            hint=why_missing(place)
            if folder.is_local and not os.path.exists(folder.place)
            else "fastcheck collect LOG --out FOLDER writes one",
        )
    found = "several runs are" if name is None else f"there is no run {name}"
    raise ConfigError(
        f"{found} in {place}",
        expected="the name of one run",
        got=", ".join(runs[:10]) if name is None else name,
        hint=f"give --run with one of: {', '.join(runs[:10])}",
    )


class DuckEngine:
    """DuckDB, in memory; what exceeds 4 GB goes to a temporary folder."""

    dialect = DIALECTS["duckdb"]
    #: The most rows whose quartiles it takes at once; None: it divides the work itself.
    chunk_rows: Optional[int] = _CHUNK_ROWS_OF_NODES

    def __init__(self, folder: Folder, run: str, threads: Optional[int] = None) -> None:
        duckdb = need("duckdb")
        files_of = files_of_run(folder, run)
        if not any("/node=" in path for path in files_of["records"]):
            self.chunk_rows = _CHUNK_ROWS
        self._scratch = tempfile.TemporaryDirectory(prefix="fastcheck-fleet-")
        self._connection = duckdb.connect()
        settings = {
            "memory_limit": _MEMORY,
            "threads": threads or os.cpu_count() or 1,
            "temp_directory": self._scratch.name,
            "preserve_insertion_order": False,
            "enable_progress_bar": False,
            "parquet_metadata_cache": True,
        }
        try:
            for name, value in settings.items():
                self._connection.execute(f"SET {name} = {_quoted(value)}")
            for name, files in files_of.items():
                if folder.is_local:
                    listed = ", ".join(_quoted(folder.url(path)) for path in files)
                    self._connection.execute(
                        f"CREATE VIEW {name} AS SELECT * FROM "
                        f"read_parquet([{listed}], hive_partitioning = false)"
                    )
                else:
                    self._connection.register(name, folder.dataset(files))
        except BaseException:
            self.close()
            raise

    def make(self, name: str, select: str, is_more: bool = False) -> None:
        """Makes a table; with ``is_more`` adds to it."""
        start = f"INSERT INTO {name} " if is_more else f"CREATE OR REPLACE TABLE {name} AS "
        self._connection.execute(start + select)

    def ask(self, select: str) -> list[dict[str, Any]]:
        """The rows of an answer, by column."""
        result = self._connection.execute(select)
        names = [column[0] for column in result.description]
        return [dict(zip(names, row)) for row in result.fetchall()]

    def close(self) -> None:
        """Releases the engine's resources."""
        self._connection.close()
        self._scratch.cleanup()


def _quoted(value: object) -> str:
    return "'" + str(value).replace("'", "''") + "'"


class SparkEngine:
    """PySpark: the session that is there, or a local session."""

    dialect = DIALECTS["spark"]
    chunk_rows: Optional[int] = None

    def __init__(self, folder: Folder, run: str) -> None:
        sql = need("pyspark.sql", "spark")
        files_of = files_of_run(folder, run)
        self._is_own = sql.SparkSession.getActiveSession() is None
        self._session = (
            sql.SparkSession.builder.appName("fastcheck fleet")
            .config("spark.ui.enabled", "false")
            .config("spark.sql.shuffle.partitions", str(4 * (os.cpu_count() or 1)))
            .getOrCreate()
        )
        self._made: list[str] = []
        for name, files in files_of.items():
            paths = [folder.url(path) for path in files]
            self._session.read.parquet(*paths).createOrReplaceTempView(name)
            self._made.append(name)

    def make(self, name: str, select: str, is_more: bool = False) -> None:
        assert not is_more, "one statement makes each table"
        self._session.sql(select).cache().createOrReplaceTempView(name)
        self._made.append(name)

    def ask(self, select: str) -> list[dict[str, Any]]:
        return [row.asDict() for row in self._session.sql(select).collect()]

    def close(self) -> None:
        for name in self._made:
            self._session.catalog.dropTempView(name)
        if self._is_own:
            self._session.stop()


ENGINES = ("duckdb", "spark")
#: Makes tables and answers questions over the files of one run.
Engine = Union[DuckEngine, SparkEngine]


def open_engine(kind: str, folder: Folder, run: str) -> Engine:
    """The engine of this name over a run.

    Raises:
        ConfigError: it is not installed.
        LogError: the run has no records.
    """
    return SparkEngine(folder, run) if kind == "spark" else DuckEngine(folder, run)


def files_of_run(folder: Folder, run: str) -> dict[str, list[str]]:
    """The paths of the files that the questions read, by the table that they make.

    Raises:
        LogError: a table has none.
    """
    start = f"run={run}"
    paths = {"records": [f"{start}/{path}" for path in counted_files(folder, run)]}
    for name, kind in _SMALL.items():
        files = sorted(folder.files(f"{start}/{kind}"))
        paths[name] = [path for path in files if path.endswith(".parquet")]
    for name, files in paths.items():
        if not files:
            place, missing = folder.url(start), name.removeprefix("all_")
            raise LogError(
                "this run is not complete",
                expected="files of records, sites, ranks and what else fastcheck collect writes",
                got=f"{place}, which has no files of {missing}",
                hint="collect the logs of its nodes again, into another folder",
            )
    return paths


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
