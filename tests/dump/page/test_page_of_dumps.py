"""The page of a dump: which operators it shows, their values, the reference, and the script."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastcheck
from fastcheck.cli.main import main
from fastcheck.dump import page as page_of_dump
from fastcheck.dump.page import BINS, dump_page, value_histogram, write_dump_page
from fastcheck.errors import LogError
from support.browser import PROGRAM, Tab, browser
from support.page_data import PageData
from support.paths import ROOT

READY = "document.documentElement.dataset.ready === 'true'"
AXE = ROOT / "frontend" / "node_modules" / "axe-core" / "axe.min.js"
HOSTILE = "</script><img src=x onerror=alert(1)>"


def header_of(page: str) -> dict[str, Any]:
    return PageData(page).header


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The logarithm of -1 among finite operators, with values and a reference."""
    directory = tmp_path_factory.mktemp("dump")
    x = torch.linspace(-1, 1, 41)
    with fastcheck.Dumper(directory, step=3, tensors=True, reference="cpu"):
        (x.mul(2).sub(1).log().add(1)).mul(3)
    return directory


def test_the_culprit_made_it_of_finite_inputs(dump: Path) -> None:
    page = dump_page(dump)
    header = header_of(page)
    calls = header["calls"]
    assert [call["op"] for call in calls] == [
        "aten.mul.Tensor",
        "aten.sub.Tensor",
        "aten.log",
        "aten.add.Tensor",
        "aten.mul.Tensor",
    ]
    assert header["culprit"] == 2 and header["reason"] == "made"
    assert "Call 2, aten.log · forward, made the first value that is not finite" in page
    given, made = calls[2]["tensors"]
    assert (given["side"], given["counts"], given["shape"]) == ("in", [0, 0, 0], [41])
    assert made["counts"] == [30, 0, 1] and sum(made["histogram"]["counts"]) == 10
    assert given["min"] == -3 and given["max"] == 1
    assert given["histogram"]["low"] == -3 and sum(given["histogram"]["counts"]) == 41
    reference = calls[0]["tensors"][-1]["reference"]
    assert reference["is_different"] is False and reference["error"] == 0
    assert "5 calls, all of them on this page." in page


def test_of_many_calls_those_around_the_culprit_are_shown(
    dump: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_of_dump, "_MOST", 3)
    monkeypatch.setattr(page_of_dump, "_BEFORE", 1)
    page = dump_page(dump / "step3")
    assert [call["number"] for call in header_of(page)["calls"]] == [1, 2, 3]
    assert "Calls 1 to 3 of 5 are on this page; 2 are left out." in page


def test_a_result_that_differs_from_the_reference(tmp_path: Path) -> None:
    with fastcheck.Dumper(tmp_path, step=0, reference="cpu"):
        torch.ones(4).mul(2).add(1)
    path = tmp_path / "step0" / "rank0" / "reference.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[-1] |= {"is_different": True, "error": 0.5}
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"n": "x"}]))
    page = dump_page(tmp_path)
    header = header_of(page)
    assert header["reason"] == "different" and header["culprit"] == lines[-1]["n"]
    call = header["calls"][header["culprit"]]
    assert call["tensors"][-1]["reference"]["error"] == 0.5
    assert call["tensors"][-1]["histogram"] is None  # no values were stored
    assert "is the first whose result differs from the reference" in page


def test_the_script_of_a_stop_is_on_the_page_as_text(dump: Path, tmp_path: Path) -> None:
    script = dump / "step3" / "rank0" / "replay.py"
    assert "is written where a run is stopped" in dump_page(dump)
    script.write_text(f"print({HOSTILE!r})\n")
    try:
        page = dump_page(dump)
    finally:
        script.unlink()
    assert f"python {script}" in page and "print(&#x27;&lt;/script&gt;" in page


def test_the_step_with_a_culprit_is_shown_and_the_others_are_named(tmp_path: Path) -> None:
    for step, value in ((1, 1.0), (2, 0.0), (3, 0.0)):
        with fastcheck.Dumper(tmp_path, step=step):
            torch.full((2,), value).reciprocal()
    page = dump_page(tmp_path)
    assert header_of(page)["reason"] == "made"
    assert str(tmp_path / "step2" / "rank0") in page and str(tmp_path / "step3" / "rank0") in page
    finite = dump_page(tmp_path / "step1")
    assert "Everything that this dump holds is finite." in finite
    assert header_of(finite)["culprit"] is None


