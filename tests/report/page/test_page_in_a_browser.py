"""The page in a real Chromium: its numbers, controls and accessibility; no network requests."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastcheck
from fastcheck.log.reader import read_log, read_watch
from fastcheck.record.format import RECORD_DTYPE
from fastcheck.report.page.write import write_page
from support.browser import PROGRAM, Tab, browser
from support.paths import ROOT
from support.programs import synthetic_logs

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium on this machine")

READY = "document.documentElement.dataset.ready === 'true'"
AXE = ROOT / "frontend" / "node_modules" / "axe-core" / "axe.min.js"
SITES, STEPS = 40, 60


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("log")
    synthetic_logs.write(directory, SITES, STEPS, watch=True)
    return directory


@pytest.fixture(scope="module")
def window() -> Iterator[Tab]:
    with browser() as tab:
        yield tab


@pytest.fixture
def tab(window: Tab, log: Path) -> Tab:
    """The page, as it is after it was opened."""
    write_page(log, log / "report.html")
    window.problems.clear()
    window.requests.clear()
    window.size(1280, 900, dark=False)
    window.open(log / "report.html", READY)
    return window


def text(tab: Tab, selector: str) -> str:
    return str(tab.value(f"document.querySelector({json.dumps(selector)}).textContent"))


def cells(tab: Tab, selector: str) -> list[list[str]]:
    rows = f"[...document.querySelectorAll({json.dumps(selector)})]"
    found: list[list[str]] = tab.value(f"{rows}.map(r => [...r.children].map(c => c.textContent))")
    return found


def shown(value: float) -> str:
    """A number as the page's tables have it."""
    if value == 0 or abs(value) >= 1e7 or abs(value) < 1e-3:
        return "0" if value == 0 else f"{value:.2e}".replace("e-0", "e-").replace("e+0", "e+")
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{float(f'{value:.4g}'):g}"


def test_opens_without_a_problem_or_a_request(tab: Tab, log: Path) -> None:
    assert tab.problems == []
    assert tab.requests == [(log / "report.html").as_uri()]
    titles = tab.value("[...document.querySelectorAll('h2')].map(e => e.textContent)")
    assert titles == [
        "Verdict",
        "Layers by steps",
        "Site",
        "Steps",
        "What was unusual",
        "How it spread",
        "Sites",
        "Weights that do not move",
        "Environment and options",
    ]


def test_a_warning_is_the_headline_and_its_first_mover_is_drawn(
    window: Tab, tmp_path: Path
) -> None:
    synthetic_logs.write(tmp_path, 12, 120, ranks=2, event_step=-1)
    mover = read_log(tmp_path).sites[3]
    line = {
        "step": 90,
        "rank": 1,
        "kind": "loss_spike",
        "site": None,
        "is_warning": True,
        "cause": "layer",
        "movers": [{"step": 88, "site": str(mover), "signal": "rms", "score": 9.0}],
        "text": "step 90: the loss is 9, usual is 0.2. First out of its range: the loss",
    }
    dead = {**line, "step": 50, "kind": "dead", "text": "step 50: it is zero", "movers": []}
    (tmp_path / "watch-rank1.jsonl").write_text(f"{json.dumps(dead)}\n{json.dumps(line)}\n")
    write_page(tmp_path, tmp_path / "report.html")
    window.problems.clear()
    window.size(1280, 900, dark=False)
    window.open(tmp_path / "report.html", READY)
    headline = "step 90 on rank 1 (node0): the loss is 9, usual is 0.2."
    assert text(window, ".headline.bad") == headline
    assert text(window, ".headline + p") == "First out of its range: the loss"
    tries = window.value("[...document.querySelectorAll('#verdict li')].map(e => e.textContent)")
    assert tries == [
        f"Look at {mover}, the first tensor that left its range: its curves are below.",
        "If the loss does not come down by itself, go back to a checkpoint from before step 90.",
    ]
    assert text(window, "#verdict > p:last-child").startswith("2 warnings of the watch, listed")
    assert text(window, "#site-name").startswith(f"{mover.module} · ")
    assert text(window, "#site-name").endswith(", rank 1")
    assert text(window, "#around strong") == "88"
    assert window.value("document.querySelector('#site .plot canvas') !== null")
    assert window.problems == []


