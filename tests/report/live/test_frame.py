"""The picture of ``fastcheck top``: what is in it, and that it fits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fastcheck.log.follow import LogFollower
from fastcheck.log.writer import RecordLog
from fastcheck.record.site import SiteTable
from fastcheck.report.live.frame import (
    Picture,
    View,
    cell_count,
    fit_cells,
    picture,
    waiting_picture,
)
from fastcheck.report.live.state import LiveState
from support.programs import synthetic_logs
from support.records import record_builder as build


def drawn(
    path: Path,
    width: int = 100,
    rows: int | None = 5,
    height: int | None = None,
    view: View | None = None,
    ascii_only: bool = False,
) -> Picture:
    state = LiveState()
    state.take(LogFollower(str(path)).poll(), 0.0)
    return picture(
        state,
        view or View(),
        path=str(path),
        width=width,
        rows=rows,
        height=height,
        wall=1e9,
        ascii_only=ascii_only,
    )


def test_the_whole_picture(tmp_path: Path) -> None:
    synthetic_logs.write(tmp_path / "log", 40, 60)
    found = drawn(tmp_path / "log", rows=3)
    lines = found.text().splitlines()
    assert re.search(r"/log +step 59 · (running|no record for .*)$", lines[0])
    labels = [line[:10].rstrip() for line in lines]
    assert labels[1:7] == ["loss", "scale", "grad norm", "cost", "events", ""]
    assert lines[1].split()[1] == "nan" and lines[1].endswith("×" * 6)
    assert lines[2].split()[1] == "65,536"
    assert lines[4] == "cost      40 records, 7.7 KB a step · log 461 KB"
    assert lines[5] == "events    1 counted"
    assert lines[6] == "          7 +Inf in output of blocks.0.norm (LayerNorm) at step 54"
    assert lines[8] == "sites  1-3 of 39, by headroom"
    assert re.fullmatch(r"blocks.0.norm output +over +[\d,]+ +[\d,]+  .{26}×{6}", lines[10])
    assert len(lines) == 13 and found.shown == 3
    styles = {text.strip(): style for line in found.lines for text, style in line}
    assert styles["1 counted"] == "red" and styles["over"] == "red" and styles["events"] == "bold"


@pytest.mark.parametrize("ascii_only", [False, True])
@pytest.mark.parametrize("width", [20, 40, 60, 79, 80, 132])
def test_no_line_is_wider_than_the_terminal(tmp_path: Path, width: int, ascii_only: bool) -> None:
    synthetic_logs.write(tmp_path / ("long." * 20 + "log"), 40, 20, ranks=3)
    found = drawn(tmp_path / ("long." * 20 + "log"), width, ascii_only=ascii_only)
    text = found.text(ascii_only)
    assert max(map(len, text.splitlines())) <= width
    assert text.isascii() == ascii_only
    if width >= 60:
        assert re.search(r"norm output +0 +over", text)
        assert "least headroom over" in text and "step 19" in text.splitlines()[0]


def test_a_terminal_of_few_lines_keeps_some_sites_and_the_keys(tmp_path: Path) -> None:
    synthetic_logs.write(tmp_path, 40, 20)
    for height in (6, 20, 24, 50):
        found = drawn(tmp_path, height=height, rows=None, view=View(has_keys=True))
        assert len(found.lines) <= height
        assert "q quit" in found.lines[-1][0][0]
        assert len(found.lines) == height or found.shown == 39
    assert drawn(tmp_path, height=50, rows=None).shown == 39


def test_scrolling_stays_within_the_sites(tmp_path: Path) -> None:
    synthetic_logs.write(tmp_path, 40, 20)
    view = View(offset=1000)
    found = drawn(tmp_path, view=view)
    assert view.offset == 34 and "sites  35-39 of 39" in found.text()
    assert "none" in drawn(tmp_path, view=View(pattern="nothing")).text()


def test_keys_change_the_view() -> None:
    view = View()
    for key in ("j", "down", "down", "k", "pagedown"):
        assert view.press(key, 10)
    assert view.offset == 12
    view.press("pageup", 10)
    view.press("up", 10)
    assert view.offset == 1
    view.press("s", 10)
    assert (view.sort, view.offset) == ("abs max", 0)
    for _ in range(2):
        view.press("s", 10)
    assert view.sort == "headroom"
    for key in ("/", "q", "s", "x", "backspace"):
        assert view.press(key, 10)
    assert view.typing and view.pattern == "qs" and view.sort == "headroom"
    view.press("enter", 10)
    assert not view.typing and view.pattern == "qs"
    view.press("escape", 10)
    assert view.pattern == ""
    for key in ("/", "a", "escape"):
        view.press(key, 10)
    assert (view.typing, view.pattern) == (False, "")
    assert not view.press("q", 10)


def test_names_can_not_steer_the_terminal(tmp_path: Path) -> None:
    nasty = "\x1b]0;title\x07\x1b[2Jlayer\r\x9b31m\u202e"
    sites = SiteTable()
    sites.intern(build.site(nasty, nasty, label=nasty))
    log = RecordLog(tmp_path / nasty, 0, None, sites)
    bad = build.record(nan_count=3)
    log.append(build.records(bad), 0)
    log.append_event(build.event(sites[0], bad))
    log.append_line("watch", {"step": 0, "text": nasty, "is_warning": True})
    log._meta["ended"] = nasty
    log._write_meta()
    view = View(pattern="\x1b", typing=True, has_keys=True)
    for chosen in (View(), view):
        text = drawn(tmp_path / nasty, 300, view=chosen).text()
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text)
    assert r"\x1b[2Jlayer" in drawn(tmp_path / nasty, 300).text()
    assert r"\x1b[2J" in waiting_picture(nasty, 300).text()


def test_wide_characters_take_two_cells() -> None:
    assert cell_count("模型") == 4 and cell_count("e\u0301") == 1
    assert fit_cells("模型", 6) == "模型  " and fit_cells("abc", 2) == "a…"
    assert fit_cells("模型", 3) == "模…" and fit_cells("a模型", 4, cut_front=True) == "…型 "
    assert fit_cells("layers.0", 5, True, "..") == "..s.0" and fit_cells("abc", 0) == ""
    for width in range(12):
        assert cell_count(fit_cells("é模a型b😀c", width)) == width
