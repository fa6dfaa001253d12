"""Names in a file are printed as text, never as terminal escapes or spreadsheet formulas."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fastcheck
from fastcheck.cli import console
from fastcheck.cli.main import main
from fastcheck.errors import explain, printable, warn
from fastcheck.log.writer import RecordLog
from fastcheck.monitor.distributed.replicas import ReplicaMismatch
from fastcheck.monitor.reruns import Difference
from fastcheck.record.exponents import Share
from fastcheck.record.precision import PrecisionAdvice
from fastcheck.record.site import SiteTable
from fastcheck.sealing.arrival import Arrival
from fastcheck.utils.text.layout import Section, Table, csv_text, paint, printable_section
from fastcheck.watch.event import WatchEvent
from support.page_data import inflated
from support.records import record_builder as build

NASTY = "\x1b]0;title\x07\x1b[2Jlayer\r\x9b31m\u202e\u2066\u200b\x7f"
STEERING = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u200b]")


def write_log(place: Path, module: str) -> str:
    sites = SiteTable()
    sites.intern(build.site(module, NASTY, label=NASTY, op=NASTY))
    log = RecordLog(place, 0, None, sites, {"torch": NASTY, "host": NASTY})
    bad = build.record(nan_count=3)
    log.append(build.records(bad), 0)
    log.append_event(build.event(sites[0], bad, reason=NASTY))
    log.close()
    return log.directory


@pytest.mark.parametrize("rich", [False, True])
def test_show_and_compare_print_no_escape_sequence(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    rich: bool,
) -> None:
    if rich:
        pytest.importorskip("rich")
        monkeypatch.setattr(console, "wants_color", lambda stream: True)
        monkeypatch.setattr(console, "wants_ascii", lambda stream: False)
    place = write_log(tmp_path / "a", NASTY)
    other = write_log(tmp_path / "b", "layer")
    for command in (
        ["show", place],
        ["show", place, "--site", "*"],
        ["compare", place, place, "--all"],
        ["compare", place, other],
    ):
        main(command)
        out, err = capsys.readouterr()
        text = re.sub(r"\x1b\[[0-9;]*m", "", out) if rich else out
        assert not STEERING.search(text + err)
        assert out or err
    main(["show", place])
    assert r"\x1b]0;title\x07" in capsys.readouterr().out.replace("\n", "")


def test_what_paint_writes_stays() -> None:
    painted = paint("bad\x1b[2J", "red", True)
    [text] = printable_section(Section("x", [painted])).parts
    assert text == paint(r"bad\x1b[2J", "red", True)
    [table] = printable_section(Section("x", [Table(["a"], [["b\n\x07"]])])).parts
    assert isinstance(table, Table) and list(table.rows[0]) == [r"b\n\x07"]


def test_errors_are_printable() -> None:
    text = explain("what", expected="a", got="\x1b[2J\ud800\u202e")
    assert text.splitlines()[2] == r"  got:      \x1b[2J\ud800\u202e"
    assert printable("Größe · 模型 😀") == "Größe · 模型 😀"


def test_verify_prints_no_escape_sequence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.pt"
    torch.save({NASTY: torch.ones(2)}, path)
    fastcheck.seal(path, {"x" + NASTY: torch.ones(2)})
    assert main(["verify", str(path)]) == 1
    out = capsys.readouterr().out
    assert not STEERING.search(out) and "missing" in out


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t"])
def test_no_cell_is_a_formula(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], start: str
) -> None:
    name = f"{start}cmd|' /C calc'!A0"
    place = write_log(tmp_path / "log", name)
    table = tmp_path / "table.csv"
    assert main(["export", place, str(table)]) == 0
    with open(table, newline="", encoding="utf-8") as file:
        [row] = csv.DictReader(file)
    assert row["module"] == (r"\tcmd|' /C calc'!A0" if start == "\t" else f"'{name}")
    actual, reference = {name: torch.ones(3)}, {name: torch.zeros(3)}
    fastcheck.compare(actual, reference, csv=tmp_path / "pairs.csv")
    with open(tmp_path / "pairs.csv", newline="", encoding="utf-8") as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    assert any("calc" in cell for cell in cells)
    for cell in cells:
        assert not cell.startswith(("=", "+", "@", "\t")) and not cell.startswith("-cmd")
    capsys.readouterr()


def test_numbers_stay_numbers() -> None:
    assert csv_text("layers.0") == "layers.0" and csv_text("-x") == "'-x"


def test_pages_and_json_have_no_such_character(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = write_log(tmp_path / "a", NASTY)
    commands = (["report", place, "-o"], ["compare", place, place, "--all", "--html"])
    for number, command in enumerate(commands):
        file = tmp_path / f"{number}.html"
        assert main([*command, str(file)]) in (0, 1)
        page = file.read_text()
        texts = "\n".join(strings(json.loads(inflated(page, "header"))))
        assert not STEERING.search(page + texts) and r"\u2066\u200b\x7f" in texts
    capsys.readouterr()
    for command in (["show", place, "--json"], ["compare", place, place, "--all", "--json"]):
        main(command)
        out = capsys.readouterr().out
        assert not STEERING.search(out) and NASTY in "".join(strings(json.loads(out)))


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from strings(item)
    elif isinstance(value, str):
        yield value


def test_what_str_says_of_a_result_is_printable(capsys: pytest.CaptureFixture[str]) -> None:
    site, share, nan = build.site(NASTY), Share(0.0, 0.0), float("nan")
    counts: Any = None  # of the exponents: str() has no use for them
    for said in (
        WatchEvent(1, "spike", None, 1.0, 1.0, nan, NASTY, True),
        Arrival(0, 1, {NASTY: NASTY}, (NASTY,), (NASTY,)),
        ReplicaMismatch(1, NASTY, False, (0,), True, {0: 1, 1: 2}),
        Difference(site, 0, "forward", 0, 0, 2, (None, None)),
        PrecisionAdvice(site, "float32", "float16", 1.0, share, NASTY, 1, False, counts),
    ):
        assert "layer" in str(said) and not STEERING.search(str(said)), type(said)
    with pytest.warns(fastcheck.FastcheckWarning) as caught:
        warn(NASTY)
    assert str(caught[0].message) == printable(NASTY)
    assert main(["show", "x", f"--{NASTY}"]) == 2
    assert not STEERING.search(capsys.readouterr().err)