def test_what_did_not_warn_is_told_too(window: Tab, tmp_path: Path) -> None:
    synthetic_logs.write(tmp_path, 12, 40, event_step=-1)
    text_of_event = "step 30: the learning rate was changed from 0.1 to 1"
    line = {"step": 30, "rank": 0, "kind": "settings", "site": None, "text": text_of_event}
    (tmp_path / "watch-rank0.jsonl").write_text(json.dumps(line) + "\n")
    write_page(tmp_path, tmp_path / "report.html")
    window.open(tmp_path / "report.html", READY)
    assert text(window, ".headline") == (
        f"Every number that was read is finite. Unusual, but without a warning: {text_of_event}"
    )
    assert not window.value("document.querySelector('.headline.good')")
    # The tensor that came nearest to the end of its dtype is drawn.
    rooms = [float(row[6]) for row in cells(window, "#site-table tbody tr")]
    facts = window.value("[...document.querySelectorAll('.facts dd')].map(e => e.textContent)")
    assert f"{min(rooms):.1f} bits" in facts


def test_first_shows_the_site_of_the_event(tab: Tab, log: Path) -> None:
    event = read_log(log).events[0]
    assert text(tab, "#site-name") == "blocks.0.norm · forward · output"
    assert event.site.module == "blocks.0.norm"
    assert text(tab, "#around strong") == str(event.step) == "54"
    assert len(cells(tab, "#events tbody tr")) == 1


def unfold(tab: Tab) -> None:
    tab.value("document.querySelector('#heatmap .more').click()")


def test_a_click_on_a_cell_shows_the_numbers_of_the_log(tab: Tab, log: Path) -> None:
    unfold(tab)
    tab.value("document.getElementById('heatmap-view').scrollIntoView()")
    box = tab.value(
        "(() => { const b = document.querySelector('.stage canvas').getBoundingClientRect();"
        " return [b.left, b.top, b.width] })()"
    )
    left, top, width = box
    labels = min(230, max(140, width * 0.26))
    row, step = 9, 20
    line = min(22, 620 / SITES)
    tab.click(left + labels + (step + 0.5) / STEPS * (width - labels - 8), top + (row + 0.5) * line)
    view = read_log(log)
    site = view.sites[row]
    assert text(tab, "#site-name") == f"{site.module} · {site.direction} · {site.tensor_name}"
    mine = view.records[view.records["site"] == row]
    found = cells(tab, "#around tbody tr")
    assert [int(cell[0]) for cell in found] == list(range(step - 8, step + 5))
    for cell in found:
        record = mine[int(cell[0])]
        numel = int(record["numel"])
        assert cell[1] == shown(max(abs(float(record["min"])), float(record["max"])))
        assert cell[2] == shown(float((record["sum_sq"] / numel) ** 0.5))
        assert cell[3] == shown(float(record["sum"] / numel))
        assert cell[4] == f"{100 * int(record['zero_count']) / numel:.2f} %"
        assert cell[5] == "–"


def test_events_of_the_watch_are_in_a_table_and_choose_their_site(tab: Tab, log: Path) -> None:
    rows = cells(tab, "#watched tbody tr")
    assert [row[:2] for row in rows] == [
        [str(line["step"]), line["kind"].replace("_", " ")] for line in read_watch(str(log))
    ]
    forecast = next(row for row in rows if row[1] == "headroom")
    assert forecast[5:8] == [
        "49 to 57",
        "blocks.0.norm (LayerNorm) · forward · output (abs max, step 24)",
        "precision",
    ]
    shift = next(row for row in rows if row[1] == "shift")
    tab.value("document.querySelector('#watched tbody button').click()")
    assert text(tab, "#site-name").startswith(shift[2].partition(" (")[0])
    assert text(tab, "#around strong") == shift[0]
    assert text(tab, "#heatmap .status").endswith(", shift")


def test_the_heat_map_by_keyboard(tab: Tab) -> None:
    tab.value("document.getElementById('heatmap-view').focus()")
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        tab.press(key)
    status = text(tab, "#heatmap .status")
    assert status.startswith("blocks.1.attn.proj · forward · output, step 55: abs max ")
    tab.press("Enter")
    assert text(tab, "#site-name") == "blocks.1.attn.proj · forward · output"
    assert text(tab, "#around strong") == "55"


