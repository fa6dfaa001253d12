"""How something non-finite spread in its step: the first places that it reached, and one line for
each kind of what did no harm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ._layout import wrap
from ._numbers import read, spell_nonfinite
from ._record import Verdict
from ._style import place

if TYPE_CHECKING:
    from ._finding import Event

__all__ = ["harmless", "spread"]

_PLACES = 10
_HARMLESS = (
    Verdict.INTENDED,
    Verdict.ABSORBED,
    Verdict.BENIGN,
    Verdict.SCALED,
    Verdict.UNRESOLVED,
)


def spread(events: Sequence[Event], culprit: Event, style: str, width: int) -> list[str]:
    """``events``: those of one step. Nothing to say, and no lines, when the culprit is alone."""
    others = [event for event in events if not _is_same(event, culprit)]
    reached = _first_of_each_place(
        [event for event in others if event.verdict is Verdict.PROPAGATED], style
    )
    lines: list[str] = []
    for number, (name, event) in enumerate(reached[:_PLACES], start=1):
        text = f"{name}, {event.site.direction}: {spell_nonfinite(read(event.record))}"
        lines += wrap(text, width, f"{number:>2}. ", "    ")
    if len(reached) > _PLACES:
        lines.append(f"and {len(reached) - _PLACES:,} more places")
    for verdict in (Verdict.ORIGIN, Verdict.ARRIVED):
        lines += _one_line([event for event in others if event.verdict is verdict], style, width)
    return lines + harmless(others, style, width)


def harmless(events: Sequence[Event], style: str, width: int) -> list[str]:
    """One line for each kind of what was not counted and follows from nothing that was."""
    return [
        line
        for verdict in _HARMLESS
        for line in _one_line([e for e in events if e.verdict is verdict], style, width)
    ]


def _one_line(events: list[Event], style: str, width: int) -> list[str]:
    if not events:
        return []
    first = events[0]
    name = Verdict(first.verdict).name.lower()
    count = f"{len(events):,} tensor{'' if len(events) == 1 else 's'}"
    where = place(first.site, int(first.record["call"]), style)
    begins = "" if len(events) == 1 else "first "
    text = f"{name}: {count}, {begins}{where}: {first.reason}"
    return wrap(text, width, "", "    ")


def _first_of_each_place(events: list[Event], style: str) -> list[tuple[str, Event]]:
    found: dict[str, Event] = {}
    for event in events:
        found.setdefault(place(event.site, int(event.record["call"]), style), event)
    return list(found.items())


def _is_same(event: Event, culprit: Event) -> bool:
    return event.site == culprit.site and bool(event.record["seq"] == culprit.record["seq"])
