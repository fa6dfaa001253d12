"""What ``fastcheck top`` holds of a log that grows."""

from __future__ import annotations

import json
import math
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from fastcheck.log.follow import LogFollower
from fastcheck.log.writer import RecordLog
from fastcheck.record.format import Verdict
from fastcheck.record.site import SiteTable
from fastcheck.report.live import state as state_of_log
from fastcheck.report.live.state import LiveState
from support.programs import synthetic_logs
from support.records import record_builder as build

NOW = 1_000_000.0


def state_of(path: Path) -> LiveState:
    state = LiveState()
    state.take(LogFollower(str(path)).poll(), 0.0)
    return state


def shown(state: LiveState, sort: str = "headroom", pattern: str = "") -> list[str]:
    return [row.name for row in state.rows(sort, pattern, 0, 100)[0]]


def three_sites(path: Path, *modules: str) -> RecordLog:
    """The log of layers a, b and c, with 3, 1 and 2 bits of headroom."""
    sites = SiteTable()
    for name in modules or ("a", "b", "c"):
        sites.intern(build.site(name, "Linear"))
    sites.intern(build.site("", "GradScaler", role="loss_scale", label="loss scale"))
    log = RecordLog(path, 0, None, sites)
    highs = [65504 / 2**bits for bits in (3, 1, 2, 0)]
    log.append(
        build.records(
            *(build.record("float16", site=n, seq=n, high=high) for n, high in enumerate(highs))
        ),
        0,
    )
    return log


def test_the_least_headroom_is_first(tmp_path: Path) -> None:
    three_sites(tmp_path)
    state = state_of(tmp_path)
    assert shown(state) == ["b output[0]", "c output[0]", "a output[0]"]
    rows, total = state.rows("headroom", "", 1, 1)
    assert total == 3 and [(row.name, row.site) for row in rows] == [("c output[0]", 2)]
    assert rows[0].headroom == pytest.approx(2)
    assert shown(state, "name") == ["a output[0]", "b output[0]", "c output[0]"]
    assert state.least_headroom(0) == pytest.approx(1)


def test_what_overflowed_comes_before_all_others(tmp_path: Path) -> None:
    log = three_sites(tmp_path)
    log.append(build.records(build.record("float32", site=0, step=1, high=0.1, nan_count=1)), 1)
    log.append(build.records(build.record("float32", site=1, step=1, high=7e4)), 1)
    state = state_of(tmp_path)
    assert shown(state) == ["a output[0]", "c output[0]", "b output[0]"]
    assert shown(state, "abs max") == ["a output[0]", "b output[0]", "c output[0]"]
    assert state.least_headroom(0) == -math.inf


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("layers.1", ["layers.1.attn", "layers.12.mlp"]),
        ("ATTN", ["layers.1.attn"]),
        ("layers.?.*", ["layers.1.attn", "layers.2.mlp"]),
        ("*.mlp", ["layers.12.mlp", "layers.2.mlp"]),
        ("nothing", []),
    ],
)
def test_a_part_of_the_name_or_a_pattern_filters(
    tmp_path: Path, pattern: str, names: list[str]
) -> None:
    log = three_sites(tmp_path, "layers.1.attn", "layers.12.mlp", "layers.2.mlp")
    state, follower = LiveState(), LogFollower(str(tmp_path))
    state.take(follower.poll(), 0.0)
    found = [name.partition(" ")[0] for name in shown(state, "name", pattern)]
    assert found == names
    # A site that comes later is matched too.
    assert isinstance(log._sites, SiteTable)
    number = log._sites.intern(build.site("layers.1.new"))
    log.append(build.records(build.record(site=number, step=1)), 1)
    state.take(follower.poll(), 0.0)
    later = [name.partition(" ")[0] for name in shown(state, "name", pattern)]
    assert ("layers.1.new" in later) == (pattern in ("layers.1", "layers.?.*"))


def test_numbers_of_the_step_and_the_log(tmp_path: Path) -> None:
    synthetic_logs.write(tmp_path, 40, 20, event_step=-1)
    state, follower = LiveState(), LogFollower(str(tmp_path))
    state.take(follower.poll(), 10.0)
    last = state.ranks[0].last
    assert last is not None and last.step == state.step == 19 and last.scale == 65536.0
    assert state.total_bytes == 40 * 20 * 192 and state.pace().steps_per_second is None
    synthetic_logs.write(tmp_path, 40, 30, event_step=-1)
    state.take(follower.poll(), 14.0)
    assert state.pace() == (2.5, 40 * 10 * 192 / 4)
    assert state.ranks[0].records == 40 * 30 and state.ranks[0].first_step == 0
    for second in range(15, 60):
        state.take(follower.poll(), float(second))
    assert state.pace() == (0.0, 0.0)
    (tmp_path / "records-rank0-000000.bin").unlink()  # the log has a limit
    state.take(follower.poll(), 61.0)
    assert state.pace().bytes_per_second is None


