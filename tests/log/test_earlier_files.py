"""A log and two dumps written by fastcheck 0.1.0 are read with the same results.

tests/support/written_by_0.1 holds them, and what ``fastcheck show`` and ``fastcheck compare``
printed as JSON at that time.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

import fastcheck
from fastcheck.cli.main import main
from fastcheck.log.reader import read_log
from support.paths import TESTS

HERE = TESTS / "support" / "written_by_0.1"


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    main([*arguments, "--json"])
    return json.loads(capsys.readouterr().out)


def test_show_prints_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(HERE)
    now = printed(capsys, "show", "log")
    assert now.pop("damaged_records") == 0  # of a later version
    assert [row["step"] for row in now.pop("steps")] == [0, 1, 2]  # of a later version too
    assert (now.pop("fastcheck"), now.pop("format")) == ("show", 1)  # these too
    assert now == json.loads((HERE / "show.json").read_text())


def test_records_and_events() -> None:
    view = read_log(str(HERE / "log"))
    assert len(view.records) == 50 and set(view.records["step"]) == {0, 1, 2, 3}
    assert [(event.step, event.verdict, event.counted) for event in view.events][:1] == [
        (2, fastcheck.types.Verdict.ARRIVED, True)
    ]


def test_compare_finds_the_same() -> None:
    then = json.loads((HERE / "compare.json").read_text())
    now = fastcheck.compare(str(HERE / "dump_values"), str(HERE / "dump_records")).to_dict()
    for part in ("kind", "verdict", "counts", "growth", "missing", "more_rows", "steps"):
        assert now[part] == then[part], part
    for one, other in zip(now["answers"], then["answers"], strict=True):
        assert (one["question"], one["answer"]) == (other["question"], other["answer"])
    keys = ("step", "rank", "question", "name", "call", "state", "error")
    for part in ("first", "first_inexact"):
        assert {key: now[part][key] for key in keys} == {key: then[part][key] for key in keys}
    assert len(now["rows"]) == len(then["rows"])


def test_values_of_a_dump_are_read() -> None:
    assert fastcheck.compare(str(HERE / "dump_values"), str(HERE / "dump_values")).is_identical
