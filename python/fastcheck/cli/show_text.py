"""The text of ``fastcheck show``: the log, the first counted event, events, records and trends."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastcheck.errors import printable
from fastcheck.log.lost_device import lost_lines
from fastcheck.log.reader import read_ranges, read_watch
from fastcheck.log.step_table import step_rows
from fastcheck.log.unobserved import from_meta
from fastcheck.log.view import LogView, first_event
from fastcheck.record.format import Verdict, nonfinite
from fastcheck.record.precision import advice_from_lines
from fastcheck.record.statistics import statistics_of
from fastcheck.report.from_log import report_from_log
from fastcheck.report.render import parts
from fastcheck.report.summary import step_table, unread_lines
from fastcheck.utils.names.style import row_name, tensor_place
from fastcheck.utils.text.layout import (
    Part,
    Section,
    Table,
    is_logarithmic,
    line_width,
    sparkline,
    wants_ascii,
    wrap,
)
from fastcheck.utils.text.numbers import format_nonfinite, format_number

_WIDTH = 100
_TRENDS = 12


@dataclass(frozen=True)
class Shown:
    """The records (as indices) and events that the filters select. ``problem``: why there are none;
    ``filtered``: whether there was a filter.
    """

    records: np.ndarray
    events: list[Any]
    problem: str
    filtered: bool

    @property
    def found(self) -> bool:
        return not self.filtered or bool(len(self.records) or self.events)


def text_sections(
    path: str,
    others: list[str],
    view: LogView,
    wanted: Shown,
    limit: int | None,
    options: argparse.Namespace,
) -> list[Section]:
    """``path``: the log that ``view`` was read from; ``others``: older logs beside it."""
    body = line_width(_WIDTH) - 10
    about = [line for text in _log_lines(others, view) for line in wrap(text, body)]
    blocks = [Section("log", [path, *about])]
    if wanted.problem:
        return [*blocks, Section("", wrap(wanted.problem, body))]
    if not wanted.filtered and not options.events:
        report = report_from_log(view, first_event(wanted.events), options.style)
        if report is not None:
            blocks += [Section(label, lines) for label, lines in parts(report, body)]
        steps = step_table(step_rows(view), body, limit)
        if steps:
            blocks.append(Section("steps", steps))
        watched = _watch_lines(path, limit, body)
        if watched:
            blocks.append(Section("watch", watched))
        precision = _precision_lines(path, limit, body)
        if precision:
            blocks.append(Section("precision", precision))
        unread = unread_lines(from_meta(view.meta.values()), body)
        if unread:
            blocks.append(Section("unread", unread))
    if wanted.events or options.events or not wanted.filtered:
        blocks.append(
            Section("events", _event_lines(view, wanted.events, limit, body, options.style))
        )
    if len(wanted.records):
        blocks.append(Section("records", _record_table(view, wanted, limit, body, options.style)))
        if options.site is not None:
            trends = _trend_table(view, wanted.records, body, options.style)
            if trends is not None:
                blocks.append(Section("trend", [trends]))
    return blocks


def _log_lines(others: list[str], view: LogView) -> list[str]:
    lines = []
    records = view.records
    if len(records):
        steps = np.unique(records["step"])
        lines.append(
            f"steps {steps[0]:,} to {steps[-1]:,} ({len(steps):,} held), {len(records):,} records "
            f"of {len(np.unique(records['site'])):,} tensors, {_plural(len(view.events), 'event')}"
        )
    else:
        lines.append("no records")
    ranks = sorted(view.meta)
    meta = view.meta[ranks[0]] if ranks else {}
    origin = [
        f"{name} {meta[name]}" for name in ("fastcheck", "torch", "host", "created") if name in meta
    ]
    if len(ranks) > 1:
        origin.insert(0, f"ranks {', '.join(map(str, ranks))}")
    if origin:
        lines.append(" · ".join(origin))
    lines += lost_lines(view.meta)
    if view.dropped_bytes:
        lines.append(
            f"{view.dropped_bytes:,} bytes at the end were cut short (the process died while "
            "writing)"
        )
    dropped = sum(n for m in view.meta.values() if isinstance(n := m.get("dropped_events"), int))
    if dropped:
        lines.append(f"{dropped:,} later events or more are not here: the log's limit left no room")
    if view.damaged_records:
        lines.append(
            f"{_plural(view.damaged_records, 'damaged record')} left out: with numbers that no "
            "fastcheck writes"
        )
    if others:
        lines.append(
            f"{len(others)} older log{'s' if len(others) > 1 else ''} beside it: "
            f"{os.path.basename(others[-1])}" + (", ..." if len(others) > 1 else "")
        )
    return lines


def _watch_lines(path: str, limit: int | None, width: int) -> list[str]:
    """The events of install(watch=): those that warn, or else all."""
    events = read_watch(path)
    chosen = [one for one in events if one.get("is_warning")] or events
    lines = [line for one in chosen[:limit] for line in wrap(printable(one["text"]), width)]
    left = len(events) - len(chosen[:limit])
    return [*lines, f"and {left:,} more (--json has them)"] if left else lines


def _precision_lines(path: str, limit: int | None, width: int) -> list[str]:
    """The advice of install(record="range")."""
    advice = advice_from_lines(read_ranges(path))
    lines = [line for one in advice[:limit] for line in wrap(printable(str(one)), width)]
    left = len(advice) - len(advice[:limit])
    return [*lines, f"and {left:,} more (--json has them)"] if left else lines


def _plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _event_lines(
    view: LogView, events: list[Any], limit: int | None, width: int, style: str
) -> list[str]:
    if not events:
        return ["none."]
    lines: list[str] = []
    several = len(view.meta) > 1
    first = first_event(events) if several else None
    if first is not None:
        with_it = {event.rank for event in events if event.step == first.step} - {first.rank}
        others = ", ".join(map(str, sorted(with_it)))
        also = f" (in the same step: rank{'s' if len(with_it) > 1 else ''} {others})"
        lines += wrap(
            f"first on rank {first.rank}, step {first.step:,}: "
            + tensor_place(first.site, int(first.record["call"]), style, first.api)
            + (also if with_it else ""),
            width,
            "",
            "  ",
        )
    for event in events[:limit]:
        reading = statistics_of(event.record)
        counted = "counted" if event.counted else "not counted"
        rank = f"rank {event.rank}, " if several or event.rank else ""
        lines += wrap(
            f"{rank}step {event.step:,}: {format_nonfinite(reading)} in "
            f"{tensor_place(event.site, reading.call, style, event.api)}, {event.site.direction}",
            width,
            "",
            "  ",
        )
        lines += wrap(
            f"{Verdict(event.verdict).name.lower()} ({counted}): {event.reason}", width, "  "
        )
    hidden = len(events) - len(events[:limit])
    if hidden:
        lines.append(f"and {hidden:,} more events (--limit 0 shows all)")
    return lines


def _record_table(
    view: LogView, wanted: Shown, limit: int | None, width: int, style: str
) -> list[Part]:
    chosen = wanted.records
    # The records around the first non-finite one, unless --limit 0 shows all.
    shown = chosen if limit is None else _around_bad(view.records, chosen, limit)
    several = len(view.meta) > 1
    rows: list[list[str]] = []
    bad = {}
    for index in shown:
        reading = statistics_of(view.records[index])
        site = view.sites[reading.site]
        if reading.nonfinite_count:
            bad[len(rows)] = "red"
        rows.append(
            [
                row_name(site, reading.call, style),
                reading.dtype,
                f"{reading.step:,}",
                *([str(view.ranks[index])] if several else []),
                f"{reading.numel:,}",
                f"{reading.nonfinite_count:,}",
                format_number(reading.min),
                format_number(reading.max),
                format_number(reading.rms),
            ]
        )
    header = [
        "tensor",
        "dtype",
        "step",
        *(["rank"] if several else []),
        "numel",
        "NaN+Inf",
        "min",
        "max",
        "rms",
    ]
    lines: list[Part] = [Table(header, rows, left=2, width=width, styles=bad, may_be_text=True)]
    hidden = len(chosen) - len(shown)
    if hidden:
        lines.append(f"and {hidden:,} more records (--limit 0 shows all)")
    return lines


def _around_bad(records: np.ndarray, chosen: np.ndarray, limit: int) -> np.ndarray:
    """``limit`` records that include the first non-finite one and what led to it; the last ones
    when all are finite.
    """
    if len(chosen) <= limit:
        return chosen
    bad = np.flatnonzero(nonfinite(records[chosen]))
    end = min(len(chosen), int(bad[0]) + 1 + limit // 4) if len(bad) else len(chosen)
    start = max(0, end - limit)
    return chosen[start : start + limit]


def _trend_table(view: LogView, chosen: np.ndarray, width: int, style: str) -> Table | None:
    """A sparkline of abs max for each tensor that has more than one record."""
    ascii_only = wants_ascii(sys.stdout)
    rows: list[list[str]] = []
    records, ranks = view.records[chosen], view.ranks[chosen]
    several = len(view.meta) > 1
    for site, rank in dict.fromkeys(zip(records["site"].tolist(), ranks.tolist())):
        if len(rows) >= _TRENDS:
            break
        readings = [statistics_of(r) for r in records[(records["site"] == site) & (ranks == rank)]]
        if len(readings) < 2:
            continue
        series = [None if r.abs_max is None else float(r.abs_max) for r in readings]
        bad = [r.nonfinite_count > 0 for r in readings]
        line = sparkline(series, bad, width=32, ascii_only=ascii_only)
        good = [v for v, is_bad in zip(series, bad) if v is not None and not is_bad]
        scale = "log" if is_logarithmic(good) else ""
        first, last = (format_number(good[0]), format_number(good[-1])) if good else ("-", "-")
        name = view.sites[site]
        label = row_name(name, None, style)
        rows.append([label + (f", rank {rank}" if several else ""), line, first, last, scale])
    if not rows:
        return None
    header = ["abs max of", "steps", "first", "last", "scale"]
    return Table(header, rows, left=2, width=width, may_be_text=True)