def test_a_click_on_the_map_scrolls_to_the_curves(tab: Tab) -> None:
    view = "document.getElementById('heatmap-view')"
    tab.value(f"{view}.scrollIntoView()")
    x, y = tab.value(
        f"(() => {{ const b = {view}.getBoundingClientRect(); return [b.left, b.top] }})()"
    )
    tab.click(x + 400, y + 40)
    top = "document.getElementById('site').getBoundingClientRect().top"
    assert abs(tab.value(top)) < 2


def test_a_tip_is_beside_the_cursor_and_inside_the_window(tab: Tab) -> None:
    tip = "document.querySelector('#heatmap .tip')"
    tab.value("document.getElementById('heatmap-view').scrollIntoView()")
    left, top, right = tab.value(
        "(() => { const b = document.getElementById('heatmap-view').getBoundingClientRect();"
        " return [b.left, b.top, b.right] })()"
    )
    assert tab.value(f"{tip}.hidden")
    tab.settle()  # scrolling hides a tip
    for x in (left + 400, right - 12):
        tab.move(x, top + 40)
        assert not tab.value(f"{tip}.hidden")
        assert text(tab, "#heatmap .tip") == text(tab, "#heatmap .status") != ""
        box = tab.value(
            f"(() => {{ const b = {tip}.getBoundingClientRect();"
            " return [b.left, b.top, b.right, b.bottom] })()"
        )
        assert 0 <= box[0] <= x + 15 and box[2] <= 1280 and top + 40 < box[1] < top + 60
    tab.move(left + 400, 890)
    assert tab.value(f"{tip}.hidden")
    tab.value("document.getElementById('heatmap-view').focus()")
    tab.press("ArrowDown")
    assert not tab.value(f"{tip}.hidden")


def drawn(tab: Tab, width: int) -> list[str]:
    """The texts that the heat map draws at this width: names of rows and numbers of its axis."""
    tab.size(width, 900)
    # What is printed is drawn anew before the event returns: nothing to wait for.
    found: list[str] = tab.value(
        "(() => { const texts = [], own = CanvasRenderingContext2D.prototype.fillText;"
        "CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {"
        " if (this.canvas.closest('#heatmap')) texts.push(text);"
        " return own.call(this, text, ...rest) };"
        "try { window.dispatchEvent(new Event('beforeprint')); return texts }"
        "finally { CanvasRenderingContext2D.prototype.fillText = own } })()"
    )
    assert len(found) > 20
    return found


@pytest.mark.parametrize("width", [400, 1280])
def test_names_of_rows_keep_their_role_and_tell_a_weight_from_its_gradient(
    tab: Tab, width: int
) -> None:
    unfold(tab)
    names = [name for name in drawn(tab, width) if " " in name]
    roles = {name.rpartition(" ")[2] for name in names}
    assert {"out", "in[0]", "out[0].grad", "weight.grad", "weight"} <= roles
    assert {name.split()[-2] for name in names if name.endswith(".grad")} == {"←"}
    # The number of a block stays where its path is cut.
    blocks = {name for name in names if name.endswith("fc2 ↻ weight")}
    assert {re.findall(r"\d", name)[0] for name in blocks} == {"0", "1"}
    assert any(name.startswith("0…proj ← ") for name in names) == (width == 400)
    assert text(tab, "#heatmap .names") == "← backward pass · ↻ optimizer's step"


def test_a_common_prefix_is_left_out_of_the_names(window: Tab, tmp_path: Path) -> None:
    synthetic_logs.write(tmp_path, 30, 20)
    path = tmp_path / "sites-rank0.jsonl"
    lines = path.read_text().replace('"blocks.0.norm"', '"lm_head"')
    path.write_text(lines.replace('"blocks.', '"transformer.h.'))
    write_page(tmp_path, tmp_path / "report.html")
    window.size(1280, 900, dark=False)
    window.open(tmp_path / "report.html", READY)
    assert text(window, "#heatmap .names").endswith("· names without transformer.")
    names = [name for name in drawn(window, 1280) if " " in name]
    assert "h.0.attn.qkv out" in names and "lm_head out" in names
    assert not any("transformer" in name for name in names)
    # A number alone would say nothing: it is not left out down to "0.attn".
    assert text(window, "#site-name").startswith("transformer.h.0.")


def test_ticks_of_steps_are_round(tab: Tab) -> None:
    ticks = [int(text) for text in drawn(tab, 1280) if text.isdecimal()]
    assert len(set(ticks)) >= 5 and all(tick % 5 == 0 for tick in ticks)


