"""report_from_log(): builds the report of an event in a log, by ``build.make_report()``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional

import numpy as np

from fastcheck.log.reader import read_batches
from fastcheck.record.format import overflowed

from .build import argument_records, make_report

if TYPE_CHECKING:
    from fastcheck.log.view import LogView
    from fastcheck.record.event import Event

    from .stop_report import StopReport


def report_from_log(view: LogView, event: Optional[Event], style: str) -> Optional[StopReport]:
    """The report of a stop from its log; None without a counted event."""
    if event is None or not event.counted:
        return None
    records = _LogRecords(view.records[view.ranks == event.rank])
    inputs = argument_records(records, event, view.sites)
    events = [e for e in view.events if (e.step, e.rank) == (event.step, event.rank)]
    meta = view.meta.get(event.rank, {})
    left_out_by = [name for name in ("include", "exclude") if meta.get(name)]
    left_out_by += ["every"] if meta.get("every", 1) != 1 else []
    return make_report(
        records,
        event,
        events,
        inputs,
        style=style,
        left_out_by=tuple(left_out_by),
        batch=read_batches(view.directory, event.rank).get(event.step),
    )


class _LogRecords:
    """The queries of :class:`Records` on one array."""

    def __init__(self, records: np.ndarray) -> None:
        self._records = records

    def of_site(self, site: int, call: int) -> np.ndarray:
        records = self._records
        matches: np.ndarray = records[(records["site"] == site) & (records["call"] == call)]
        return matches

    def last_finite(self, record: np.void) -> Optional[np.void]:
        mine = self.of_site(int(record["site"]), int(record["call"]))
        earlier = mine[(mine["step"] < record["step"]) & ~overflowed(mine)]
        return earlier[-1].copy() if len(earlier) else None

    def find(self, seq: int) -> Optional[np.void]:
        matches = self._records[self._records["seq"] == seq]
        return matches[0].copy() if len(matches) else None