def test_the_first_counted_event_and_the_youngest_others(tmp_path: Path) -> None:
    sites = SiteTable()
    for name in ("a", "b"):
        sites.intern(build.site(name, "Linear"))
    log = RecordLog(tmp_path, 0, None, sites)
    state, follower = LiveState(), LogFollower(str(tmp_path))

    def event(step: int, site: int, counted: bool) -> None:
        bad = build.record(step=step, seq=step, site=site, posinf_count=step)
        log.append(build.records(bad), step)
        log.append_event(build.event(sites[site], bad, Verdict.ORIGIN, "because", counted))

    def texts() -> list[str]:
        state.take(follower.poll(), 0.0)
        return [f"{event.kind}: {event.text}" for event in state.events(3)]

    assert texts() == []
    event(1, 0, False)
    log.append_line("watch", {"step": 2, "text": "the loss rose", "is_warning": True})
    assert texts() == [
        "other: 1 +Inf in output[0] of a (Linear) at step 1",
        "warning: the loss rose",
    ]
    event(3, 1, True)
    log.append_line("watch", {"step": 3, "text": "a shift", "is_warning": False})
    log.append_line("watch", {"step": "x", "text": 5})
    assert texts() == [
        "counted: 3 +Inf in output[0] of b (Linear) at step 3",
        "warning: the loss rose",
        "watch: a shift",
    ]
    event(4, 0, True)
    assert texts()[0].endswith("at step 3") and texts()[2].endswith("of a (Linear) at step 4")
    assert state.event_counts() == {"counted": 2, "other": 1, "warning": 1, "watch": 1}
    # Judged again: it counts no more.
    bad = build.record(step=3, seq=3, site=1, posinf_count=3)
    log.append_event(build.event(sites[1], bad, Verdict.ABSORBED, "absorbed", False))
    assert texts()[0] == "counted: 4 +Inf in output[0] of a (Linear) at step 4"
    assert state.event_counts() == {"counted": 1, "other": 2, "warning": 1, "watch": 1}


def test_an_event_whose_record_is_gone_is_still_named(tmp_path: Path) -> None:
    sites = SiteTable()
    sites.intern(build.site("a", "Linear"))
    log = RecordLog(tmp_path, 0, None, sites)
    log.append_event(build.event(sites[0], build.record(step=7, seq=5, nan_count=2)))
    log.append(build.records(build.record(step=9)), 9)
    [event] = state_of(tmp_path).events(5)
    assert event.text == "NaN or Inf in output[0] of a (Linear) at step 7"


def test_events_of_several_ranks_begin_with_the_first(tmp_path: Path) -> None:
    synthetic_logs.write(tmp_path, 20, 20, ranks=2)
    state = state_of(tmp_path)
    texts = [event.text for event in state.events(5)]
    assert len(texts) == 1 + 0 or all("at step 18 on rank" in text for text in texts)
    assert texts[0].endswith("at step 18 on rank 0") and state.event_counts()["counted"] == 2
    assert {row.rank for row in state.rows("headroom", "", 0, 100)[0]} == {0, 1}


def test_events_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_of_log, "_MOST_LINES", 10)
    monkeypatch.setattr(state_of_log, "_MOST_RECORDS", 10)
    held = state_of_log.RankEvents(0)
    lines = [
        {"step": n, "seq": n, "site": 0, "verdict": 1, "counted": True, "reason": "r"}
        for n in range(50)
    ]
    for line in lines:
        record = build.record(step=line["step"], seq=line["seq"], nan_count=1)
        held.add([build.records(record)], [line], [])
    assert held.counts["counted"] == 50 and len(held._lines) == 10
    first = held.first({}, 1)
    assert first is not None and first.step == 0
    assert [event.step for event in held.latest({}, 1, 3)] == [47, 48, 49]


class TestStatus:
    def meta(self, path: Path, **fields: Any) -> None:
        place = path / "meta-rank0.json"
        place.write_text(json.dumps({**json.loads(place.read_text()), **fields}))

    def state(self, path: Path, age: float) -> LiveState:
        segment = path / "records-rank0-000000.bin"
        if segment.exists():
            os.utime(segment, (NOW - age, NOW - age))
        return state_of(path)

    def test_running_and_quiet(self, tmp_path: Path) -> None:
        log = RecordLog(tmp_path, 0, None, SiteTable())
        assert self.state(tmp_path, 0).status(NOW) == ("no record yet", True)
        log.append(build.records(build.record()), 0)
        assert self.state(tmp_path, 3).status(NOW) == ("running", True)
        assert self.state(tmp_path, 45).status(NOW) == ("no record for 45 s", True)
        assert self.state(tmp_path, 7200).status(NOW) == ("no record for 2 h", True)

    def test_a_log_that_was_closed(self, tmp_path: Path) -> None:
        log = RecordLog(tmp_path, 0, None, SiteTable())
        log.append(build.records(build.record()), 0)
        log.close()
        self.meta(tmp_path, ended="2026-01-01T10:00:00+0000")
        assert self.state(tmp_path, 3).status(NOW) == ("ended 2026-01-01T10:00:00+0000", False)

    def test_a_process_that_is_gone(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def kill(pid: int, signal: int) -> None:
            assert (pid, signal) == (4711, 0)
            raise ProcessLookupError

        RecordLog(tmp_path, 0, None, SiteTable()).append(build.records(build.record()), 0)
        self.meta(tmp_path, pid=4711)
        monkeypatch.setattr(os, "kill", kill)
        assert self.state(tmp_path, 60).status(NOW) == ("the process is gone", False)
        # Its number may mean nothing here, where it is in another container.
        assert self.state(tmp_path, 3).status(NOW) == ("running", True)
        for strange in ({"host": "elsewhere"}, {"host": socket.gethostname(), "pid": "4711"}):
            self.meta(tmp_path, **strange)
            assert self.state(tmp_path, 60).status(NOW) == ("no record for 60 s", True)
