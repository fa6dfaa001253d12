"""HTML for notebooks: escaped, bounded, without script, and no error of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck import notebook
from fastcheck.record.format import Verdict
from fastcheck.record.site import Site
from fastcheck.watch.event import Mover
from support.records import record_builder as build

NASTY = "<script>alert(1)</script>\x1b[2J\"'&"


class Parts(HTMLParser):
    """Tags, attributes and text; every tag is closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, Any]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parts_of(shown: Any) -> Parts:
    """Of what a notebook is given, which has nothing that runs or is loaded."""
    html = shown._repr_html_()
    parts = Parts(html)
    assert set(parts.tags) <= {"div", "strong", "table", "tr", "td", "th"}, html
    assert parts.attributes <= {"style"}
    assert "url(" not in html and "\x1b" not in html
    assert not re.search(r"(?<!-)color:\s*(?!inherit)", html)  # that of the page, light or dark
    return parts


@pytest.fixture
def wide_monitor(fresh_start: None) -> Iterator[fastcheck.Monitor]:
    """More than a thousand sites, one of which has a nasty name and one a NaN."""
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(170)])
    model.add_module("x" + NASTY.replace(".", ""), nn.Linear(2, 2))
    monitor = fastcheck.install(model, overflow_nums=-1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with torch.no_grad():
        model[150].bias[0] = float("nan")
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    yield monitor
    monitor.remove()


def test_a_monitor_shows_the_worst_of_many_sites(wide_monitor: fastcheck.Monitor) -> None:
    parts = parts_of(wide_monitor)
    text = " ".join(parts.text)
    assert parts.tags.count("tr") <= 1 + notebook.MOST_ROWS + 12
    assert len(wide_monitor._repr_html_()) < 60_000
    assert "parameter 150.bias" in text and "<fastcheck.Monitor: 172 modules" in text
    more = re.search(r"and ([\d,]+) more(?! events)", text)
    assert more and int(more.group(1).replace(",", "")) > 1000
    # The place where it began is named, and its rows stand out.
    assert "step 0: origin" in text or "step 0: arrived" in text
    assert "background:rgba" in wide_monitor._repr_html_()


def test_a_monitor_is_not_changed_by_being_shown(fresh_start: None) -> None:
    model = nn.Linear(2, 2)
    monitor = fastcheck.install(model)
    assert "steps" in " ".join(parts_of(monitor).text)  # before anything has run
    model(torch.ones(1, 2)).sum().backward()
    before = monitor.records().tobytes()
    parts_of(monitor)
    assert monitor.records().tobytes() == before
    monitor.remove()
    parts_of(monitor)


def test_stats() -> None:
    x = torch.tensor([1.5, float("nan"), -3.0])
    parts = parts_of(fastcheck.stats(x, record="full"))
    cells = dict(zip(parts.text[1::2], parts.text[2::2]))
    assert parts.text[0] == "3 elements, float32" and cells["nan_count"] == "1"
    assert cells["min"] == "-3" and cells["checksum"] == f"{fastcheck.checksum(x):016x}"
    many = fastcheck.stats([torch.ones(4)] * 50)
    assert "and 30 more" in parts_of(many).text


def test_event() -> None:
    site = build.site(NASTY, NASTY, label=NASTY)
    bad = build.record("float16", nan_count=3, high=7.5, step=12)
    event = build.event(site, bad, Verdict.ARRIVED, NASTY * 100)
    text = " ".join(parts_of(event).text)
    assert text.startswith("arrived: <script>") and r"\x1b[2J" in text and "7.5" in text
    assert len(event._repr_html_()) < 5_000
    parts_of(build.event(site, build.record(numel=0, depth=1)))
    nothing = build.record(nan_count=1000, low=float("inf"), high=float("-inf"))
    assert "inf" not in parts_of(build.event(build.site(), nothing)).text


def test_watch_event() -> None:
    site = Site(NASTY, "Linear", "forward", "output", 0, "output")
    movers = tuple(Mover(step, site, "rms", 7.0) for step in range(30))
    event = fastcheck.types.WatchEvent(
        5, "loss_spike", site, 2.0, 1.0, float("nan"), NASTY, True, 0, movers, "layer", (3, 9)
    )
    parts = parts_of(event)
    assert "3 to 9" in parts.text and "and 10 more" in parts.text and "layer" in parts.text
    parts_of(fastcheck.types.WatchEvent(5, "update", None, 2.0, 1.0, 1.0, "x", False))


def test_comparison() -> None:
    names = [f"layer.{number}" for number in range(40)]
    actual = {name: torch.ones(3) for name in [*names, NASTY]}
    reference = {name: torch.zeros(3) for name in [*names, NASTY]}
    found = fastcheck.compare(actual, reference)
    parts = parts_of(found)
    assert parts.text[0] == "different" and "and 21 more" in parts.text
    assert parts_of(fastcheck.compare(actual, actual)).text[0] == "identical"


def test_an_error_leaves_the_text() -> None:
    class Odd:
        def __repr__(self) -> str:
            return f"<odd {NASTY}>"

    def fail() -> str:
        raise RuntimeError

    html = notebook.guarded_html(Odd(), fail)
    assert html.startswith("<pre>&lt;odd &lt;script&gt;") and "\x1b" not in html
    Odd.__repr__ = lambda self: fail()  # type: ignore[method-assign]  # as a broken class does
    assert "Odd object" in notebook.guarded_html(Odd(), fail)
    broken = object.__new__(fastcheck.types.Stats)
    assert "Stats object" in broken._repr_html_()


def test_numbers_are_on_the_right_and_long_text_is_cut() -> None:
    html = notebook.table_html(["a", "b"], [["x" * 1000, 1234567], ["y", None]], [True], total=9)
    parts = Parts(html)
    assert "1,234,567" in parts.text and "-" in parts.text and "and 7 more" in parts.text
    assert max(map(len, parts.text)) == 300 and html.count("text-align:right") == 3
    assert html.count("background:rgba") == 1
    assert notebook.table_html(["a"], []) == ""
    cells = [notebook.cell_html(value) for value in (True, float("nan"), 1 / 3, None)]
    assert cells == ["yes", "nan", "0.333333", "-"]