def test_rows_of_the_optimizer_are_folded_but_for_those_not_finite(tab: Tab, log: Path) -> None:
    def shown() -> int:
        return sum("↻" in name for name in drawn(tab, 1280))

    view = read_log(log)
    bad = {int(site) for site in view.records["site"][view.records["nan_count"] > 0]}
    turns = {n for n, site in view.sites.items() if site.direction == "optimizer"}
    assert turns & bad and turns - bad
    rows = f"{len(turns - bad)} rows of the optimizer's step"
    assert text(tab, "#heatmap .more") == f"Show {rows}" and shown() == len(turns & bad)
    unfold(tab)
    assert text(tab, "#heatmap .more") == f"Hide {rows}" and shown() == len(turns)
    # Where nothing else is left, they are what was asked for.
    unfold(tab)
    role = "document.querySelectorAll('#heatmap select')[1]"
    tab.value(f"{role}.value = 'optimizer param'; {role}.dispatchEvent(new Event('change'))")
    assert tab.value("document.querySelector('#heatmap .more').hidden")
    assert shown() == sum(view.sites[n].role == "param" for n in turns)


def test_search_filters_the_table_and_the_heat_map(tab: Tab) -> None:
    assert len(cells(tab, "#site-table tbody tr")) == SITES
    search = "document.getElementById('sites-search')"
    tab.value(f"{search}.value = 'MLP.fc1 weight'; {search}.dispatchEvent(new Event('input'))")
    rows = cells(tab, "#site-table tbody tr")
    assert rows and all("mlp.fc1" in row[0] and "weight" in row[0] for row in rows)
    count = f"{len(rows)} of {SITES} sites"
    assert text(tab, "#sites output") == text(tab, "#heatmap output") == count
    assert tab.value("document.getElementById('heatmap-search').value") == "MLP.fc1 weight"
    tab.value(f"{search}.value = 'blocks.*.fc2'; {search}.dispatchEvent(new Event('input'))")
    rows = cells(tab, "#site-table tbody tr")
    assert rows and {row[0].split(" ")[0] for row in rows} == {
        "blocks.0.mlp.fc2",
        "blocks.1.mlp.fc2",
    }


def test_the_table_holds_the_numbers_of_the_log_and_sorts(tab: Tab, log: Path) -> None:
    head = "[...document.querySelectorAll('#site-table thead button')]"
    tab.value(f"{head}.find(b => b.textContent === 'largest abs max').click()")
    assert text(tab, "#site-table th[aria-sort=descending]") == "largest abs max"
    rows, view = cells(tab, "#site-table tbody tr"), read_log(log)
    peaks = []
    for site in view.sites:
        mine = view.records[view.records["site"] == site]
        finite = mine[(mine["max"] >= mine["min"])]
        peaks.append(max(float(finite["max"].max()), -float(finite["min"].min())))
    assert [row[4] for row in rows] == [shown(peak) for peak in sorted(peaks, reverse=True)]


def test_dark_and_light(tab: Tab, log: Path) -> None:
    back = "getComputedStyle(document.body).backgroundColor"
    pixel = (
        "(() => { const c = document.querySelector('.stage canvas');"
        " return [...c.getContext('2d').getImageData(c.width - 40, 5, 1, 1).data] })()"
    )
    light = tab.value(back), tab.value(pixel)
    assert text(tab, "#theme") == "Dark"
    tab.value("document.getElementById('theme').click()")
    assert text(tab, "#theme") == "Light"
    assert (tab.value(back), tab.value(pixel)) != light
    tab.value("document.getElementById('theme').click()")
    assert (tab.value(back), tab.value(pixel)) == light
    # What was chosen here goes before what the system asks for, until the page is opened again.
    tab.size(1280, 900, dark=True)
    assert tab.value(back) == light[0]
    tab.open(log / "report.html", READY)
    assert tab.value(back) == "rgb(13, 17, 23)" != light[0]


def test_what_is_not_finite_has_a_colour_of_its_own(tab: Tab) -> None:
    unfold(tab)

    def pixel(row: int, step: float) -> Any:
        return tab.value(
            "(() => { const c = document.querySelector('.stage canvas');"
            " const w = document.getElementById('heatmap-view').clientWidth;"
            " const left = Math.min(230, Math.max(140, w * 0.26));"
            f" const x = left + {step + 0.5} / {STEPS} * (w - left - 8);"
            f" const y = {row + 0.5} * Math.min(22, 620 / {SITES});"
            " return [...c.getContext('2d').getImageData(x, y, 1, 1).data].slice(0, 3) })()"
        )

    assert pixel(5, 56) == [0xC4, 0x00, 0x7A]
    assert pixel(5, 50) != [0xC4, 0x00, 0x7A]


