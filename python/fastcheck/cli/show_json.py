"""The data of ``fastcheck show --json``, before conversion to strict JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fastcheck.log.reader import read_ranges, read_watch
from fastcheck.log.step_table import step_rows
from fastcheck.log.view import LogView, first_event
from fastcheck.record.precision import advice_from_lines
from fastcheck.record.statistics import statistics_of

if TYPE_CHECKING:
    from fastcheck.record.event import Event

__all__ = ["document"]


def document(
    path: str, view: LogView, indices: np.ndarray, all_events: Sequence[Event], limit: int | None
) -> dict[str, Any]:
    """The records at ``indices`` of the view and the events, at most ``limit`` of each."""
    shown = indices[:limit]
    events = all_events[:limit]
    first = first_event(all_events)
    watched = read_watch(path)[:limit]
    precision = [one.to_dict() for one in advice_from_lines(read_ranges(path))][:limit]
    return {
        "path": path,
        "meta": {str(rank): meta for rank, meta in view.meta.items()},
        "dropped_bytes": view.dropped_bytes,
        "damaged_records": view.damaged_records,
        "ranks": sorted(view.meta),
        "first": first and {"step": first.step, "rank": first.rank, "site": first.site.to_dict()},
        "events": [
            {
                "step": event.step,
                "rank": event.rank,
                "verdict": event.verdict.name.lower(),
                "counted": event.counted,
                "reason": event.reason,
                "site": event.site.to_dict(),
                "record": _record_fields(event.record),
            }
            for event in events
        ],
        "records": [
            {
                **_record_fields(view.records[index]),
                "rank": int(view.ranks[index]),
                "site": view.sites[int(view.records[index]["site"])].to_dict(),
            }
            for index in shown
        ],
        **({"watch": watched} if watched else {}),
        **({"precision": precision} if precision else {}),
        "steps": [row.to_dict() for row in step_rows(view)],
        "left_out": {
            "records": len(indices) - len(shown),
            "events": len(all_events) - len(events),
        },
    }


def _record_fields(record: np.void) -> dict[str, Any]:
    reading = statistics_of(record)
    names = (
        "step seq call dtype numel nan_count posinf_count neginf_count zero_count "
        "subnormal_count negative_count saturated_count min max abs_max mean rms checksum flags"
    )
    values = {name: getattr(reading, name) for name in names.split()}
    if reading.has_stats:
        for name in ("sum", "abs_sum", "sum_sq"):
            values[name] = float(record[name])
    # 64 bits don't survive a JSON reader that keeps numbers in float64.
    values["checksum"] = None if reading.checksum is None else f"{reading.checksum:016x}"
    return values
