"""The spread of a non-finite value in its step: the first places, and harmless places in brief."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastcheck.record.format import Verdict
from fastcheck.record.statistics import statistics_of
from fastcheck.utils.names.style import tensor_place
from fastcheck.utils.text.layout import wrap
from fastcheck.utils.text.numbers import and_more, counted, format_nonfinite

if TYPE_CHECKING:
    from fastcheck.record.event import Event

_PLACES = 10
_HARMLESS = (Verdict.INTENDED, Verdict.ABSORBED, Verdict.BENIGN, Verdict.SCALED, Verdict.UNRESOLVED)


def spread(events: Sequence[Event], culprit: Event, style: str, width: int) -> list[str]:
    """``events``: those of one step. No lines where the culprit is the only event."""
    seq = culprit.record["seq"]
    others = [e for e in events if e.site != culprit.site or e.record["seq"] != seq]
    reached = _first_of_each_place(
        [event for event in others if event.verdict is Verdict.PROPAGATED], style
    )
    lines: list[str] = []
    for number, (name, event) in enumerate(reached[:_PLACES], start=1):
        text = f"{name}, {event.site.direction}: {format_nonfinite(statistics_of(event.record))}"
        lines += wrap(text, width, f"{number:>2}. ", "    ")
    lines += and_more(len(reached) - _PLACES, "more place[|s]")
    for verdict in (Verdict.ORIGIN, Verdict.ARRIVED):
        lines += _one_line([event for event in others if event.verdict is verdict], style, width)
    return lines + harmless(others, style, width)


def harmless(events: Sequence[Event], style: str, width: int) -> list[str]:
    """One line for each verdict that is not counted and does not follow from a counted event."""
    return [
        line
        for verdict in _HARMLESS
        for line in _one_line([e for e in events if e.verdict is verdict], style, width)
    ]


def pending_lines(events: Sequence[Event], style: str, width: int) -> list[str]:
    """Lines on undecided findings: the place, the non-finite values, and why they would count."""
    lines: list[str] = []
    for event in events[:_PLACES]:
        place = tensor_place(event.site, int(event.record["call"]), style)
        text = f"{place}, {event.site.direction}: {format_nonfinite(statistics_of(event.record))}"
        lines += wrap(f"{text}: {event.reason}", width, "", "    ")
    return lines + and_more(len(events) - _PLACES)


def _one_line(events: list[Event], style: str, width: int) -> list[str]:
    if not events:
        return []
    first = events[0]
    name = Verdict(first.verdict).name.lower()
    count = counted(len(events), "tensor")
    where = tensor_place(first.site, int(first.record["call"]), style)
    begins = "" if len(events) == 1 else "first "
    text = f"{name}: {count}, {begins}{where}: {first.reason}"
    return wrap(text, width, "", "    ")


def _first_of_each_place(events: list[Event], style: str) -> list[tuple[str, Event]]:
    firsts: dict[str, Event] = {}
    for event in events:
        firsts.setdefault(tensor_place(event.site, int(event.record["call"]), style), event)
    return list(firsts.items())