def test_a_dump_that_is_cut_short_or_hostile(dump: Path, tmp_path: Path) -> None:
    with fastcheck.Dumper(tmp_path, step=0, tensors=True):
        torch.ones(4).add(1)
    place = tmp_path / "step0" / "rank0"
    (place / "index.json").unlink()
    calls = (place / "calls.jsonl").read_text().replace("aten.add", HOSTILE)
    more = json.dumps({"in": [{"seq": "x", "shape": "y", "value": ["a", "b"]}, 3], "out": 7})
    (place / "calls.jsonl").write_text(calls + more + '\n{"n": 1, "o')
    for path in place.glob("*.safetensors"):
        path.write_bytes(b"damaged")
    page = dump_page(tmp_path)
    assert "The dump has no end" in page and "stored tensors have no histogram" in page
    assert "<img" not in page[: page.index('id="header"')]
    assert [one["label"] for one in header_of(page)["calls"][-1]["tensors"]] == [""]
    with pytest.raises(LogError, match="there is no dump here"):
        dump_page(tmp_path / "step0" / "rank0" / "nothing")


def test_the_command_tells_a_dump_from_a_log(dump: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(["report", str(dump), "-o", str(tmp_path / "x.html")]) == 0
    assert header_of((tmp_path / "x.html").read_text())["kind"] == "dump"
    assert "x.html: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [
        (torch.tensor([1.0, float("nan"), 3.0, float("inf"), 2.0]), 1, 3),
        (torch.tensor([True, False, True]), 0, 1),
        (torch.tensor([[1 + 2j, 3 - 4j]]), -4, 3),
        (torch.tensor([-3e38, 3e38]), float(np.float32(-3e38)), float(np.float32(3e38))),
        (torch.tensor([-1.7e308, 1.7e308], dtype=torch.float64), -1.7e308, 1.7e308),
    ],
)
def test_histograms_count_every_finite_value(values: torch.Tensor, low: float, high: float) -> None:
    found = value_histogram(values)
    assert found is not None and (found["low"], found["high"]) == (low, high)
    parts = torch.view_as_real(values) if values.is_complex() else values
    expected, _ = np.histogram(
        parts.double().numpy()[np.isfinite(parts.double().numpy())] / 2, BINS, (low / 2, high / 2)
    )
    assert found["counts"] == expected.tolist()


def test_histograms_of_one_value_and_of_none() -> None:
    assert value_histogram(torch.full((3,), 2.5)) == {"low": 2.5, "high": 2.5, "counts": [3]}
    assert value_histogram(torch.tensor([float("nan")])) is None
    assert value_histogram(torch.zeros(0)) is None


@pytest.fixture(scope="module")
def tab(dump: Path) -> Iterator[Tab]:
    write_dump_page(dump, dump / "report.html")
    with browser() as window:
        window.size(1280, 900, dark=False)
        window.open(dump / "report.html", READY)
        yield window
        assert window.problems == []
        assert window.requests == [(dump / "report.html").as_uri()]


@pytest.mark.skipif(PROGRAM is None, reason="no Chromium on this machine")
def test_in_a_browser(tab: Tab) -> None:
    opened = (
        "[...document.querySelectorAll('#calls details[open] summary')].map(e => e.textContent)"
    )
    assert tab.value(opened) == ["2. outside the model · aten.log · forward first not finite "]
    row = "[...document.querySelectorAll('#calls details[open] tbody tr')[0].children]"
    cells = tab.value(f"{row}.map(e => e.textContent)")
    assert cells == [
        "→ self",
        "float32 41",
        "-3 to 1",
        "–",
        "-3",
        "1",
        "-1",
        "1.549",
        "2.44 %",
        "–",
    ]
    assert tab.value("document.querySelectorAll('#calls details[open] svg').length") == 2
    search = "document.getElementById('calls-search')"
    tab.value(f"{search}.value = 'mul'; {search}.dispatchEvent(new Event('input'))")
    assert tab.value("document.querySelector('#operators output').textContent") == "2 of 5 calls"
    tab.value(f"{search}.value = ''; {search}.dispatchEvent(new Event('input'))")
    tab.value("window.dispatchEvent(new Event('beforeprint'))")
    tab.wait_for("document.querySelectorAll('#calls table').length === 5")
    for width, dark in ((1280, True), (400, False)):
        tab.size(width, 900, dark=dark)
        assert tab.value("document.documentElement.scrollWidth") <= width
        if AXE.exists():
            tab.call("Runtime.evaluate", expression=AXE.read_text())
            found = tab.value("axe.run().then(r => r.violations.map(v => [v.id, v.nodes.length]))")
            assert found == []
