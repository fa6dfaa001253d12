"""The data of a page as a header and arrays, from what was collected of a log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import numpy as np

from fastcheck._version import __version__
from fastcheck.errors import printable
from fastcheck.record.event import Event
from fastcheck.record.format import Verdict
from fastcheck.record.site import Site
from fastcheck.utils.text.numbers import to_json

from .collect import Collected
from .container import Container
from .grid import values_of
from .parts import add_grid, dtype_list, json_numbers, step_columns
from .passed import passed_places
from .watched import watched_events

__all__ = ["page_data"]

_MOST_EVENTS, _MOST_AROUND = 500, 40


def page_data(found: Collected, events: Sequence[Event]) -> tuple[str, str]:
    """The header and the arrays in base64. ``events``: those of the log, with their records."""
    container = Container()
    columns = found.rows.columns()
    header: dict[str, Any] = {
        "format": 1,
        "fastcheck": __version__,
        "directory": printable(found.directory),
        "records": found.records,
        "damaged": found.damaged,
        "dropped_bytes": found.dropped_bytes,
        "dtypes": dtype_list(),
        "verdicts": [verdict.name.lower() for verdict in Verdict],
        "sites": _site_columns(found.sites),
        "rows": {name: json_numbers(column) for name, column in columns.items()},
        "bad": found.bad.T.tolist(),
        "steps": to_json({rank: step_columns(found.steps, rank) for rank in sorted(found.meta)}),
        "events": [_event(event, found) for event in events[:_MOST_EVENTS]],
        "event_count": len(events),
        "first": _first(found),
        "spread": passed_places(found, events),
        **watched_events(found),
        "meta": to_json({rank: _options(meta) for rank, meta in found.meta.items()}),
    }
    header.update(add_grid(container, found.grid, len(columns["site"])))
    header["around"] = _add_around(container, found)
    return container.to_text(header)


def _site_columns(sites: Sequence[Site]) -> dict[str, list[str]]:
    return {
        "module": [site.module for site in sites],
        "type": [site.module_type for site in sites],
        "direction": [site.direction for site in sites],
        "role": [site.role for site in sites],
        "name": [site.tensor_name for site in sites],
        "op": [site.op or "" for site in sites],
    }


def _add_around(container: Container, found: Collected) -> Optional[dict[str, Any]]:
    """Exact values of the first event's step, and of the steps around it, of the sites that it
    reached on its rank; None without an event.
    """
    first = found.evidence.first
    records = found.evidence.around()
    if first is None or not len(records):
        return None
    reached = [first.site, *found.evidence.spread()["site"].tolist()]
    sites = list(dict.fromkeys(reached))[:_MOST_AROUND]
    records = records[np.isin(records["site"], sites)]
    if not len(records):
        return None
    steps, at = np.unique(records["step"], return_inverse=True)
    rows = np.array([sites.index(site) for site in records["site"].tolist()])
    values = values_of(records)
    for name in ("abs_max", "rms", "mean", "zero_share"):
        plane = np.full((len(sites), len(steps)), np.nan)
        # The largest of several calls.
        np.fmax.at(plane, (rows, at.reshape(-1)), values[name])
        container.add_f64(f"around.{name}", plane)
    numbers = found.rows.find(first.rank, np.array(sites))
    return {"rows": numbers.tolist(), "steps": steps.tolist()}


def _event(event: Event, found: Collected) -> dict[str, Any]:
    return {
        "step": event.step,
        "rank": event.rank,
        "row": _row_of(found, event.rank, event.site),
        "where": str(event.site),
        "verdict": int(event.verdict),
        "counted": event.counted,
        "reason": event.reason,
        "line": event.line,
        "counts": [int(event.record[f"{kind}_count"]) for kind in ("nan", "posinf", "neginf")],
    }


def _first(found: Collected) -> Optional[dict[str, int]]:
    first = found.evidence.first
    if first is None:
        return None
    row = int(found.rows.find(first.rank, np.array([first.site]))[0])
    return {"rank": first.rank, "step": first.step, "row": row}


def _row_of(found: Collected, rank: int, site: Site) -> int:
    """-1 for a site without records on this rank: a gradient is blamed on who read it."""
    return found.row_of.get((rank, site), -1)


def _options(meta: dict[str, Any]) -> dict[str, Any]:
    """Without the rows of steps, which the page has already."""
    left_out = {name for name in ("steps", "scaling") if isinstance(meta.get(name), list)}
    return {name: value for name, value in meta.items() if name not in left_out}
