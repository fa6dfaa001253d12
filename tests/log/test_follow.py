"""A log that grows is read by position: every record and line once, whole ones only."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastcheck.errors import LogError
from fastcheck.log import follow, record_file, step_table
from fastcheck.log.follow import Growth, LogFollower
from fastcheck.log.reader import read_log
from fastcheck.log.step_table import StepStream
from fastcheck.log.writer import RecordLog
from fastcheck.record.format import RECORD_BYTES, RECORD_DTYPE
from support.logs import as_bytes, site_table
from support.programs import synthetic_logs
from support.records import record_builder as build


def taken(grown: list[Growth]) -> list[bytes]:
    return [one for growth in grown for records in growth.records for one in as_bytes(records)]


def test_what_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    follower = LogFollower(str(tmp_path / "fastcheck_log"))
    assert follower.poll() == [] and follower.directory is None
    log = RecordLog(tmp_path / "fastcheck_log" / "now", 0, None, site_table(), {"every": 3})
    [growth] = follower.poll()
    assert follower.directory == log.directory
    assert growth.meta is not None and growth.meta["every"] == 3 and "ended" not in growth.meta
    assert growth.records == [] and growth.total_bytes == 0


def test_each_record_and_line_comes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []

    def read(path: str, start: int, end: int) -> np.ndarray:
        found = plain(path, start, end)
        reads.append(len(found))
        return found

    plain = record_file.read_span
    monkeypatch.setattr(record_file, "read_span", read)
    sites = site_table(3)
    log = RecordLog(tmp_path, 0, None, sites)
    follower = LogFollower(str(tmp_path))
    seen: list[bytes] = []
    named, events, watched = {}, [], []
    for step in range(5):
        records = build.healthy_records(step, 10, 10 * step, len(sites))
        log.append(records, step)
        log.append_event(build.event(sites[0], records[0]))
        log.append_line("watch", {"step": step, "text": "the loss"})
        [growth] = follower.poll()
        assert taken([growth]) == as_bytes(records)
        seen += taken([growth])
        named.update(growth.sites)
        events += growth.events
        watched += growth.watch
        sites.intern(build.site(f"new.{step}"))
    assert taken(follower.poll()) == [] and sum(reads) == 50
    assert seen == as_bytes(read_log(tmp_path).records)
    assert named == {number: sites[number] for number in range(7)}
    assert [line["step"] for line in events] == [line["step"] for line in watched] == [*range(5)]


def test_the_limit_moves_on_to_new_segments(tmp_path: Path) -> None:
    log = RecordLog(tmp_path, 0, 64 * 1024, site_table())
    follower = LogFollower(str(tmp_path))
    written: list[bytes] = []
    seen: list[bytes] = []
    for step in range(60):
        records = build.healthy_records(step, 17, 17 * step)
        log.append(records, step)
        written += as_bytes(records)
        grown = follower.poll()
        seen += taken(grown)
        assert grown[0].missed_bytes == 0
        assert grown[0].total_bytes <= 64 * 1024
    assert log.dropped_records and seen == written
    # A pause, in which all that was known is removed.
    for step in range(60, 200):
        log.append(build.healthy_records(step, 17, 17 * step), step)
    records = build.healthy_records(200, 5, 17 * 200)
    log.append(records, 200)
    [growth] = follower.poll()
    assert taken([growth])[-5:] == as_bytes(records)
    held = read_log(tmp_path).records
    assert taken([growth]) == as_bytes(held)


def test_what_was_removed_unread_is_counted(tmp_path: Path) -> None:
    for number in (999998, 999999):
        build.healthy_records(number, 8, 8 * number).tofile(
            tmp_path / f"records-rank0-{number:06d}.bin"
        )
    follower = LogFollower(str(tmp_path))
    assert len(taken(follower.poll())) == 16
    with open(tmp_path / "records-rank0-999999.bin", "ab") as file:
        file.write(b"half a record")
    assert taken(follower.poll()) == []
    for number in (999998, 999999):
        (tmp_path / f"records-rank0-{number:06d}.bin").unlink()
    later = build.healthy_records(9, 4, 90)  # a number of more digits is later
    later.tofile(tmp_path / "records-rank0-1000000.bin")
    [growth] = follower.poll()
    assert taken([growth]) == as_bytes(later) and growth.missed_bytes == len(b"half a record")


def test_half_a_record_and_half_a_line_are_waited_for(tmp_path: Path) -> None:
    follower = LogFollower(str(tmp_path))
    records = build.healthy_records(0, 3)
    data = records.tobytes()
    line = json.dumps({"step": 1, "text": "x"}).encode()
    segment, watch = tmp_path / "records-rank0-000000.bin", tmp_path / "watch-rank0.jsonl"
    segment.write_bytes(data[:-100])
    watch.write_bytes(b"not json\n[1]\n" + line + b"\n" + line[:5])
    [growth] = follower.poll()
    assert taken([growth]) == as_bytes(records[:2]) and len(growth.watch) == 1
    with open(segment, "ab") as file:
        file.write(data[-100:])
    with open(watch, "ab") as file:
        file.write(line[5:] + b"\n")
    [growth] = follower.poll()
    assert taken([growth]) == as_bytes(records[2:])
    assert growth.watch == [{"step": 1, "text": "x"}] and growth.damaged == 0


def test_a_line_without_end_does_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "_LINE_BYTES", 64)
    build.healthy_records(0, 1).tofile(tmp_path / "records-rank0-000000.bin")
    # The end of the long line looks like a line of its own.
    text = "x" * 128 + '{"text": "no"}\n{"text": "y"}\n'
    (tmp_path / "watch-rank0.jsonl").write_text(text)
    [growth] = LogFollower(str(tmp_path)).poll()
    assert growth.watch == [{"text": "y"}]


def test_of_a_long_log_and_of_a_long_pause_the_end_is_read(tmp_path: Path) -> None:
    records = build.healthy_records(0, 100)
    records[:60].tofile(tmp_path / "records-rank0-000000.bin")
    records[60:].tofile(tmp_path / "records-rank0-000001.bin")
    follower = LogFollower(str(tmp_path), tail_bytes=50 * RECORD_BYTES)
    [growth] = follower.poll()
    assert taken([growth]) == as_bytes(records[50:]) and growth.missed_bytes == 0
    more = build.healthy_records(1, 120, 100)
    more.tofile(tmp_path / "records-rank0-000002.bin")
    [growth] = follower.poll()
    assert taken([growth]) == as_bytes(more[-50:])
    assert growth.missed_bytes == 70 * RECORD_BYTES


def test_damaged_records_are_left_out(tmp_path: Path) -> None:
    records = build.healthy_records(0, 6)
    records["dtype"][2] = 200
    records[4] = np.zeros(1, RECORD_DTYPE)[0]
    path = tmp_path / "records-rank0-000000.bin"
    records.tofile(path)
    follower = LogFollower(str(tmp_path))
    [growth] = follower.poll()
    assert taken([growth]) == as_bytes(records[[0, 1, 3, 5]]) and growth.damaged == 1
    records["version"] = 2
    with open(path, "ab") as file:
        file.write(records.tobytes())
    with pytest.raises(LogError, match="record 6 has version 2"):
        follower.poll()


def test_ranks_come_one_after_the_other(tmp_path: Path) -> None:
    synthetic_logs.write(tmp_path, 12, 5)
    follower = LogFollower(str(tmp_path))
    assert [growth.rank for growth in follower.poll()] == [0]
    synthetic_logs.write(tmp_path, 12, 5, ranks=2)
    grown = follower.poll()
    assert [growth.rank for growth in grown] == [0, 1] and len(taken(grown[1:])) == 60


def test_a_log_that_was_closed_has_the_time_in_its_meta_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = RecordLog(tmp_path, 0, None, site_table())
    log.append(build.healthy_records(0, 3), 0)
    follower = LogFollower(str(tmp_path))
    follower.poll()
    with monkeypatch.context() as child:
        # A forked one closes its copy at its exit, while the parent goes on.
        child.setattr(os, "getpid", lambda: -1)
        log.close()
    assert follower.poll()[0].meta is None
    log = RecordLog(tmp_path / "other", 0, None, site_table())
    log.close()
    meta: Any = LogFollower(str(tmp_path / "other")).poll()[0].meta
    assert meta["ended"] >= meta["created"]


@pytest.mark.parametrize("piece", [1, 7, 30, 1000])
def test_recent_steps_are_the_rows_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    synthetic_logs.write(tmp_path, 40, 12)
    view = read_log(tmp_path)
    stream = StepStream(view.sites, {}, 0)
    stream.add(view.records)
    whole = [repr(row) for row in stream.rows()]
    recent = StepStream({}, {}, 0, 5)
    recent.name({n: site for n, site in view.sites.items() if n < 20})
    recent.name({n: site for n, site in view.sites.items() if n >= 20})
    for start in range(0, len(view.records), piece):
        recent.add(view.records[start : start + piece])
    assert [repr(row) for row in recent.rows()] == whole[-5:]
    monkeypatch.setattr(step_table, "_MOST_HELD", 2)
    recent.add(view.records)
    assert len(recent.rows()) == 5
