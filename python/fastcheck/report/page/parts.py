"""Parts of the data that pages of logs and of comparisons share: planes, steps, dtypes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fastcheck.log.step_table import STEP_NUMBERS, StepRow
from fastcheck.record.format import DTYPES
from fastcheck.record.statistics import FLOAT_FORMATS
from fastcheck.utils.text.numbers import to_json

from .container import Container
from .grid import Grid

# Cells that are written exactly. Where there are more: codes an octave, levels of means between the
# ends of a row, and of shares.
_EXACT_CELLS, _FINE_CELLS = 16_000, 100_000
_FINE, _COARSE = (32, 254, 254), (8, 62, 126)
_STEP_BUCKETS, _MOST_STEP_ROWS = 500, 4000


def dtype_list() -> list[dict[str, Any]]:
    """The dtypes by their code: name and largest number."""
    known = ((info.name, FLOAT_FORMATS.get(info.name)) for info in DTYPES)
    return [{"name": name, "max": None if own is None else repr(own.max)} for name, own in known]


def json_numbers(column: np.ndarray) -> list[Any]:
    """The numbers of a column for JSON: null for NaN, text for an infinity."""
    if column.dtype.kind != "f" or np.isfinite(column).all():
        return list(column.tolist())
    return [None if value != value else to_json(value) for value in column.tolist()]


def add_grid(
    container: Container, grid: Grid, rows: int, prefix: str = "", with_bad: bool = True
) -> dict[str, Any]:
    """Adds the planes of the first ``rows`` rows, named ``prefix`` + statistic + ``.high`` and
    ``.low``, and, if ``with_bad``, what was not finite and what was read. Returns the axes.
    """
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
        planes = {f"{prefix}{name}.high": high}
        if not np.array_equal(high, low, equal_nan=True):
            planes[f"{prefix}{name}.low"] = low
        for label, plane in planes.items():
            if exact:
                container.add_f64(label, plane if name == "abs_max" else _as_float32(plane))
            elif name in ("abs_max", "rms"):
                container.add_log(label, plane, per_octave)
            elif name == "zero_share":
                container.add_linear(label, plane, 0.0, 1.0, share_levels)
            else:
                container.add_linear(label, plane, *_ends(high, low), levels)
    if with_bad:
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
    return np.where(np.isfinite(rounded) & (rounded != 0), rounded, values)


def _ends(high: np.ndarray, low: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The largest and the smallest value of each row; 0 where there is none."""
    ends = []
    for plane, smaller in ((low, np.fmin), (high, np.fmax)):
        end = smaller.reduce(plane, axis=1, initial=np.nan)
        ends.append(np.where(np.isnan(end), 0.0, end))
    return ends[0], ends[1]


def step_columns(rows: Sequence[StepRow], rank: int) -> dict[str, Any]:
    """The columns of one rank's steps: of many those that hold the extremes of their bucket."""
    mine = [row for row in rows if row.rank == rank]
    shown = mine if len(mine) <= _MOST_STEP_ROWS else [mine[at] for at in _extremes(mine)]
    made: dict[str, Any] = {"step": [row.step for row in shown], "count": len(mine)}
    for name in STEP_NUMBERS:
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
        for name in STEP_NUMBERS:
            known = [(v, at) for at in bucket if (v := getattr(rows[at], name)) is not None]
            finite = [pair for pair in known if math.isfinite(pair[0])]
            if finite:
                chosen |= {min(finite)[1], max(finite)[1]}
            chosen |= set([at for value, at in known if not math.isfinite(value)][:1])
        chosen |= set([at for at in bucket if rows[at].overflow][:1])
    return sorted(chosen)
