"""Renders monitor.summary(): what was observed and found, and the last step in numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from fastcheck.errors import printable
from fastcheck.log.step_table import StepRow
from fastcheck.log.unobserved import UnreadOp
from fastcheck.record.format import Verdict
from fastcheck.record.site import module_name
from fastcheck.record.statistics import statistics_of
from fastcheck.utils.names.msprobe import name_of
from fastcheck.utils.names.style import row_name
from fastcheck.utils.text.layout import for_stderr, section, table, wrap
from fastcheck.utils.text.numbers import and_more, counted, format_fields, format_number

if TYPE_CHECKING:
    from fastcheck.record.site import Site

_LAST_STEP_ROWS = 20


def summary(blocks: Iterable[tuple[str, Sequence[str]]], ascii_only: bool | None = None) -> str:
    """Plain text for a person: labelled lines, without the labels that have none."""
    text = "\n\n".join("\n".join(section(label, lines)) for label, lines in blocks if lines)
    return for_stderr(printable(text, keep="\n"), ascii_only)


def found_lines(
    count: int, overflow_nums: int, verdicts: Mapping[Verdict, int], warnings: int, width: int
) -> list[str]:
    """The number of counted events, of ``warnings`` of the watch, and of each verdict."""
    total = "never stops" if overflow_nums < 0 else f"stops at {overflow_nums:,}"
    lines = wrap(f"{counted(count, 'counted overflow event')} ({total})", width)
    if warnings:
        lines += wrap(f"{counted(warnings, 'warning')} of the watch", width)
    rows = [
        [verdict.name.lower(), f"{n:,}"]
        for verdict, n in sorted(verdicts.items())
        if n and verdict is not Verdict.NONE
    ]
    return lines + (table(["verdict", "tensors"], rows, width=width) if rows else [])


def where_lines(top_sites: Sequence[tuple[Site, int]], width: int, style: str) -> list[str]:
    """The sites with the most events, each with their number."""
    named = [[_where(s, style), s.direction, f"{n:,}"] for s, n in top_sites]
    return table(["tensor", "pass", "events"], named, left=2, width=width) if named else []


def _where(site: Site, style: str) -> str:
    if style == "msprobe":
        # The calls of a site are counted together.
        return str(replace(name, call=None)) if (name := name_of(site)) else str(site)
    return f"{module_name(site)} {f'{site.op} ' if site.op else ''}{site.tensor_name}"


def last_step_lines(pairs: Sequence[tuple[Site, np.void]], width: int, style: str) -> list[str]:
    """The records of the last finished step, in device order; long lists are cut, and non-finite
    records kept.
    """
    if not pairs:
        return []
    readings = [(site, statistics_of(record)) for site, record in pairs]
    ranked = sorted(
        range(len(readings)),
        # Non-finite first, then the closest to the end of its format: what a reader looks for.
        key=lambda i: (
            -min(readings[i][1].nonfinite_count, 1),
            -(readings[i][1].range_used or 0.0),
            i,
        ),
    )
    shown = sorted(ranked[:_LAST_STEP_ROWS])
    rows = []
    for index in shown:
        site, reading = readings[index]
        fields = format_fields(reading, "dtype", "nonfinite_count", "abs_max", "rms")
        rows.append([row_name(site, reading.call, style), *fields])
    lines = table(["tensor", "dtype", "NaN+Inf", "abs max", "rms"], rows, left=2, width=width)
    return lines + and_more(len(readings) - len(shown), "more with smaller numbers")


_SHOWN = 10


def unread_lines(rows: Sequence[UnreadOp], width: int) -> list[str]:
    """The rows as lines for a person; none for no rows."""
    lines = []
    for row in rows[:_SHOWN]:
        lines += wrap(f"{row.op}, {counted(row.calls, 'call')}: {row.reason}", width, rest="  ")
    return lines + and_more(len(rows) - _SHOWN)


_ROWS = 10


def step_table(rows: Sequence[StepRow], width: int, limit: int | None = _ROWS) -> list[str]:
    """The last steps as a table, without the columns that none of them has; no lines without rows.
    ``limit``: how many; None: all.
    """
    shown = list(rows if limit is None else rows[-limit:])
    columns: list[tuple[str, list[str]]] = []
    for name, field in _COLUMNS:
        values = [getattr(row, field) for row in shown]
        if any(value is not None for value in values):
            columns.append((name, [format_number(value) for value in values]))
    if not columns:
        return []
    is_scaled = any(row.scale is not None or row.overflow for row in rows)
    if is_scaled:
        cells = ["overflow, skipped" if row.overflow else "" for row in shown]
        columns.insert(int(columns[0][0] == "loss"), ("overflow", cells))
    columns.insert(0, ("step", [f"{row.step:,}" for row in shown]))
    if len({row.rank for row in rows}) > 1:
        columns.insert(0, ("rank", [str(row.rank) for row in shown]))
    cells_of = [list(row) for row in zip(*(cells for _, cells in columns))]
    lines = table([name for name, _ in columns], cells_of, left=0, width=width)
    if is_scaled:
        skipped = sum(row.overflow for row in rows)
        lines.append(f"{skipped:,} of the last {len(rows):,} updates skipped")
    return lines + and_more(len(rows) - len(shown), "step[|s] before these")


_COLUMNS = (
    ("loss", "loss"),
    ("scale", "scale"),
    ("lr", "learning_rate"),
    ("gradient norm", "gradient_norm"),
)
