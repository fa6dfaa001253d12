"""The data of a page as a header and arrays, from what was collected of a log."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Optional

import numpy as np

from fastcheck._version import __version__
from fastcheck.errors import printable
from fastcheck.log.step_table import StepRow
from fastcheck.record.event import Event
from fastcheck.record.format import DTYPES, Verdict
from fastcheck.record.site import Site
from fastcheck.record.statistics import FLOAT_FORMATS
from fastcheck.utils.text.numbers import to_json

from .collect import Collected
from .container import Container
from .grid import values_of
from .passed import passed_places
from .watched import watched_events

__all__ = ["page_data"]

# Cells that are written exactly. Where there are more: codes an octave, levels of means between the
# ends of a row, and of shares.
_EXACT_CELLS, _FINE_CELLS = 16_000, 100_000
_FINE, _COARSE = (32, 254, 254), (8, 62, 126)
_STEP_NUMBERS = ("loss", "scale", "learning_rate", "gradient_norm")
_STEP_BUCKETS, _MOST_STEP_ROWS = 500, 4000
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
        "dtypes": [_dtype(info.name) for info in DTYPES],
        "verdicts": [verdict.name.lower() for verdict in Verdict],
        "sites": _site_columns(found.sites),
        "rows": {name: _numbers(column) for name, column in columns.items()},
        "bad": found.bad.T.tolist(),
        "steps": to_json({rank: _steps(found.steps, rank) for rank in sorted(found.meta)}),
        "events": [_event(event, found) for event in events[:_MOST_EVENTS]],
        "event_count": len(events),
        "first": _first(found),
        "spread": passed_places(found, events),
        **watched_events(found),
        "meta": to_json({rank: _options(meta) for rank, meta in found.meta.items()}),
    }
    header.update(_add_grid(container, found, len(columns["site"])))
    header["around"] = _add_around(container, found)
    return container.to_text(header)


def _dtype(name: str) -> dict[str, Any]:
    known = FLOAT_FORMATS.get(name)
    return {"name": name, "max": None if known is None else repr(known.max)}


def _numbers(column: np.ndarray) -> list[Any]:
    """For JSON: null for NaN, text for an infinity."""
    if column.dtype.kind != "f" or np.isfinite(column).all():
        return list(column.tolist())
    return [None if value != value else to_json(value) for value in column.tolist()]


def _site_columns(sites: Sequence[Site]) -> dict[str, list[str]]:
    return {
        "module": [site.module for site in sites],
        "type": [site.module_type for site in sites],
        "direction": [site.direction for site in sites],
        "role": [site.role for site in sites],
        "name": [site.tensor_name for site in sites],
        "op": [site.op or "" for site in sites],
    }


def _add_grid(container: Container, found: Collected, rows: int) -> dict[str, Any]:
    grid = found.grid
    rows = min(rows, len(grid.bad))
    fine: np.ndarray = np.logical_or.reduce(grid.seen[:rows], axis=0)
    factor = grid.coarse.width // grid.axis.width
    padded = np.pad(fine, (0, grid.coarse.buckets * factor - len(fine)))
    coarse: np.ndarray = np.logical_or.reduce(padded.reshape(-1, factor), axis=1)
    exact = rows * int(fine.sum()) <= _EXACT_CELLS
    per_octave, levels, share_levels = _FINE if rows * int(fine.sum()) <= _FINE_CELLS else _COARSE
    for name in grid.high:
        keep = fine if name == "abs_max" else coarse
        high, low = grid.high[name][:rows, keep], grid.low[name][:rows, keep]
        planes = {f"{name}.high": high}
        if not np.array_equal(high, low, equal_nan=True):
            planes[f"{name}.low"] = low
        for label, plane in planes.items():
            if exact:
                container.add_f64(label, plane if name == "abs_max" else _as_float32(plane))
            elif name in ("abs_max", "rms"):
                container.add_log(label, plane, per_octave)
            elif name == "zero_share":
                container.add_linear(label, plane, 0.0, 1.0, share_levels)
            else:
                container.add_linear(label, plane, *_ends(high, low), levels)
    container.add_u8("bad", grid.bad[:rows, fine])
    container.add_u8("seen", np.packbits(grid.seen[:rows, fine].reshape(-1))[None])
    return {
        "axis": {"width": grid.axis.width, "starts": grid.axis.starts()[fine].tolist()},
        "coarse": {"width": grid.coarse.width, "starts": grid.coarse.starts()[coarse].tolist()},
        "exact": exact,
    }


def _as_float32(values: np.ndarray) -> np.ndarray:
    """Computed values, in half the bytes where the range allows."""
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float32).astype(np.float64)
    found: np.ndarray = np.where(np.isfinite(rounded) & (rounded != 0), rounded, values)
    return found


def _ends(high: np.ndarray, low: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The largest and the smallest value of each row; 0 where there is none."""
    ends = []
    for plane, smaller in ((low, np.fmin), (high, np.fmax)):
        end = smaller.reduce(plane, axis=1, initial=np.nan)
        ends.append(np.where(np.isnan(end), 0.0, end))
    return ends[0], ends[1]


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


def _steps(rows: Sequence[StepRow], rank: int) -> dict[str, Any]:
    """The columns of one rank's steps: of many those that hold the extremes of their bucket."""
    mine = [row for row in rows if row.rank == rank]
    shown = mine if len(mine) <= _MOST_STEP_ROWS else [mine[at] for at in _extremes(mine)]
    made: dict[str, Any] = {"step": [row.step for row in shown], "count": len(mine)}
    for name in _STEP_NUMBERS:
        values = [getattr(row, name) for row in shown]
        made[name] = values if any(value is not None for value in values) else []
    made["overflow"] = [row.step for row in shown if row.overflow]
    return made


def _extremes(rows: Sequence[StepRow]) -> list[int]:
    """The first and last row, and of each bucket those with the least and the largest number of
    each kind, the first that is not finite, and the first with an overflow.
    """
    chosen = {0, len(rows) - 1}
    size = -(-len(rows) // _STEP_BUCKETS)
    for start in range(0, len(rows), size):
        bucket = range(start, min(start + size, len(rows)))
        for name in _STEP_NUMBERS:
            known = [(v, at) for at in bucket if (v := getattr(rows[at], name)) is not None]
            finite = [pair for pair in known if math.isfinite(pair[0])]
            if finite:
                chosen |= {min(finite)[1], max(finite)[1]}
            chosen |= set([at for value, at in known if not math.isfinite(value)][:1])
        chosen |= set([at for at in bucket if rows[at].overflow][:1])
    return sorted(chosen)


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
