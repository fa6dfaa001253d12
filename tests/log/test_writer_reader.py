"""The log on disk: what is written comes back, over its limit too, and from several ranks."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import numpy as np
import pytest

from fastcheck.errors import ConfigError, LogError
from fastcheck.log.reader import find_logs, read_log
from fastcheck.log.writer import RecordLog
from fastcheck.record.format import RECORD_DTYPE, Flag, Verdict
from fastcheck.record.site import Site, SiteTable
from fastcheck.utils.text.numbers import parse_bytes
from support.logs import as_bytes, site_table
from support.programs.command_line import strict
from support.records import record_builder as build

SIZE = RECORD_DTYPE.itemsize


# Round trip


def test_round_trip(tmp_path: pathlib.Path) -> None:
    sites = site_table()
    log = RecordLog(tmp_path / "log", 0, None, sites, {"torch": "2.13.0", "lr": float("nan")})
    first, second = build.healthy_records(0, 50), build.healthy_records(1, 60, 50)
    assert log.append(first, 0) and log.append(second, 1)
    bad = build.record(nan_count=2, step=1, seq=110, site=3)
    bad["flags"] |= int(Flag.EVENT) | int(Verdict.ORIGIN) << 8
    culprit = build.event(sites[3], bad, reason="because")
    assert log.append(build.records(bad), 1) and log.append_event(culprit)
    log.sync()
    log.close()

    view = read_log(log.directory)
    assert as_bytes(view.records) == [
        *as_bytes(first),
        *as_bytes(second),
        *as_bytes(build.records(bad)),
    ]
    assert [view.sites[index] for index in range(4)] == [sites[index] for index in range(4)]
    assert view.ranks.tolist() == [0] * 111 and view.dropped_bytes == 0
    [event] = view.events
    assert (event.site, event.verdict, event.reason) == (sites[3], Verdict.ORIGIN, "because")
    assert event.counted and event.step == 1 and int(event.record["nan_count"]) == 2
    assert view.meta[0]["torch"] == "2.13.0" and view.meta[0]["lr"] == "nan"
    assert view.meta[0]["pid"] == os.getpid()


def test_numpy_reads_a_segment_without_fastcheck(tmp_path: pathlib.Path) -> None:
    log = RecordLog(tmp_path, 0, None, site_table())
    records = build.healthy_records(0, 7)
    log.append(records, 0)
    read = np.fromfile(tmp_path / "records-rank0-000000.bin", RECORD_DTYPE)
    assert as_bytes(read) == as_bytes(records)


def test_every_line_is_strict_json(tmp_path: pathlib.Path) -> None:
    log = RecordLog(
        tmp_path, 0, None, site_table(), {"scale": float("inf"), "values": [float("nan")]}
    )
    bad = build.record(nan_count=1, low=float("inf"), high=float("-inf"), numel=1, site=1)
    log.append(build.records(bad), 0)
    log.append_event(build.event(build.site("layers.1"), bad, reason="nan\nwith a line break"))
    for path in tmp_path.iterdir():
        if path.suffix == ".jsonl":
            assert [strict(line) for line in path.read_text().splitlines()]
        elif path.suffix == ".json":
            assert strict(path.read_text())["scale"] == "inf"


def test_a_sites_line_is_there_before_the_record_that_names_it(tmp_path: pathlib.Path) -> None:
    order: list[str] = []
    real = os.write

    def spy(descriptor: int, data: Any) -> int:
        order.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        return real(descriptor, data)

    sites = site_table(1)
    log = RecordLog(tmp_path, 0, None, sites)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", spy)
        log.append(build.healthy_records(0, 2, sites=1), 0)
        sites.intern(build.site("late"))
        log.append(build.healthy_records(1, 2, 2, sites=2), 1)
        log.append(build.healthy_records(2, 2, 4, sites=2), 2)
    segment = "records-rank0-000000.bin"
    assert order == ["sites-rank0.jsonl", segment, "sites-rank0.jsonl", segment, segment]


def test_one_append_is_one_write(tmp_path: pathlib.Path) -> None:
    sizes: list[int] = []
    real = os.write

    def spy(descriptor: int, data: Any) -> int:
        sizes.append(len(data))
        return real(descriptor, data)

    log = RecordLog(tmp_path, 0, None, site_table())
    log.append(build.healthy_records(0, 1), 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", spy)
        log.append(build.healthy_records(1, 300), 1)
    assert sizes == [300 * SIZE]


def test_an_earlier_run_is_never_overwritten(tmp_path: pathlib.Path) -> None:
    places = []
    for run in range(3):
        log = RecordLog(tmp_path / "log", 0, None, site_table())
        log.append(build.healthy_records(run, 5 + run), run)
        log.close()
        places.append(log.directory)
    assert [os.path.basename(place) for place in places] == ["log", "run-2", "run-3"]
    assert [len(read_log(place).records) for place in places] == [5, 6, 7]
    assert set(find_logs(str(tmp_path / "log"))) == set(places)


def test_a_change_of_directory_does_not_move_the_log(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    log = RecordLog("log", 0, 64 * 1024, site_table())
    log.append(build.healthy_records(0, 40), 0)
    monkeypatch.chdir(tmp_path / "elsewhere")
    for step in range(1, 5):
        assert log.append(build.healthy_records(step, 40, step * 40), step)
    assert len(read_log(tmp_path / "log").records) == 200
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_an_event_keeps_the_site_that_is_blamed(tmp_path: pathlib.Path) -> None:
    """A gradient is recorded where it was seen, and blamed on the module that made it."""
    log = RecordLog(tmp_path, 0, None, site_table())
    bad = build.record(nan_count=1, site=2, seq=5)
    log.append(build.records(bad), 0)
    blamed = build.site("layers.9", direction="backward", role="grad_input", label="input[0]")
    log.append_event(build.event(blamed, bad))
    [event] = read_log(tmp_path).events
    assert event.site == blamed and int(event.record["site"]) == 2


# The limit


def test_the_limit_evicts_the_oldest_and_never_an_event(tmp_path: pathlib.Path) -> None:
    limit = 64 * 1024
    log = RecordLog(tmp_path, 0, limit, site_table())
    marked = []
    for step in range(60):
        records = build.healthy_records(step, 30, step * 30)
        if step % 10 == 3:
            records["flags"][5] = int(Flag.EVENT) | int(Flag.NONFINITE)
            records["flags"][6] = int(Verdict.PROPAGATED) << 8
            marked += records["seq"][5:7].tolist()
        assert log.append(records, step)
    view = read_log(tmp_path)
    held = set(view.records["seq"].tolist())
    assert set(marked) <= held
    healthy = sorted(held - set(marked))
    assert healthy == [seq for seq in range(healthy[0], 1800) if seq not in marked]
    assert healthy[0] > 0 and log.dropped_records == 1800 - len(held)
    total = sum(path.stat().st_size for path in tmp_path.iterdir() if path.suffix != ".json")
    assert total <= limit + 30 * SIZE
    assert view.records["seq"].tolist() == sorted(held)


def test_one_step_larger_than_the_limit(tmp_path: pathlib.Path) -> None:
    log = RecordLog(tmp_path, 0, 64 * 1024, site_table())
    assert log.append(build.healthy_records(0, 2000), 0)
    total = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert total < 80 * 1024
    assert read_log(tmp_path).records["seq"][-1] == 1999


def test_without_a_limit_nothing_goes(tmp_path: pathlib.Path) -> None:
    log = RecordLog(tmp_path, 0, None, site_table())
    for step in range(20):
        log.append(build.healthy_records(step, 100, step * 100), step)
    assert len(read_log(tmp_path).records) == 2000 and log.dropped_records == 0


def test_a_crash_between_copying_and_deleting_doubles_nothing(tmp_path: pathlib.Path) -> None:
    log = RecordLog(tmp_path, 0, None, site_table())
    records = build.healthy_records(0, 10)
    records["flags"][4] = int(Flag.EVENT)
    log.append(records, 0)
    (tmp_path / "events-rank0.bin").write_bytes(records[4:5].tobytes())
    assert read_log(tmp_path).records["seq"].tolist() == list(range(10))


@pytest.mark.parametrize(
    ("value", "size"),
    [
        ("1GB", 10**9),
        ("1 gb", 10**9),
        ("2GiB", 2**31),
        ("1.5MB", 1500000),
        (70000, 70000),
        ("70000", 70000),
        (None, None),
    ],
)
def test_parse_bytes(value: Any, size: int | None) -> None:
    assert parse_bytes(value) == size


@pytest.mark.parametrize("value", ["", "1 parsec", "-1GB", "GB", 0, -5, 1000, True, 1.5, "1e9"])
def test_a_bad_limit_says_what_came(value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bytes(value)
    assert repr(value) in str(caught.value) and "expected" in str(caught.value)


# Ranks


def test_two_ranks_in_one_directory(tmp_path: pathlib.Path) -> None:
    """Same directory, same site numbers, other meanings: the reader keeps them apart."""
    for rank in (0, 1):
        sites = SiteTable()
        for index in range(3):
            sites.intern(build.site(f"rank{rank}.layer{index}"))
        log = RecordLog(tmp_path, rank, None, sites)
        records = build.healthy_records(0, 6 + rank, sites=3)
        log.append(records, 0)
        log.append_event(build.event(sites[1], records[1], rank=rank, reason=f"of rank {rank}"))
        assert log.directory == str(tmp_path)
    view = read_log(tmp_path)
    assert view.ranks.tolist() == [0] * 6 + [1] * 7
    for record, rank in zip(view.records, view.ranks):
        assert view.sites[int(record["site"])].module.startswith(f"rank{rank}.")
    assert [(event.rank, event.site.module) for event in view.events] == [
        (0, "rank0.layer1"),
        (1, "rank1.layer1"),
    ]
    assert sorted(view.meta) == [0, 1]
    only = read_log(tmp_path, rank=1)
    assert len(only.records) == 7 and only.sites[1].module == "rank1.layer1"


def test_one_rank_of_several_keeps_its_own_numbers(tmp_path: pathlib.Path) -> None:
    for rank in (0, 1):
        log = RecordLog(tmp_path, rank, None, site_table(3 + rank))
        log.append(build.healthy_records(0, 5, sites=3 + rank), 0)
    view = read_log(tmp_path, rank=1)
    assert set(view.ranks.tolist()) == {1}
    assert view.records["site"].tolist() == [0, 1, 2, 3, 0]


def test_an_event_written_again_replaces_the_earlier_one(tmp_path: pathlib.Path) -> None:
    log = RecordLog(tmp_path, 0, None, site_table())
    bad = build.record(neginf_count=1, site=1, seq=5)
    log.append(build.records(bad), 0)
    log.append_event(build.event(build.site("layers.1"), bad, Verdict.UNRESOLVED, "a mask?", False))
    log.append_event(build.event(build.site("layers.1"), bad, Verdict.ORIGIN, "a NaN followed"))
    [event] = read_log(tmp_path).events
    assert (event.verdict, event.reason) == (Verdict.ORIGIN, "a NaN followed")


# What is not a log


def test_a_missing_path(tmp_path: pathlib.Path) -> None:
    with pytest.raises(LogError, match="which is not there"):
        read_log(tmp_path / "nothing")


def test_a_directory_without_a_log_points_at_one_below(tmp_path: pathlib.Path) -> None:
    with pytest.raises(LogError, match="holds no log"):
        read_log(tmp_path)
    RecordLog(tmp_path / "run", 0, None, site_table())
    with pytest.raises(LogError, match=r"did you mean .*run"):
        read_log(tmp_path)


def test_a_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"hello")
    with pytest.raises(LogError, match="which is no directory"):
        read_log(path)


def test_records_of_a_later_version_are_refused(tmp_path: pathlib.Path) -> None:
    records = build.healthy_records(0, 4)
    records["version"][2] = 9
    (tmp_path / "records-rank0-000000.bin").write_bytes(records.tobytes())
    with pytest.raises(LogError, match="record 2 has version 9"):
        read_log(tmp_path)


def test_sites_of_a_later_version_keep_their_names(tmp_path: pathlib.Path) -> None:
    log = RecordLog(tmp_path, 0, None, site_table(1))
    log.append(build.healthy_records(0, 1), 0)
    path = tmp_path / "sites-rank0.jsonl"
    line = json.loads(path.read_text())
    path.write_text(json.dumps({**line, "new_field": 1}) + "\n")
    assert isinstance(read_log(tmp_path).sites[0], Site)
    assert read_log(tmp_path).sites[0].module == "layers.0"
