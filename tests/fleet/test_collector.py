"""A log becomes rows, each record exactly once, wherever the collector was killed."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastcheck.errors import ConfigError, LogError
from fastcheck.fleet.collector import Collector, Written, attempts, follow
from fastcheck.fleet.manifest import counted_files
from fastcheck.fleet.schema import RECORD_COLUMNS, site_id
from fastcheck.fleet.store import Folder
from fastcheck.log.reader import read_log
from fastcheck.log.writer import RecordLog
from fastcheck.record.format import RECORD_BYTES, RECORD_DTYPE, Flag
from support.fragile_folder import Fragile, is_killed
from support.logs import site_table
from support.records import record_builder as build

parquet = pytest.importorskip("pyarrow.parquet")

Row = tuple[int, ...]


def step_records(step: int, sites: int = 4) -> np.ndarray:
    records = build.healthy_records(step, sites, step * sites, sites)
    records["sum"], records["abs_sum"], records["sum_sq"] = 5.0, 10.0, 40.0
    records["min"], records["max"] = -2.0, 4.0
    return records


class Writer:
    """The log of some ranks, written step by step."""

    def __init__(self, place: Path, ranks: int = 2, limit: int | None = None) -> None:
        self.place = place
        self.logs = [
            RecordLog(place, rank, limit, site_table(), {"every": 1}) for rank in range(ranks)
        ]

    def steps(self, first: int, end: int) -> None:
        for step in range(first, end):
            for log in self.logs:
                assert log.append(step_records(step), step)


def rows_of(out: Path, run: str = "r") -> list[Row]:
    """Rank, step, site and checksum of every row that counts."""
    folder = Folder(out)
    found: list[Row] = []
    for path in counted_files(folder, run):
        table = parquet.read_table(folder.open(f"run={run}/{path}"))
        rows = table.select(["rank", "step", "site", "min", "numel"]).to_pydict()
        keys = list(zip(rows["step"], rows["site"], rows["rank"]))
        assert keys == sorted(keys)
        found += zip(rows["rank"], rows["step"], rows["site"], rows["numel"])
    return sorted(found)


def expected(log: Path) -> list[Row]:
    view = read_log(log)
    return sorted(
        (int(rank), int(one["step"]), site_id(view.sites[int(one["site"])]), int(one["numel"]))
        for rank, one in zip(view.ranks, view.records)
    )


def collector(log: Path, out: Path, **options: Any) -> Collector:
    return Collector(str(log), Folder(out), "r", "0041", **options)


def test_the_files_and_their_rows(tmp_path: Path) -> None:
    Writer(tmp_path / "log").steps(95, 105)
    done = collector(tmp_path / "log", tmp_path / "out").take()
    names = sorted(path for path in Folder(tmp_path / "out").files() if "step=" in path)
    assert names == [
        "run=r/step=000000-000099/node=0041.parquet",
        "run=r/step=000100-000199/node=0041.parquet",
    ]
    assert (done.rows, done.files, done.lost_segments, done.damaged) == (2 * 10 * 4, 2, 0, 0)
    assert rows_of(tmp_path / "out") == expected(tmp_path / "log")
    table = parquet.read_table(tmp_path / "out" / names[0], partitioning=None)
    assert table.schema.names == list(RECORD_COLUMNS)
    row = table.slice(0, 1).to_pylist()[0]
    values = {name: row[name] for name in ("min", "max", "mean", "mean_abs", "rms", "numel")}
    assert values == {"min": -2, "max": 4, "mean": 0.5, "mean_abs": 1, "rms": 2, "numel": 10}
    assert row["checksum"] is None  # of an activation


def test_stored_tensors_keep_their_checksum(tmp_path: Path) -> None:
    sites = site_table(0)
    sites.intern(build.site(direction="optimizer", role="param", label="weight"))
    records = build.healthy_records(3, 1, 7, 1)
    records["checksum"] = 0xF000_0000_0000_0001
    RecordLog(tmp_path / "log", 0, None, sites).append(records, 3)
    collector(tmp_path / "log", tmp_path / "out").take()
    table = parquet.read_table(tmp_path / "out/run=r/step=000000-000099/node=0041.parquet")
    assert [value % (1 << 64) for value in table["checksum"].to_pylist()] == [0xF000_0000_0000_0001]


def test_it_goes_on_where_it_stopped(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "log")
    for end in (3, 130, 131, 260):
        writer.steps({3: 0, 130: 3, 131: 130, 260: 131}[end], end)
        collector(tmp_path / "log", tmp_path / "out").take()
        assert rows_of(tmp_path / "out") == expected(tmp_path / "log")
    assert collector(tmp_path / "log", tmp_path / "out").take() == Written()
    writer.steps(260, 262)
    again = collector(tmp_path / "log", tmp_path / "out")
    assert again._manifest.rows < len(expected(tmp_path / "log"))
    again.take()
    assert again._manifest.rows == len(expected(tmp_path / "log"))


def test_a_half_written_record_waits(tmp_path: Path) -> None:
    Writer(tmp_path / "log", 1).steps(0, 5)
    segment = tmp_path / "log" / "records-rank0-000000.bin"
    whole = segment.read_bytes()
    segment.write_bytes(whole[: -RECORD_BYTES + 50])
    one = collector(tmp_path / "log", tmp_path / "out")
    assert one.take().rows == 19
    segment.write_bytes(whole)
    assert one.take().rows == 1
    assert rows_of(tmp_path / "out") == expected(tmp_path / "log")


def test_while_it_is_followed_only_spans_that_all_have_left(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "log")
    one = collector(tmp_path / "log", tmp_path / "out", steps_per_file=10)
    writer.steps(0, 10)
    assert one.take(is_final=False).rows == 0
    writer.logs[0].append(step_records(10), 10)
    assert one.take(is_final=False).rows == 0  # rank 1 may still write of step 9
    writer.logs[1].append(step_records(10), 10)
    assert one.take(is_final=False).rows == 2 * 10 * 4
    assert one.take().rows == 2 * 4


@pytest.mark.parametrize("moment", ["before", "amid", "after"])
def test_killed_at_any_write(tmp_path: Path, moment: str) -> None:
    """Of two spans that are begun and one that has a file already."""
    log = tmp_path / "log"
    writer = Writer(log)
    writer.steps(0, 7)

    def all_of(folder: Folder) -> None:
        Collector(str(log), folder, "r", "n", steps_per_file=5).take()

    all_of(Folder(tmp_path / "before"))
    writer.steps(7, 12)
    number = 0
    for number in range(1, 100):
        out = tmp_path / f"out{number}"
        shutil.copytree(tmp_path / "before", out)
        if not is_killed(functools.partial(all_of, Fragile(out)), moment, number):
            break
        again = Collector(str(tmp_path / "log"), Folder(out), "r", "n", steps_per_file=5)
        seen = rows_of(out)
        assert len(set(seen)) == len(seen)
        again.take()
        assert rows_of(out) == expected(tmp_path / "log")
        on_disk = [path for path in Folder(out).files("run=r") if "step=" in path]
        assert sorted(path[len("run=r/") :] for path in on_disk) == counted_files(Folder(out), "r")
    assert number > 6


class TestALogWithALimit:
    """Eight segments of two records."""

    LIMIT = 8 * 2 * RECORD_BYTES

    def write(self, log: RecordLog, first: int, end: int, events: tuple[int, ...] = ()) -> None:
        for step in range(first, end):
            records = step_records(step, 1)
            if step in events:
                records["flags"] |= int(Flag.EVENT)
            assert log.append(records, step)

    def steps(self, out: Path) -> list[int]:
        return [step for _, step, _, _ in rows_of(out)]

    def test_what_was_deleted_in_time_is_kept(self, tmp_path: Path) -> None:
        log = RecordLog(tmp_path / "log", 0, self.LIMIT, site_table())
        for first in range(0, 60, 6):
            self.write(log, first, first + 6, (7, 8, 20))
            done = collector(tmp_path / "log", tmp_path / "out").take()
            assert done.lost_segments == 0
        assert len(list((tmp_path / "log").glob("records-*"))) < 12
        assert (tmp_path / "log" / "events-rank0.bin").stat().st_size == 3 * RECORD_BYTES
        assert self.steps(tmp_path / "out") == list(range(60))

    @pytest.mark.parametrize("before", [0, 3, 4, 7, 8, 9])
    def test_of_what_was_deleted_too_early_the_events_are_kept(
        self, tmp_path: Path, before: int
    ) -> None:
        events = (2, 3, 6, 8, 9, 11, 25, 44)
        log = RecordLog(tmp_path / "log", 0, self.LIMIT, site_table())
        self.write(log, 0, before, events)
        collector(tmp_path / "log", tmp_path / "out").take()
        self.write(log, before, 40, events)
        done = collector(tmp_path / "log", tmp_path / "out").take()
        segment = min((tmp_path / "log").glob("records-*"))
        oldest = int(np.fromfile(segment, RECORD_DTYPE)["step"][0])
        assert done.lost_segments > 0
        kept = {*range(before), *range(oldest, 40), *(step for step in events if step < 40)}
        assert self.steps(tmp_path / "out") == sorted(kept)
        self.write(log, 40, 80, events)
        collector(tmp_path / "log", tmp_path / "out").take()
        steps = self.steps(tmp_path / "out")
        assert len(steps) == len(set(steps)) and 44 in steps


def test_files_of_another_log_are_not_added_to(tmp_path: Path) -> None:
    Writer(tmp_path / "log").steps(0, 2)
    collector(tmp_path / "log", tmp_path / "out").take()
    meta = tmp_path / "log" / "meta-rank0.json"
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "pid": 1}))
    with pytest.raises(ConfigError, match="the files of another log"):
        collector(tmp_path / "log", tmp_path / "out").take()
    with pytest.raises(ConfigError, match="another number of steps"):
        collector(tmp_path / "log", tmp_path / "out", steps_per_file=10)


def test_later_runs_in_the_same_place(tmp_path: Path) -> None:
    Writer(tmp_path / "log").steps(0, 1)
    Writer(tmp_path / "log").steps(0, 1)
    assert attempts(str(tmp_path / "log")) == [str(tmp_path / "log"), str(tmp_path / "log/run-2")]


def test_damaged_records_are_left_out(tmp_path: Path) -> None:
    Writer(tmp_path / "log", 1).steps(0, 3)
    segment = tmp_path / "log" / "records-rank0-000000.bin"
    data = bytearray(segment.read_bytes())
    for number, at in ((1, 142), (4, 127)):  # its dtype; the step, which becomes negative
        data[number * RECORD_BYTES + at] = 200
    segment.write_bytes(data)
    done = collector(tmp_path / "log", tmp_path / "out").take()
    assert (done.rows, done.damaged) == (10, 2)


def test_the_small_tables(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "log", 1)
    writer.steps(0, 1)
    where = build.site("layers.1")
    record = build.record(step=0, seq=1, site=1, nan_count=1)
    writer.logs[0].append_event(build.event(where, record))
    writer.logs[0].add_meta(
        placement={
            "host": "a17",
            "device": "NVIDIA H100",
            "serial": "GPU-1",
            "world_size": 8,
            "coordinates": {"dp": 1, "tp": 0},
            "replica_group": "tp=0",
        }
    )
    collector(tmp_path / "log", tmp_path / "out").take()
    tables = {
        kind: parquet.read_table(tmp_path / f"out/run=r/{kind}/node=0041.parquet").to_pylist()
        for kind in ("sites", "ranks", "events", "meta")
    }
    assert [row["name"] for row in tables["sites"]] == [str(site) for site in site_table()]
    assert [row["site"] for row in tables["sites"]] == [site_id(site) for site in site_table()]
    (rank,) = tables["ranks"]
    assert (rank["host"], rank["device"], rank["serial"]) == ("a17", "NVIDIA H100", "GPU-1")
    assert (rank["dp"], rank["tp"], rank["pp"], rank["replica_group"]) == (1, 0, None, "tp=0")
    (event,) = tables["events"]
    assert (event["verdict"], event["site"]) == ("origin", site_id(where))
    assert json.loads(tables["meta"][0]["text"])["every"] == 1


def test_following_ends_with_all_that_was_written(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "log")
    one = collector(tmp_path / "log", tmp_path / "out", steps_per_file=10)
    pauses: list[float] = []
    written: list[Written] = []
    seconds = 0.0

    def sleep(interval: float) -> None:
        nonlocal seconds
        seconds += interval
        writer.steps(len(pauses), len(pauses) + 1)
        pauses.append(interval)

    follow(
        lambda: [one],
        interval_seconds=5,
        is_over=lambda: len(pauses) == 33,
        on_written=written.append,
        sleep=sleep,
        clock=lambda: seconds,
    )
    assert [done.rows // 8 for done in written] == [10, 10, 10, 3]
    assert rows_of(tmp_path / "out") == expected(tmp_path / "log")


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    Writer(tmp_path / "log").steps(0, 1)
    (tmp_path / "out").write_text("a file")
    with pytest.raises(LogError, match="a fleet's files can't be"):
        collector(tmp_path / "log", tmp_path / "out").take()


def test_a_url(tmp_path: Path) -> None:
    Writer(tmp_path / "log").steps(0, 3)
    folder = Folder(f"file://{tmp_path}/out")
    Collector(str(tmp_path / "log"), folder, "r", "0041").take()
    assert rows_of(tmp_path / "out") == expected(tmp_path / "log")
    assert folder.url("x") == f"{tmp_path}/out/x"
