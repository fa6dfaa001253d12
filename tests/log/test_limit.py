"""The limit of a log holds with events in every step: the first stay, later ones are counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastcheck.cli.main import main
from fastcheck.log.reader import read_log
from fastcheck.log.writer import RecordLog
from fastcheck.record.format import Flag, Verdict
from support.logs import site_table
from support.records import record_builder as build

LIMIT = 1 << 16


def size(place: Path) -> int:
    return sum(path.stat().st_size for path in place.iterdir())


def fill(log: RecordLog, steps: int, place: Path) -> int:
    """Ten events and ten healthy records a step; the largest size that was seen."""
    seq, largest = 0, 0
    for step in range(steps):
        for _ in range(10):
            bad = build.record(nan_count=1, step=step, seq=seq, site=1)
            bad["flags"] |= int(Flag.EVENT) | int(Verdict.ORIGIN) << 8
            log.append(build.records(bad), step)
            log.append_event(build.event(build.site("layers.1"), bad))
            seq += 1
        log.append(build.healthy_records(step, 10, seq), step)
        seq += 10
        largest = max(largest, size(place))
    return largest


def test_the_limit_holds_with_events_in_every_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = RecordLog(tmp_path, 0, LIMIT, site_table())
    largest = fill(log, 100, tmp_path)
    assert not log.failed
    log.close()
    # And the segment that is being written, an eighth.
    assert largest <= LIMIT * 9 // 8 and size(tmp_path) <= LIMIT * 9 // 8
    view = read_log(tmp_path)
    written = len((tmp_path / "events-rank0.jsonl").read_text().splitlines())
    assert written + log.dropped_events == 1000 and log.dropped_events > 800
    assert view.events[0].step == 0 and len(view.events) == written
    assert view.meta[0]["dropped_events"] == log.dropped_events
    assert 99 in view.records["step"]  # the youngest steps are there too
    assert main(["show", str(tmp_path)]) == 0
    assert f"{log.dropped_events:,} later events or more are not here" in capsys.readouterr().out


def test_a_log_that_was_killed_tells_at_least_half_of_what_was_dropped(tmp_path: Path) -> None:
    log = RecordLog(tmp_path, 0, LIMIT, site_table())
    fill(log, 100, tmp_path)
    told = read_log(tmp_path).meta[0]["dropped_events"]
    assert log.dropped_events / 2 < told <= log.dropped_events


def test_without_a_limit_nothing_is_dropped(tmp_path: Path) -> None:
    log = RecordLog(tmp_path, 0, None, site_table())
    fill(log, 50, tmp_path)
    log.close()
    assert log.dropped_events == 0 and len(read_log(tmp_path).events) == 500
