"""Merged files hold the rows of the small ones, each once, wherever the merge was killed."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fastcheck.cli.main import main
from fastcheck.fleet.collector import Collector
from fastcheck.fleet.compaction import merge_run
from fastcheck.fleet.manifest import counted_files
from fastcheck.fleet.schema import RECORD_COLUMNS
from fastcheck.fleet.store import Folder
from fastcheck.log.writer import RecordLog
from support.fragile_folder import Fragile, is_killed
from support.logs import site_table
from support.records import record_builder as build

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
STEPS = 12


def append(log: RecordLog, first: int, end: int) -> None:
    for step in range(first, end):
        assert log.append(build.healthy_records(step, 4, step * 4), step)


@pytest.fixture
def nodes(tmp_path: Path) -> list[Collector]:
    """Two nodes of a rank each; the first has two files of the same span."""
    made = []
    for rank in range(2):
        place = tmp_path / f"log{rank}"
        log = RecordLog(place, rank, None, site_table())
        append(log, 0, STEPS // 2)
        one = Collector(str(place), Folder(tmp_path / "out"), "r", f"n{rank}", steps_per_file=8)
        if rank == 0:
            one.take()
        append(log, STEPS // 2, STEPS)
        one.take()
        made.append(one)
    return made


def table_of(place: Path) -> Any:
    folder = Folder(place)
    tables = [
        parquet.read_table(folder.open(f"run=r/{path}")) for path in counted_files(folder, "r")
    ]
    rows = pyarrow.concat_tables(tables)
    return rows.sort_by([(name, "ascending") for name in ("step", "site", "rank", "call")])


def present(place: Path) -> list[str]:
    files = (path[len("run=r/") :] for path in Folder(place).files("run=r"))
    return sorted(path for path in files if path.startswith("step="))


def test_the_rows_are_the_same_and_sorted(tmp_path: Path, nodes: list[Collector]) -> None:
    out = tmp_path / "out"
    before = table_of(out)
    assert before.num_rows == 2 * STEPS * 4 and len(present(out)) == 5
    done = merge_run(Folder(out), "r")
    assert (done.spans, done.rows, done.files_before, done.files_after) == (2, 96, 5, 2)
    assert counted_files(Folder(out), "r") == present(out) and len(present(out)) == 2
    assert table_of(out).equals(before)
    for path in present(out):
        table = parquet.read_table(out / "run=r" / path, partitioning=None)
        keys = list(zip(*(table[name].to_pylist() for name in ("step", "site", "rank", "call"))))
        assert keys == sorted(keys)
        assert table.schema.names == list(RECORD_COLUMNS)
    assert merge_run(Folder(out), "r").spans == 0  # nothing is left to merge


def test_what_comes_later_is_merged_too(tmp_path: Path, nodes: list[Collector]) -> None:
    out = tmp_path / "out"
    merge_run(Folder(out), "r")
    log = RecordLog(tmp_path / "log2", 2, None, site_table())
    append(log, 0, STEPS)
    late = Collector(str(tmp_path / "log2"), Folder(out), "r", "n2", steps_per_file=8)
    late.take()
    again = Collector(str(tmp_path / "log0"), Folder(out), "r", "n0", steps_per_file=8)
    assert again.take().rows == 0  # its files are merged, and none comes again
    before = table_of(out)
    assert before.num_rows == 3 * STEPS * 4
    merge_run(Folder(out), "r")
    assert table_of(out).equals(before) and len(present(out)) == 2


def test_large_spans_have_several_files(tmp_path: Path, nodes: list[Collector]) -> None:
    out = tmp_path / "out"
    before = table_of(out)
    merge_run(Folder(out), "r", rows_per_file=24)
    assert len(present(out)) == 5  # 3 of 8 rows by 3 steps, at most; and 2
    assert table_of(out).equals(before)


@pytest.mark.parametrize("moment", ["before", "amid", "after"])
def test_killed_at_any_change(tmp_path: Path, nodes: list[Collector], moment: str) -> None:
    expected = table_of(tmp_path / "out")
    number = 0
    for number in range(1, 100):
        out = tmp_path / f"out{number}"
        shutil.copytree(tmp_path / "out", out)
        if not is_killed(functools.partial(merge_run, Fragile(out), "r"), moment, number):
            break
        assert table_of(out).equals(expected)
        merge_run(Folder(out), "r")
        assert table_of(out).equals(expected)
        assert present(out) == counted_files(Folder(out), "r") and len(present(out)) == 2
    assert number > 8


def test_the_command(
    tmp_path: Path, nodes: list[Collector], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compact", str(tmp_path / "out"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["files_before"], found["files_after"]) == (5, 2)
    assert main(["compact", str(tmp_path / "out"), "--rows-per-file", "0"]) == 2
