"""Pages of logs that are empty, cut short, damaged, or that someone hostile has written."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from fastcheck.cli.main import main
from fastcheck.errors import LogError
from fastcheck.log.writer import RecordLog
from fastcheck.record.site import SiteTable
from fastcheck.report.page.write import page_of_log, write_page
from support.page_data import PageData
from support.programs import synthetic_logs
from support.records import record_builder as build

HOSTILE = '</script><img src=x onerror="alert(1)"><!--\u2028\x1b[31m&amp;\x85\u202e\u2066\u200b'


def visible(page: str) -> str:
    """The page without its script, its style and its data."""
    return re.sub(r"<(script|style)\b[^>]*>.*?</\1>", "", page, flags=re.DOTALL)


def test_an_empty_log_gives_a_page(tmp_path: Path) -> None:
    RecordLog(tmp_path).close()
    page = page_of_log(tmp_path)
    assert (
        '<p class="headline">This log holds no records.' in page
    )  # not in the colour of good news
    assert PageData(page).header["rows"]["site"] == []


def test_a_finite_log_has_no_event(tmp_path: Path) -> None:
    synthetic_logs.write(tmp_path, 8, 10, event_step=-1)
    page = page_of_log(tmp_path)
    header = PageData(page).header
    assert "Every number that was read is finite." in page
    assert header["first"] is None and header["events"] == [] and header["around"] is None


def test_the_verdict_is_the_stop_report(tmp_path: Path) -> None:
    synthetic_logs.write(tmp_path, 60, 30)
    text = visible(page_of_log(tmp_path))
    assert "7 +Inf in output of blocks.1.attn.proj (Linear) at step 27" in text
    assert "torch.bfloat16" in text and "it began here" in text


def test_what_spread_is_in_the_order_of_the_device(tmp_path: Path) -> None:
    synthetic_logs.write(tmp_path, 30, 20)
    header = PageData(page_of_log(tmp_path)).header
    assert header["first"] == {"rank": 0, "step": 18, "row": 3}
    places = header["spread"]["places"]
    assert [place["row"] for place in places[:2]] == [3, 5]
    assert [place["seq"] for place in places] == sorted(place["seq"] for place in places)
    assert [header["verdicts"][place["verdict"]] for place in places[:2]] == [
        "origin",
        "propagated",
    ]
    assert places[0]["counts"] == [0, 7, 0] and len(places) == header["spread"]["count"]


def test_values_around_the_event_are_exact(tmp_path: Path) -> None:
    synthetic_logs.write(tmp_path, 30, 60)
    found = PageData(page_of_log(tmp_path))
    around = found.header["around"]
    assert around["steps"] == list(range(54 - 24, 60)) and around["rows"][0] == 3
    whole = found.arrays["abs_max.high"][around["rows"]][:, around["steps"]]
    assert np.array_equal(found.arrays["around.abs_max"], whole, equal_nan=True)


@pytest.mark.parametrize("cut", [1, 100, 192 * 3 + 7])
def test_a_log_that_was_cut_short(tmp_path: Path, cut: int) -> None:
    synthetic_logs.write(tmp_path, 8, 10)
    path = tmp_path / "records-rank0-000000.bin"
    path.write_bytes(path.read_bytes()[:-cut])
    header = PageData(page_of_log(tmp_path)).header
    assert header["records"] == (80 * 192 - cut) // 192
    assert header["dropped_bytes"] == (80 * 192 - cut) % 192


@pytest.mark.parametrize("size", [0, 100])
def test_a_segment_without_a_whole_record(tmp_path: Path, size: int) -> None:
    """Another rank has just begun to write it."""
    synthetic_logs.write(tmp_path, 8, 10)
    (tmp_path / "records-rank1-000000.bin").write_bytes(b"\0" * size)
    header = PageData(page_of_log(tmp_path)).header
    assert (header["records"], header["dropped_bytes"]) == (80, size)


def test_damaged_records_are_left_out(tmp_path: Path) -> None:
    synthetic_logs.write(tmp_path, 8, 10, event_step=-1)
    path = tmp_path / "records-rank0-000000.bin"
    records = np.fromfile(path, build.records().dtype)
    records["dtype"][5] = 99
    records["step"][6] = 1 << 62
    records["version"][7:9] = 0
    path.write_bytes(records.tobytes())
    header = PageData(page_of_log(tmp_path)).header
    assert (header["records"], header["damaged"], header["dropped_bytes"]) == (76, 2, 384)
    assert header["axis"]["starts"] == list(range(10))


def test_sites_whose_names_are_lost(tmp_path: Path) -> None:
    synthetic_logs.write(tmp_path, 8, 10)
    (tmp_path / "sites-rank0.jsonl").unlink()
    header = PageData(page_of_log(tmp_path)).header
    assert set(header["sites"]["type"]) == {"name lost"} and len(header["rows"]["site"]) == 8


@pytest.mark.parametrize("name", ["meta-rank0.json", "events-rank0.jsonl"])
@pytest.mark.parametrize("text", ["", "[1, 2]", '{"step": 1}\nx\n', '{"step": "9", "seq": null}'])
def test_other_files_that_are_not_as_they_should_be(tmp_path: Path, name: str, text: str) -> None:
    synthetic_logs.write(tmp_path, 8, 10)
    (tmp_path / name).write_text(text)
    assert PageData(page_of_log(tmp_path)).header["records"] == 80


def test_events_that_outlived_their_segment_are_counted_once(tmp_path: Path) -> None:
    synthetic_logs.write(tmp_path, 8, 10, event_step=4)
    path = tmp_path / "records-rank0-000000.bin"
    records = np.fromfile(path, build.records().dtype)
    kept = records[records["flags"] != 0]
    # As a crash between the two steps of an eviction leaves it.
    (tmp_path / "events-rank0.bin").write_bytes(kept.tobytes())
    assert PageData(page_of_log(tmp_path)).header["records"] == 80
    path.write_bytes(records[records["step"] > 6].tobytes())
    header = PageData(page_of_log(tmp_path)).header
    assert header["records"] == 24 + (kept["step"] <= 6).sum()
    assert header["axis"]["starts"] == [4, 5, 6, 7, 8, 9]


def test_names_of_a_log_never_become_markup(tmp_path: Path) -> None:
    table = SiteTable()
    where = build.site(HOSTILE, HOSTILE, label=HOSTILE, op=HOSTILE)
    table.intern(where)
    bad = build.record(dtype="float16", nan_count=3, flags=0x108, step=2, seq=2)
    log = RecordLog(tmp_path / HOSTILE.replace("/", "_"), 0, None, table, {HOSTILE: HOSTILE})
    healthy = [build.record(dtype="float16", step=step, seq=step) for step in range(2)]
    log.append(build.records(*healthy, bad), 2)
    log.append_event(build.event(where, bad, reason=HOSTILE))
    log.close()
    page = page_of_log(tmp_path)
    assert "<img" not in page and not re.search(r"[\x1b\x85\u202e\u2066\u200b]", page)
    assert page.count("<!--") == 0
    assert visible(page).count("&lt;/script&gt;&lt;img") >= 3
    header = PageData(page).header
    shown = HOSTILE
    for mark in "\u2028\x1b\x85\u202e\u2066\u200b":
        shown = shown.replace(mark, ascii(mark)[1:-1])
    assert header["sites"]["module"] == [shown] and header["events"][0]["reason"] == shown
    assert header["meta"]["0"][shown] == shown


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    synthetic_logs.write(tmp_path, 8, 10)
    page = page_of_log(tmp_path)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None and policy[1].startswith("default-src 'none'; script-src 'sha256-")
    assert re.findall(r"<(?:link|img|iframe|base|object)\b|\ssrc=", visible(page)) == []
    # uPlot's licence is due wherever its code is.
    assert "Copyright (c) 2022 Leon Sorokin" in page


def test_the_command_writes_the_newest_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    synthetic_logs.write(tmp_path / "logs" / "run", 8, 10)
    out = tmp_path / "run.html"
    assert main(["report", str(tmp_path / "logs"), "-o", str(out)]) == 0
    assert PageData(out.read_text()).header["records"] == 80
    assert str(out) in capsys.readouterr().out
    assert main(["report", str(tmp_path / "logs"), "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert written["file"] == str(tmp_path / "logs" / "run" / "report.html")
    assert written["bytes"] == len((tmp_path / "logs" / "run" / "report.html").read_bytes())


def test_no_log_and_no_room(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "there is no log here" in capsys.readouterr().err
    synthetic_logs.write(tmp_path / "log", 8, 10)
    with pytest.raises(LogError, match="the page can't be written"):
        write_page(tmp_path / "log", tmp_path / "missing" / "run.html")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log"]
