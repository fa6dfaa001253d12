"""The page of a fleet in a real Chromium: its heat map, its controls, its accessibility."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastcheck.cli.main import main
from fastcheck.fleet.findings import Cell, FleetFinding, FleetRank, FleetReport, Suspect
from fastcheck.fleet.page import write_fleet_page
from fastcheck.fleet.store import Folder
from support.browser import PROGRAM, Tab, browser
from support.paths import ROOT
from support.programs.synthetic_fleets import generator

pytest.importorskip("duckdb")
pytest.importorskip("pyarrow")
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium on this machine")

READY = "document.documentElement.dataset.ready === 'true'"
AXE = ROOT / "frontend" / "node_modules" / "axe-core" / "axe.min.js"
RANKS, STEPS = 32, 24
BLUE, MAGENTA, WHITE = [0x1D, 0x4F, 0xD8], [0xC4, 0x00, 0x7A], [0xFF, 0xFF, 0xFF]
ORDINARY = [0xD3, 0xDD, 0xE7]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rank 5 has other bits from step 2 on, rank 9 a NaN in step 4, rank 30 ends after step 9."""
    place = tmp_path_factory.mktemp("fleet")
    synthetic = generator()
    faults = [
        synthetic.Fault("bitflip", (5,), 17, 2),
        synthetic.Fault("nan", (9,), 3, 4),
        synthetic.Fault("stuck", (30,), 0, 10),
    ]
    synthetic.write_fleet(Folder(place), synthetic.Shape(RANKS, 20, STEPS, 2), faults, 5)
    assert main(["fleet", str(place), "--html"]) == 1
    return place / "fleet-synthetic.html"


@pytest.fixture(scope="module")
def window() -> Iterator[Tab]:
    with browser() as tab:
        yield tab


def opened(window: Tab, page: Path, dark: bool = False) -> Tab:
    window.problems.clear()
    window.requests.clear()
    window.size(1280, 900, dark=dark)
    window.open(page, READY)
    return window


@pytest.fixture
def tab(window: Tab, page: Path) -> Tab:
    return opened(window, page)


def text(tab: Tab, selector: str) -> str:
    return str(tab.value(f"document.querySelector({json.dumps(selector)}).textContent"))


def pixel(tab: Tab, row: int, step: int, ranks: int = RANKS, steps: int = STEPS) -> Any:
    return tab.value(
        "(() => { const c = document.querySelector('.stage canvas');"
        " const w = document.getElementById('fleet-map-view').clientWidth;"
        " const left = Math.min(230, Math.max(140, w * 0.26));"
        f" const x = left + {step + 0.5} / {steps} * (w - left - 8);"
        f" const y = {row + 0.5} * Math.min(22, 620 / {ranks});"
        " return [...c.getContext('2d').getImageData(x, y, 1, 1).data].slice(0, 3) })()"
    )


def choose(tab: Tab, label: str, value: str) -> None:
    found = (
        "[...document.querySelectorAll('#fleet-map label')]"
        f".find(l => l.textContent.startsWith({json.dumps(label)})).querySelector('select, input')"
    )
    tab.value(
        f"(() => {{ const e = {found}; e.value = {json.dumps(value)};"
        " e.dispatchEvent(new Event('change')); e.dispatchEvent(new Event('input')) })()"
    )


def test_findings_stand_in_the_page_as_text(tab: Tab, page: Path) -> None:
    assert tab.problems == [] and tab.requests == [page.as_uri()]
    titles = tab.value("[...document.querySelectorAll('h2')].map(e => e.textContent)")
    assert titles == ["Verdict", "Ranks by steps", "Rank", "Unusual ranks"]
    assert text(tab, "#verdict .headline") == (
        "synthetic: 3 ranks of 32 are suspect: "
        "5 (host0000) from step 2, 9 (host0001) from step 4, 30 (host0003) from step 10"
    )
    rows = tab.value(
        "[...document.querySelectorAll('#verdict tbody tr')]"
        ".map(r => [...r.children].map(c => c.textContent))"
    )
    of_weight = next(row for row in rows if row[0] == "5")
    assert of_weight[:5] == ["5", "host0000", "synthetic", "S00005", "2"]
    assert of_weight[5].endswith(".weight")
    assert of_weight[6].startswith("15 of 16 replicas hold the same bits")
    assert text(tab, "#verdict").count("Try:") >= 3