@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_is_wider_than_the_window(tab: Tab, width: int) -> None:
    tab.size(width, 900)
    assert tab.value("document.documentElement.scrollWidth") <= width
    # Captions stay in view where their tables scroll, and so does the text of the verdict.
    tab.value("document.querySelectorAll('.scrolling').forEach(e => e.scrollTo(200, 0))")
    ends = "[...document.querySelectorAll('caption span, #verdict pre')].map(e => {{ const {0} }})"
    boxes = ends.format("b = e.getBoundingClientRect(); return [b.left, b.right, e.scrollWidth]")
    for left, right, content in tab.value(boxes):
        assert 0 <= left < right <= width and (width > 400 or content <= width)


def test_ranks_by_steps(window: Tab, tmp_path: Path) -> None:
    """Each cell is that of the rank's site which is farthest from the median of the ranks."""
    synthetic_logs.write(tmp_path, 12, 20, ranks=3, event_step=-1)
    path = tmp_path / "records-rank0-000000.bin"
    data = np.fromfile(path, RECORD_DTYPE)
    # All ranks have the records of the first, but one.
    data["max"][(data["step"] == 6) & (data["site"] == 3)] = 2.0
    data["min"][(data["step"] == 6) & (data["site"] == 3)] = -2.0
    for rank in (0, 2):
        data.tofile(tmp_path / f"records-rank{rank}-000000.bin")
    data["max"][(data["step"] == 6) & (data["site"] == 3)] = 64.0
    data["nan_count"][(data["step"] == 11) & (data["site"] == 1)] = 7
    data.tofile(tmp_path / "records-rank1-000000.bin")
    write_page(tmp_path, tmp_path / "report.html")
    window.problems.clear()
    window.size(1280, 900, dark=False)
    window.open(tmp_path / "report.html", READY)
    window.value("document.getElementById('rank-map-view').focus()")
    for key in ("ArrowDown", "Home", *["ArrowRight"] * 6):
        window.press(key)
    status = text(window, "#rank-map .status")
    assert status.startswith("rank 1, step 6: ")
    assert "abs max 64, 32 times the median of the ranks" in status
    window.press("Enter")
    assert text(window, "#site-name").endswith(", rank 1")
    assert text(window, "#around strong") == "6"
    for key in ["ArrowRight"] * 5:
        window.press(key)
    status = text(window, "#rank-map .status")
    assert status.startswith("rank 1, step 11: ") and status.endswith(", not finite")
    assert window.problems == []


def test_hostile_names_are_text(window: Tab, tmp_path: Path) -> None:
    hostile = "</script><img src=x onerror='window.broken = 1'>"
    synthetic_logs.write(tmp_path, 8, 10)
    for name in ("sites-rank0.jsonl", "events-rank0.jsonl"):
        path = tmp_path / name
        path.write_text(path.read_text().replace("attn.qkv", hostile))
    write_page(tmp_path, tmp_path / "report.html")
    window.problems.clear()
    window.open(tmp_path / "report.html", READY)
    assert hostile in text(window, "#site-name")
    assert window.value("document.images.length") == 0
    assert window.value("typeof window.broken") == "undefined" and window.problems == []


def test_a_model_whose_modules_lie_in_no_other(window: Tab, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    with fastcheck.install(model, log_dir=tmp_path / "log"):
        model(torch.ones(3, 4)).sum().backward()
    write_page(tmp_path / "log", tmp_path / "report.html")
    window.problems.clear()
    window.open(tmp_path / "report.html", READY)
    assert " · " in text(window, "#site-name") and window.problems == []


@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not installed: npm ci in frontend/")
@pytest.mark.parametrize("dark", [False, True])
def test_no_rule_of_axe_is_violated(tab: Tab, dark: bool) -> None:
    tab.size(1280, 900, dark=dark)
    tab.call("Runtime.evaluate", expression=AXE.read_text())
    tab.value("document.querySelectorAll('details').forEach(d => { d.open = true })")
    found = tab.value("axe.run().then(r => r.violations.map(v => [v.id, v.nodes.length]))")
    assert found == []
