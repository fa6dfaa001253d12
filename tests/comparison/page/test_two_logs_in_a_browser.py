"""The page of two runs in a real Chromium: its numbers, keys and accessibility; no request."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import fastcheck
from support.browser import PROGRAM, Tab, browser
from support.paths import ROOT
from support.programs import two_logs

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium on this machine")

READY = "document.documentElement.dataset.ready === 'true'"
AXE = ROOT / "frontend" / "node_modules" / "axe-core" / "axe.min.js"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    """The page of two logs that part at step 25."""
    directory = tmp_path_factory.mktemp("logs")
    actual, reference = two_logs.write(directory, 30, 40, 25, 4)
    fastcheck.compare(actual, reference, ask_all=True, html=directory / "difference.html")
    with browser() as window:
        window.size(1280, 900, dark=False)
        window.open(directory / "difference.html", READY)
        yield window
        assert window.problems == []
        assert window.requests == [(directory / "difference.html").as_uri()]


def text(tab: Tab, selector: str) -> str:
    return str(tab.value(f"document.querySelector({selector!r}).textContent"))


def test_sections_and_where_they_part(tab: Tab) -> None:
    titles = tab.value("[...document.querySelectorAll('h2')].map(e => e.textContent)")
    assert titles == [
        "Verdict",
        "Where they part",
        "Difference, layers by steps",
        "Tensor",
        "Steps of both runs",
        "Tensors of both sides",
    ]
    place = "blocks.0.norm · forward · output[0]"
    assert text(tab, ".headline").startswith("different: forward and loss.")
    assert text(tab, ".headline").endswith(f" First: {place}, step 25.")
    assert f"Step 25, {place} was equal to the bit in the steps before" in text(tab, "#verdict ol")
    expected = "The runs part at step 25, first in forward (blocks.0.norm · forward · output[0])."
    assert text(tab, "#parted-first") == expected
    assert text(tab, "#site-name") == "blocks.0.norm · forward · output[0]"
    assert text(tab, "#around strong") == "25"
    cells = tab.value(
        "[...document.querySelector('#around strong').closest('tr').children]"
        ".map(c => c.textContent)"
    )
    number = [float(cell.replace(",", "")) for cell in cells]
    assert number[1] == pytest.approx(1.5 * number[2], rel=1e-3) and number[7] == 100


def test_the_difference_by_keyboard_and_by_search(tab: Tab) -> None:
    tab.value("document.getElementById('heatmap-view').focus()")
    tab.press("ArrowLeft")
    status = text(tab, "#heatmap .status")
    assert status.startswith("blocks.0.norm · forward · output[0], step 24: equal to the bit")
    tab.press("ArrowRight")
    assert "step 25: error 100 times its limit" in text(tab, "#heatmap .status")
    verdict = "[...document.querySelectorAll('#sites select')].at(-1)"
    tab.value(f"{verdict}.value = 'different'; {verdict}.dispatchEvent(new Event('change'))")
    assert tab.value("document.querySelectorAll('#site-table tbody tr').length") == 2
    tab.value(f"{verdict}.value = ''; {verdict}.dispatchEvent(new Event('change'))")


@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not installed: npm ci in frontend/")
def test_no_rule_of_axe_is_violated_and_nothing_is_too_wide(tab: Tab) -> None:
    tab.call("Runtime.evaluate", expression=AXE.read_text())
    tab.value("document.querySelectorAll('details').forEach(d => { d.open = true })")
    for width, dark in ((1280, True), (400, False)):
        tab.size(width, 900, dark=dark)
        assert tab.value("document.documentElement.scrollWidth") <= width
        found = tab.value("axe.run().then(r => r.violations.map(v => [v.id, v.nodes.length]))")
        assert found == []