def test_each_kind_of_cell_has_a_colour_of_its_own(tab: Tab) -> None:
    assert pixel(tab, 5, 1) == ORDINARY and pixel(tab, 5, 3) == BLUE
    assert pixel(tab, 9, 4) == MAGENTA
    assert pixel(tab, 30, 9) != WHITE and pixel(tab, 30, 10) == WHITE


def test_the_map_by_keyboard(tab: Tab) -> None:
    # The first accusation is chosen: the NaN of rank 9.
    assert text(tab, "#rank-name") == "rank 9 · host0001"
    tab.value("document.getElementById('fleet-map-view').focus()")
    for key in ("ArrowUp", "ArrowUp", "ArrowUp", "ArrowUp", "ArrowRight"):
        tab.press(key)
    expected = "rank 5 · host0000, step 5: differs from the replicas at 1 site"
    assert text(tab, "#fleet-map .status") == expected
    tab.press("Enter")
    assert text(tab, "#rank-name") == "rank 5 · host0000"
    assert "S00005" in text(tab, "#rank-detail") and "Try: " in text(tab, "#rank-detail")


def test_ranks_are_searched_and_chosen_in_the_table(tab: Tab) -> None:
    assert text(tab, "#fleet-map output") == "32 of 32 ranks"
    choose(tab, "Show", "named")
    assert text(tab, "#fleet-map output") == "3 of 32 ranks"
    assert pixel(tab, 0, 3, ranks=3) == BLUE
    choose(tab, "Show", "")
    choose(tab, "Search", "host0003")
    assert text(tab, "#fleet-map output") == "8 of 32 ranks"
    button = (
        "[...document.querySelectorAll('#fleet-table button')].find(b => b.textContent === '30')"
    )
    tab.value(f"{button}.click()")
    assert text(tab, "#rank-name") == "rank 30 · host0003"
    assert "last record: step 9" in text(tab, "#rank-detail")


def test_the_theme_changes_the_map(tab: Tab) -> None:
    tab.value("document.getElementById('theme').click()")
    assert pixel(tab, 5, 1) != ORDINARY


@pytest.mark.parametrize("width", [400, 1280])
def test_no_part_is_wider_than_the_window(tab: Tab, width: int) -> None:
    tab.size(width, 900)
    assert tab.value("document.documentElement.scrollWidth") <= width


def test_ten_thousand_ranks(window: Tab, tmp_path: Path) -> None:
    """A rank of ten thousand is less than a pixel high, and is seen."""
    ranks = {
        n: FleetRank(n, "n", f"host{n // 8:04d}", "<b>x</b>", f"S{n}", "tp=0", 0, 99, 10**5)
        for n in range(10_000)
    }
    ranks[4000] = replace(ranks[4000], last_step=49)
    cells = [Cell(6487, step, "outlying", 30.0, 3) for step in range(40, 100)]
    suspect = Suspect(6487, 40, "blocks.7.mlp", "60 steps")
    finding = FleetFinding("outlier", True, "a rank is repeatedly far", "test it", 40, (suspect,))
    gone = Suspect(4000, 50, "all sites", "last record: step 49")
    findings = (finding, FleetFinding("stopped", True, "one rank", "look", 50, (gone,)))
    steps = tuple(range(100))
    report = FleetReport("r", "duckdb", ranks, 1, 10**9, 0, 99, findings, tuple(cells), steps)
    assert write_fleet_page(report, tmp_path / "page.html") < 1_000_000
    tab = opened(window, tmp_path / "page.html")
    assert tab.problems == []
    assert pixel(tab, 6487, 70, 10_000, 100) not in (ORDINARY, WHITE)
    assert pixel(tab, 6487, 20, 10_000, 100) == pixel(tab, 5000, 70, 10_000, 100) == ORDINARY
    assert pixel(tab, 4000, 40, 10_000, 100) == ORDINARY
    assert pixel(tab, 4000, 60, 10_000, 100) == WHITE
    assert text(tab, "#fleet-map .status").startswith(
        "rank 6487 · host0810, step 40: about 31 robust"
    )
    choose(tab, "Rows", "readable")
    assert tab.value("document.getElementById('fleet-map-view').scrollHeight") > 10_000 * 15


@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not installed: npm ci in frontend/")
@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_nothing(window: Tab, page: Path, dark: bool) -> None:
    tab = opened(window, page, dark)
    tab.call("Runtime.evaluate", expression=AXE.read_text())
    found = tab.value("axe.run().then(r => r.violations.map(v => [v.id, v.nodes.length]))")
    assert found == []
