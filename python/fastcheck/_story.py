"""What summary() and ``fastcheck show`` tell of the first counted event: the culprit, what it read,
how it looked while it was healthy, and how it spread. In the words of the stop report.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Optional

import numpy as np

from ._record import overflowed
from ._report import StopReport, parts
from ._site import Site

if TYPE_CHECKING:
    from ._finding import Event
    from ._logread import LogView

__all__ = ["Block", "report_from_log", "story"]

Block = tuple[str, list[str]]


def story(report: Optional[StopReport], width: int) -> list[Block]:
    """Labelled lines; none without a report."""
    return [] if report is None else parts(report, width)


def report_from_log(view: LogView, event: Optional[Event], style: str) -> Optional[StopReport]:
    """The report of an event, from what a log holds of it; None without a counted event."""
    if event is None or not event.counted:
        return None
    own = view.records[view.ranks == event.rank]
    before = own[own["seq"] < int(event.record["seq"])]
    inputs, earlier = [], []
    for name, seq in event.inputs:
        for record in own[own["seq"] == seq][:1]:
            source = view.sites[int(record["site"])]
            inputs.append((input_site(event.site, name, source), record.copy()))
            earlier.append(_last_healthy(before, record))
    mine = own[(own["site"] == event.record["site"]) & (own["call"] == event.record["call"])]
    of_step = [e for e in view.events if (e.step, e.rank) == (event.step, event.rank)]
    return StopReport(
        culprit=event,
        step=event.step,
        events=tuple(sorted(of_step, key=lambda e: int(e.record["seq"]))),
        inputs=tuple(inputs),
        inputs_before=tuple(earlier),
        trend=mine[mine["seq"] <= event.record["seq"]],
        rank=event.rank,
        style=style,
    )


def input_site(site: Site, name: str, source: Site) -> Site:
    """What an operator at ``site`` read as its argument ``name``, and what has made that."""
    origin = source.op or f"{source.role} {source.label}"
    label = f"{name} ({origin})" if source.role != "input" else name
    return replace(site, role="input", label=label)


def _last_healthy(records: np.ndarray, record: np.void) -> Optional[np.void]:
    mine = records[
        (records["site"] == record["site"])
        & (records["call"] == record["call"])
        & (records["step"] < record["step"])
    ]
    healthy = mine[~overflowed(mine)]
    return healthy[-1].copy() if len(healthy) else None
