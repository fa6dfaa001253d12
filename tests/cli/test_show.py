"""fastcheck show: its filters, JSON, what is not a log, and plain output off a terminal."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from torch import nn

import fastcheck
from fastcheck.cli.main import main
from fastcheck.log.follow import LogFollower
from fastcheck.log.writer import RecordLog
from fastcheck.record.format import Flag, Verdict
from fastcheck.record.site import SiteTable
from fastcheck.report.live.state import LiveState
from fastcheck.report.page.write import page_of_log
from fastcheck.watch.event import KINDS, WatchEvent
from support.page_data import PageData
from support.programs.command_line import Terminal, run, shown_json
from support.records import record_builder as build

STEPS = 12


@pytest.fixture
def log(tmp_path: pathlib.Path) -> str:
    """Twelve steps of three modules in float16; layers.1.mlp grows, and overflows in the last."""
    sites = SiteTable()
    names = ["layers.0.attn", "layers.1.mlp", "head"]
    numbers = [sites.intern(build.site(name, "Block")) for name in names]
    writer = RecordLog(tmp_path / "log", 0, None, sites, {"fastcheck": "0.1.0", "torch": "2.13.0"})
    seq = 0
    for step in range(STEPS):
        made = []
        for number in numbers:
            last = step == STEPS - 1
            fields: dict[str, Any] = {
                "step": step,
                "seq": seq,
                "site": number,
                "checksum": 2**64 - 1,
            }
            if last and number == 1:
                fields.update(posinf_count=3, flags=int(Flag.EVENT) | int(Verdict.ORIGIN) << 8)
            if last and number == 2:
                fields.update(nan_count=1000, low=float("inf"), high=float("-inf"))
            elif number == 1:
                fields["high"] = 100.0 * 1.7**step
            made.append(build.record("float16", **fields))
            seq += 1
        writer.append(build.records(*made), step)
    culprit = build.event(sites[1], made[1], reason="its inputs were finite")
    writer.append_event(culprit)
    carried = build.event(sites[2], made[2], Verdict.PROPAGATED, "from layers.1.mlp", counted=False)
    writer.append_event(carried)
    writer.close()
    return writer.directory


def test_show_tells_events_and_the_last_step(capsys: pytest.CaptureFixture[str], log: str) -> None:
    code, out, _ = run(capsys, "show", log)
    assert code == 0
    assert "steps 0 to 11 (12 held), 36 records of 3 tensors, 2 events" in out
    assert "fastcheck 0.1.0" in out and "torch 2.13.0" in out
    event = out.index("step 11: 3 +Inf in output[0] of layers.1.mlp (Block), forward")
    reason = out.index("origin (counted): its inputs were finite")
    records = out.index("\nrecords")
    assert event < reason < records
    rows = out[records:].splitlines()
    assert sum("output[0]" in row for row in rows) == 3


def test_show_a_step(capsys: pytest.CaptureFixture[str], log: str) -> None:
    document = shown_json(capsys, "show", log, "--step", "4")
    assert [record["step"] for record in document["records"]] == [4, 4, 4]
    assert document["events"] == []
    last = shown_json(capsys, "show", log, "--step", "-1")
    assert {record["step"] for record in last["records"]} == {11} and len(last["events"]) == 2
    code, out, _ = run(capsys, "show", log, "--step", "99")
    assert code == 1 and "step 99 is not in this log; steps held: 0 to 11" in out


@pytest.mark.parametrize(
    ("pattern", "modules"),
    [
        ("layers.1.mlp", {"layers.1.mlp"}),
        ("layers", {"layers.0.attn", "layers.1.mlp"}),
        ("layers.*", {"layers.0.attn", "layers.1.mlp"}),
        ("*.mlp", {"layers.1.mlp"}),
        ("Block", {"layers.0.attn", "layers.1.mlp", "head"}),
        ("h*d.output[0]", {"head"}),
        ("head.output[0]", {"head"}),
    ],
)
def test_show_sites(
    capsys: pytest.CaptureFixture[str], log: str, pattern: str, modules: set[str]
) -> None:
    document = shown_json(capsys, "show", log, "--site", pattern)
    assert {record["site"]["module"] for record in document["records"]} == modules
    assert len(document["records"]) == STEPS * len(modules)


def test_show_a_site_draws_its_trend(capsys: pytest.CaptureFixture[str], log: str) -> None:
    code, out, _ = run(capsys, "show", log, "--site", "layers.1.mlp")
    assert code == 0
    assert re.search(r"layers\.1\.mlp output\[0\] +\S*[█#]\S*[×!] +100 +20,160 +log", out), out


def test_show_step_and_site_together(capsys: pytest.CaptureFixture[str], log: str) -> None:
    document = shown_json(capsys, "show", log, "--site", "head", "--step", "3")
    assert len(document["records"]) == 1


def test_a_misspelt_site_shows_near_names(capsys: pytest.CaptureFixture[str], log: str) -> None:
    code, out, _ = run(capsys, "show", log, "--site", "layer.1.mlp")
    assert code == 1 and "did you mean 'layers.1.mlp'" in out


def test_show_is_as_wide_as_columns_asks_for(
    capsys: pytest.CaptureFixture[str], log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    for options in ([], ["--step", "2"]):
        assert main(["show", log, *options]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line for line in lines if len(line) > 50 and " " in line[10:].strip()] == []


def test_show_events_only(capsys: pytest.CaptureFixture[str], log: str) -> None:
    code, out, _ = run(capsys, "show", log, "--events")
    assert code == 0 and "propagated (not counted): from layers.1.mlp" in out
    assert "\nrecords" not in out
    document = shown_json(capsys, "show", log, "--events")
    assert document["records"] == [] and len(document["events"]) == 2


def test_show_says_when_there_is_no_event(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    sites = SiteTable()
    sites.intern(build.site())
    writer = RecordLog(tmp_path, 0, None, sites)
    writer.append(build.healthy_records(0, 3, sites=1), 0)
    code, out, _ = run(capsys, "show", str(tmp_path))
    assert code == 0 and re.search(r"events +none", out)


def test_limit_says_what_it_left_out(capsys: pytest.CaptureFixture[str], log: str) -> None:
    _, out, _ = run(capsys, "show", log, "--site", "Block", "--limit", "5")
    assert "and 31 more records (--limit 0 shows all)" in out
    # The first bad record is never what is left out.
    assert re.search(r"layers\.1\.mlp output\[0\] +float16 +11 +1,000 +3 ", out)
    _, out, _ = run(capsys, "show", log, "--site", "Block", "--limit", "0")
    assert "more records" not in out
    document = shown_json(capsys, "show", log, "--site", "Block", "--limit", "5")
    assert len(document["records"]) == 5 and document["left_out"]["records"] == 31


def test_json_is_strict_and_keeps_what_it_cannot_spell(
    capsys: pytest.CaptureFixture[str], log: str
) -> None:
    document = shown_json(capsys, "show", log)
    by_module = {record["site"]["module"]: record for record in document["records"]}
    assert by_module["head"]["nan_count"] == 1000 and by_module["head"]["min"] is None
    assert by_module["head"]["checksum"] == "f" * 16
    assert document["events"][0]["verdict"] == "origin"
    assert document["events"][0]["record"]["posinf_count"] == 3
    assert document["meta"]["0"]["torch"] == "2.13.0"


def test_json_with_a_nan_sum_is_strict(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    sites = SiteTable()
    sites.intern(build.site())
    writer = RecordLog(tmp_path, 0, None, sites)
    made = build.record("float64")
    made["sum"], made["sum_sq"] = np.nan, np.inf
    writer.append(build.records(made), 0)
    [record] = shown_json(capsys, "show", str(tmp_path))["records"]
    assert (record["sum"], record["sum_sq"], record["rms"]) == ("nan", "inf", "inf")


def test_show_the_parent_takes_the_newest_log(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    for run_number in range(2):
        sites = SiteTable()
        sites.intern(build.site(f"run{run_number}"))
        writer = RecordLog(tmp_path / f"2025010{run_number}", 0, None, sites)
        writer.append(build.healthy_records(0, 2, sites=1), 0)
        for path in pathlib.Path(writer.directory).iterdir():
            os.utime(path, (1000 + run_number, 1000 + run_number))
    code, out, _ = run(capsys, "show", str(tmp_path))
    assert code == 0 and "run1" in out and "1 older log beside it: 20250100" in out


def test_two_ranks_are_told_apart(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    for rank in range(2):
        sites = SiteTable()
        sites.intern(build.site(f"of_rank{rank}"))
        writer = RecordLog(tmp_path, rank, None, sites)
        writer.append(build.healthy_records(0, 2, sites=1), 0)
    _, out, _ = run(capsys, "show", str(tmp_path))
    assert "ranks 0, 1" in out and "of_rank0" in out and "of_rank1" in out
    _, out, _ = run(capsys, "show", str(tmp_path), "--rank", "1")
    assert "of_rank0" not in out and "of_rank1" in out
    code, out, _ = run(capsys, "show", str(tmp_path), "--rank", "7")
    assert code == 1 and "ranks: [0, 1]" in out


def test_a_torn_log_is_shown_with_a_word_about_it(
    capsys: pytest.CaptureFixture[str], log: str
) -> None:
    path = os.path.join(log, "records-rank0-000000.bin")
    os.truncate(path, os.path.getsize(path) - 10)
    code, out, _ = run(capsys, "show", log)
    assert code == 0 and "182 bytes at the end were cut short" in out


@pytest.mark.parametrize("content", [None, b"not a log"])
def test_what_is_not_a_log_is_refused_with_exit_code_2(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path, content: bytes | None
) -> None:
    path = tmp_path / "thing"
    if content is not None:
        path.write_bytes(content)
    code, out, err = run(capsys, "show", str(path))
    assert code == 2 and out == ""
    assert "expected" in err and str(path) in err and "hint:" in err


def test_a_negative_limit_is_refused(capsys: pytest.CaptureFixture[str], log: str) -> None:
    code, _, err = run(capsys, "show", log, "--limit", "-3")
    assert code == 2 and "--limit" in err and "-3" in err


# Output and terminals


def test_colours_only_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, log: str
) -> None:
    _, out, _ = run(capsys, "show", log)
    assert "\x1b" not in out
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["show", log]) == 0
    assert "\x1b[1;31m" in terminal.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    quiet = Terminal()
    monkeypatch.setattr(sys, "stdout", quiet)
    assert main(["show", log]) == 0
    assert "\x1b" not in quiet.getvalue()


def test_an_ascii_terminal_gets_ascii(log: str) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "fastcheck", "show", log, "--site", "layers"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=True,
    )
    assert shown.stdout.isascii() and b"!" in shown.stdout and b"\\u" not in shown.stdout


def test_a_closed_pipe_is_not_an_error(log: str) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "fastcheck", "show", log, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout is not None and child.stderr is not None
    child.stdout.close()
    assert child.stderr.read() == b""
    child.stderr.close()
    assert child.wait() == 0


@pytest.mark.parametrize("is_warning", [True, False])
def test_every_kind_of_event_of_the_watch_is_shown_everywhere(
    log: str, is_warning: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """By show, with --json too, by the page, by top, and by a summary."""
    events = [
        WatchEvent(step, kind, None, 1.0, 2.0, 3.0, f"{kind} event", is_warning)
        for step, kind in enumerate(KINDS)
    ]
    lines = "".join(json.dumps(event.to_dict()) + "\n" for event in events)
    pathlib.Path(log, "watch-rank0.jsonl").write_text(lines)
    state = LiveState()
    state.take(LogFollower(log).poll(), 0.0)
    monitor = fastcheck.install(nn.Linear(2, 2))
    monitor.watch._watcher.events.extend(events)
    monitor.remove()
    kinds = [line["kind"] for line in shown_json(capsys, "show", log, "--limit", "0")["watch"]]
    page = PageData(page_of_log(log)).header["watched"]
    live = [event.text for event in state.events(20)]
    assert kinds == [event["kind"] for event in page] == list(KINDS)
    (_, shown, _), summary = run(capsys, "show", log, "--limit", "0"), monitor.summary()
    for event in events:
        assert event.text in shown and event.text in live
    assert sum(event.text in summary for event in events) == 10
    assert "and 1 more (monitor.watch.events)" in summary
