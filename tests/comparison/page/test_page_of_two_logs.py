"""The data of a comparison's page: where two logs part, and by how much."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastcheck
from fastcheck.cli.main import main
from support.page_data import PageData
from support.programs import two_logs

SITES, STEPS, PARTS_AT, SITE = 30, 40, 25, 4


def page_of(directory: Path, actual: Any, reference: Any, **options: Any) -> str:
    path = directory / "page.html"
    fastcheck.compare(actual, reference, html=path, **options)
    return path.read_text()


@pytest.fixture
def logs(tmp_path: Path) -> tuple[Path, Path]:
    return two_logs.write(tmp_path, SITES, STEPS, PARTS_AT, SITE)


def test_the_error_of_each_cell_over_its_limit(tmp_path: Path, logs: tuple[Path, Path]) -> None:
    found = PageData(page_of(tmp_path, *logs, ask_all=True))
    names = found.header["sites"]
    rows = [names["name"][site] for site in found.header["rows"]["site"]]
    row = next(
        at
        for at, site in enumerate(found.header["rows"]["site"])
        if names["module"][site] == "blocks.0.norm" and names["role"][site] == "output"
    )
    starts = found.header["axis"]["starts"]
    assert starts == list(range(-1, STEPS)) and len(rows) == SITES
    # The norms differ by half; the limit of float16 is 0.005.
    at = starts.index(PARTS_AT)
    assert found.arrays["excess"][row, at:] == pytest.approx(100)
    assert (found.arrays["excess"][row, 1:at] == 0).all()
    others = [other for other in range(SITES) if other not in (row, rows.index("loss"))]
    assert (np.nan_to_num(found.arrays["excess"][others]) == 0).all()
    mine, other = found.arrays["abs_max.high"], found.arrays["reference.abs_max.high"]
    assert mine[row, at:] == pytest.approx(1.5 * other[row, at:])
    assert np.array_equal(mine[row, :at], other[row, :at], equal_nan=True)


def test_where_the_two_part(tmp_path: Path, logs: tuple[Path, Path]) -> None:
    header = PageData(page_of(tmp_path, *logs, ask_all=True)).header
    parted = {one["signal"]: one for one in header["comparison"]["parted"]}
    assert list(parted) == ["tensors: forward", "tensors: loss", "loss"]
    for one in parted.values():
        assert (one["first_inexact"], one["first_different"]) == (PARTS_AT, PARTS_AT)
    loss = parted["loss"]
    assert loss["actual"] == pytest.approx(2 * loss["reference"])
    first = header["first"]
    assert first["step"] == PARTS_AT and first["row"] == parted["tensors: forward"]["row"]
    rows = header["rows"]
    assert rows["different"][first["row"]] == STEPS - PARTS_AT
    assert rows["same"][first["row"]] == PARTS_AT
    assert rows["records"][first["row"]] == STEPS
    assert rows["worst_error"][first["row"]] == pytest.approx(0.5)


def test_two_equal_logs(tmp_path: Path, logs: tuple[Path, Path]) -> None:
    page = page_of(tmp_path, logs[1], logs[1])
    found = PageData(page)
    assert "identical: equal to the bit" in page
    assert found.header["comparison"]["parted"] == [] and found.header["first"] is None
    assert np.nan_to_num(found.arrays["excess"]).max() == 0


def test_a_nan_on_one_side_is_marked(tmp_path: Path, logs: tuple[Path, Path]) -> None:
    path = logs[0] / "records-rank0-000000.bin"
    records = np.fromfile(path, fastcheck.types.RECORD_DTYPE)
    at = int(np.flatnonzero((records["step"] == 30) & (records["site"] == 7))[0])
    records["nan_count"][at] = 3
    path.write_bytes(records.tobytes())
    found = PageData(page_of(tmp_path, *logs, ask_all=True))
    bad = np.argwhere(found.arrays["bad"] != 0)
    assert bad.tolist() == [[found.header["rows"]["bad_records"].index(1), 31]]
    assert found.arrays["excess"][tuple(bad[0])] > 1e100


def test_hostile_names_are_text(tmp_path: Path) -> None:
    hostile = "</script><img src=x onerror=alert(1)>"
    page = page_of(tmp_path, {"a": torch.zeros(3), hostile: torch.ones(2)}, {"a": torch.ones(3)})
    visible = page[: page.index('id="header"')]
    assert "<img" not in visible and "&lt;img" in visible


def test_of_dumps_the_pairs_are_listed_with_both_values(tmp_path: Path) -> None:
    for name, value in (("a", 1.5), ("b", 1.0)):
        with fastcheck.Dumper(tmp_path / name, step=0, tensors=True):
            torch.full((8,), value).mul(2)
    page = page_of(tmp_path, tmp_path / "a", tmp_path / "b")
    header = PageData(page).header
    pairs = header["comparison"]["pairs"]
    assert [pair["state"] for pair in pairs] == ["different"] * len(pairs) and pairs
    last = pairs[-1]
    assert "aten.mul" in last["name"] and last["max_abs"] == 1.0
    assert (last["actual"]["max"], last["reference"]["max"]) == (3.0, 2.0)
    assert last["actual"]["shape"] == [8] and "different: " in page


def test_settings_alone_make_a_page(tmp_path: Path) -> None:
    sides = []
    for version in ("1", "2"):
        path = tmp_path / f"{version}.json"
        path.write_text(json.dumps({**fastcheck.environment(), "torch": {"version": version}}))
        sides.append(path)
    page = page_of(tmp_path, *sides)
    assert PageData(page).header["rows"]["site"] == [] and "torch.version" in page


def test_the_commands(tmp_path: Path, logs: tuple[Path, Path], capsys: Any) -> None:
    actual, reference = map(str, logs)
    place = tmp_path / "x.html"
    assert main(["compare", actual, reference, "--html", str(place)]) == 1
    assert PageData(place.read_text()).header["kind"] == "comparison"
    assert PageData(place.read_text()).header["comparison"]["reference"] == reference
    assert main(["compare", actual, reference, "--html", str(logs[1] / "meta-rank0.json")]) == 2
    assert "would replace a file that is compared" in capsys.readouterr().err
