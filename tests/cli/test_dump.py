"""``fastcheck show`` and ``fastcheck export`` of dumps: whole ones, steps, ranks of a step."""

from __future__ import annotations

import csv
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from fastcheck.cli.main import main
from support.programs.dumping import dumped_run, log, place


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    """Steps 0 to 10 with two ranks: of the second, nothing but its number is its own."""
    dumped_run(tmp_path / "dump", steps=11, level="module")
    for step in range(11):
        first = place(tmp_path / "dump", step)
        second = shutil.copytree(first, first.parent / "rank1")
        for path in second.iterdir():
            path.rename(second / path.name.replace("rank0", "rank1"))
    return tmp_path / "dump"


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["show", *map(str, arguments), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def order(records: list[dict[str, Any]]) -> list[tuple[int, int, int]]:
    return [(record["step"], record["rank"], record["seq"]) for record in records]


def test_a_whole_dump_by_step_then_rank_then_call(
    capsys: pytest.CaptureFixture[str], dump: Path
) -> None:
    count = len(log(dump).records)
    found = shown(capsys, dump, "--site", "*")
    expected = [(s, r, n) for s in range(11) for r in range(2) for n in range(count)]
    assert order(found["records"]) == expected
    # Step 10 is the last one, not step 9.
    assert order(shown(capsys, dump)["records"]) == expected[-2 * count :]
    assert order(shown(capsys, dump, "--step", 9, "--rank", 1)["records"]) == [
        (9, 1, n) for n in range(count)
    ]
    assert main(["show", str(dump)]) == 0
    assert "steps 0 to 10 (11 held)" in capsys.readouterr().out


def test_a_step_and_a_rank_of_one(capsys: pytest.CaptureFixture[str], dump: Path) -> None:
    count = len(log(dump).records)
    found = shown(capsys, dump / "step3")
    assert order(found["records"]) == [(3, r, n) for r in range(2) for n in range(count)]
    found = shown(capsys, dump / "step3" / "rank1")
    assert order(found["records"]) == [(3, 1, n) for n in range(count)]


def test_a_rank_that_was_moved_elsewhere(
    capsys: pytest.CaptureFixture[str], dump: Path, tmp_path: Path
) -> None:
    moved = (dump / "step3" / "rank1").rename(tmp_path / "elsewhere")
    assert {record["rank"] for record in shown(capsys, moved)["records"]} == {1}


def test_steps_whose_sites_have_other_numbers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A list makes the same site number 0 in one step that is another one in the other."""
    for step, name in ((0, "head"), (1, "blocks.0.a")):
        dumped_run(tmp_path / f"of{step}", steps=2, level="module", modules=name)
        (tmp_path / f"of{step}" / f"step{step}").rename(tmp_path / f"step{step}")
    modules = {
        (record["step"], record["site"]["module"])
        for record in shown(capsys, tmp_path, "--site", "*")["records"]
    }
    assert modules == {(0, "head"), (1, "blocks.0.a")}


def test_export_takes_what_show_takes(
    capsys: pytest.CaptureFixture[str], dump: Path, tmp_path: Path
) -> None:
    for number, path in enumerate((dump, dump / "step3", dump / "step3" / "rank0")):
        file = tmp_path / f"{number}.csv"
        assert main(["export", str(path), str(file), "--json"]) == 0
        said = json.loads(capsys.readouterr().out)
        records = shown(capsys, path, "--site", "*")["records"]
        assert said["log"] == os.fspath(path) and said["rows"] == len(records)
        with open(file, newline="") as opened:
            rows = [(int(r["step"]), int(r["rank"]), int(r["seq"])) for r in csv.DictReader(opened)]
        assert rows == order(records)


def test_an_interrupted_dump_is_shown_as_far_as_it_came(
    capsys: pytest.CaptureFixture[str], dump: Path
) -> None:
    os.unlink(place(dump, 10) / "index.json")
    with open(place(dump, 10) / "records-rank0-000000.bin", "r+b") as file:
        file.truncate(192 * 5 + 7)
    found = shown(capsys, dump, "--step", 10, "--rank", 0)
    assert len(found["records"]) == 5 and found["dropped_bytes"] == 7


def test_what_is_neither(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "step3").mkdir()
    assert main(["show", str(tmp_path)]) == 2
    assert "holds no log" in capsys.readouterr().err
