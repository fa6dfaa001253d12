"""``fastcheck show``: prints the contents of a log as text or strict JSON."""

from __future__ import annotations

import argparse
import fnmatch
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fastcheck.dump.storage.files import places_in
from fastcheck.errors import ConfigError, did_you_mean, printable
from fastcheck.log.reader import find_logs, read_log, read_logs, read_ranges, read_watch
from fastcheck.log.step_table import step_rows
from fastcheck.log.unobserved import from_meta, lost_lines
from fastcheck.log.view import LogView, first_event
from fastcheck.record.format import Verdict, nonfinite
from fastcheck.record.precision import advice_from_lines
from fastcheck.record.statistics import statistics_of
from fastcheck.report.build import report_from_log
from fastcheck.report.render import parts
from fastcheck.report.summary import step_table, unread_lines
from fastcheck.utils.names.msprobe import is_name, parse
from fastcheck.utils.names.style import STYLES, row_name, tensor_place
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
from fastcheck.utils.text.numbers import (
    and_more,
    counted,
    format_fields,
    format_nonfinite,
    format_number,
)

from .console import print_json, show_sections

if TYPE_CHECKING:
    from fastcheck.record.event import Event
    from fastcheck.record.site import Site


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
            blocks += [Section(label, lines) for label, lines in parts(report, body, True)]
        events, advice = read_watch(path), advice_from_lines(read_ranges(path))
        warnings = [event for event in events if event.get("is_warning")] or events
        watched, advised = [event["text"] for event in warnings[:limit]], map(str, advice[:limit])
        more = (
            ("steps", step_table(step_rows(view), body, limit)),
            ("watch", _first_texts(watched, len(events), body)),
            ("precision", _first_texts([*advised], len(advice), body)),
            ("unread", unread_lines(from_meta(view.meta.values()), body)),
        )
        blocks += [Section(label, lines) for label, lines in more if lines]
    if wanted.events or options.events or not wanted.filtered:
        blocks.append(
            Section("events", _event_lines(path, view, wanted.events, limit, body, options.style))
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
            f"steps {steps[0]:,} to {steps[-1]:,} ({len(steps):,} held), "
            f"{counted(len(records), 'record')} of "
            f"{counted(len(np.unique(records['site'])), 'tensor')}, "
            f"{counted(len(view.events), 'event')}"
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
    lines += [str(m["unreadable"]) for m in view.meta.values() if "unreadable" in m]
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
            f"{counted(view.damaged_records, 'damaged record')} left out: with numbers that no "
            "fastcheck writes"
        )
    if others:
        lines.append(
            f"{counted(len(others), 'older log')} beside it: "
            f"{os.path.basename(os.path.abspath(others[-1]))}"
            + (", ..." if len(others) > 1 else "")
        )
    return lines


def _first_texts(texts: list[str], count: int, width: int) -> list[str]:
    """``texts``: those of ``count`` that are shown."""
    lines = [line for text in texts for line in wrap(printable(text), width)]
    return lines + and_more(count - len(texts), "more (--json has them)")


def _event_lines(
    path: str, view: LogView, events: list[Any], limit: int | None, width: int, style: str
) -> list[str]:
    if not events:
        warnings = sum(line.get("is_warning") is True for line in read_watch(path))
        count = counted(warnings, "warning")
        more = f" of an overflow, and {count} of the watch" if warnings else ""
        return [f"none{more}."]
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
        how = "counted" if event.counted else "not counted"
        rank = f"rank {event.rank}, " if several or event.rank else ""
        lines += wrap(
            f"{rank}step {event.step:,}: {format_nonfinite(reading)} in "
            f"{tensor_place(event.site, reading.call, style, event.api)}, {event.site.direction}",
            width,
            "",
            "  ",
        )
        lines += wrap(f"{Verdict(event.verdict).name.lower()} ({how}): {event.reason}", width, "  ")
    hidden = len(events) - len(events[:limit])
    return lines + and_more(hidden, "more event[|s] (--limit 0 shows all)")


def _record_table(
    view: LogView, wanted: Shown, limit: int | None, width: int, style: str
) -> list[Part]:
    chosen = wanted.records
    # The records around the first non-finite record, unless --limit 0 shows all.
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
                *format_fields(reading, "dtype", "step"),
                *([str(view.ranks[index])] if several else []),
                *format_fields(reading, "numel", "nonfinite_count", "min", "max", "rms"),
            ]
        )
    rank = ["rank"] if several else []
    header = ["tensor", "dtype", "step", *rank, "numel", "NaN+Inf", "min", "max", "rms"]
    lines: list[Part] = [Table(header, rows, left=2, width=width, styles=bad, may_be_text=True)]
    hidden = len(chosen) - len(shown)
    return lines + and_more(hidden, "more record[|s] (--limit 0 shows all)")


def _around_bad(records: np.ndarray, chosen: np.ndarray, limit: int) -> np.ndarray:
    """``limit`` records that include the first non-finite record and what led to it; the last
    records when all are finite.
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


def document(
    path: str, view: LogView, indices: np.ndarray, all_events: Sequence[Event], limit: int | None
) -> dict[str, Any]:
    """The records at ``indices`` of the view and the events, at most ``limit`` of each."""
    shown = indices[:limit]
    events = all_events[:limit]
    first = first_event(all_events)
    watched = read_watch(path)[:limit]
    precision = [item.to_dict() for item in advice_from_lines(read_ranges(path))][:limit]
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
        "left_out": {"records": len(indices) - len(shown), "events": len(all_events) - len(events)},
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


_LIMIT = 40

HELP = "show a log: events, records, trends"

DESCRIPTION = """\
Shows a log: the directory that a stop message names, or the fastcheck_log/ above it (then the
newest log in it). Or a dump: all of it, a step, or a rank of a step. Without filters: the events,
and the records of the last step."""

EPILOG = """\
examples:
  fastcheck show fastcheck_log                    the newest log
  fastcheck show LOG --step 41                    the records of step 41, in device order
  fastcheck show LOG --site layers.3.attn         one module's tensors over the steps, with a trend
  fastcheck show LOG --site 'layers.*' --step 41  patterns as in a shell; quote them
  fastcheck show LOG --site Functional.softmax    an operator (level="op"), as msprobe names it
  fastcheck show LOG --events                     only what overflowed, with the reasons
  fastcheck show dump --step 3                    what a Dumper has read in step 3, in order
  fastcheck show LOG --rank 2                     one rank; without it all, by step, then rank
  fastcheck show LOG --json | python -m json.tool  strict JSON: "nan" and "inf" are strings

exit codes: 0 shown; 1 nothing matches the filters; 2 no log or dump, or wrong usage"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", help="log directory, the fastcheck_log/ above it (the newest), or a dump"
    )
    parser.add_argument(
        "--step", type=int, metavar="N", help="only step N (-1: the last step held)"
    )
    parser.add_argument(
        "--site",
        metavar="PATTERN",
        help="only tensors whose module path or name matches; a plain path includes its submodules",
    )
    parser.add_argument("--events", action="store_true", help="only events")
    parser.add_argument("--rank", type=int, metavar="R", help="only rank R")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of text")
    parser.add_argument(
        "--limit",
        type=int,
        metavar="N",
        help=f"at most N records and N events (0: all; text: default {_LIMIT}, JSON: all)",
    )
    parser.add_argument(
        "--style",
        choices=STYLES,
        default=STYLES[0],
        help="how tensors are named; msprobe: Functional.softmax.7.backward.output.0",
    )


def run(options: argparse.Namespace) -> int:
    """Exit code 0 when something was shown, 1 when the filters leave nothing."""
    path, others, view = _open_log(options.path)
    if options.limit is not None and options.limit < 0:
        raise ConfigError("--limit is negative", expected="0 (all) or more", got=str(options.limit))
    wanted = _filter(view, options)
    limit = options.limit if options.limit is not None else (0 if options.json else _LIMIT)
    if options.json:
        print_json("show", document(path, view, wanted.records, wanted.events, limit or None))
    else:
        show_sections(text_sections(path, others, view, wanted, limit or None, options))
    return 0 if wanted.found else 1


def _open_log(path: str) -> tuple[str, list[str], LogView]:
    """The dump at ``path``, all steps and ranks of it; or the newest log at or right below it, and
    the older logs.
    """
    places = [place for _, _, place in sorted(places_in(path))]
    if places:
        return path, [], read_logs(path, places)
    logs = find_logs(path) or [path]
    return logs[-1], logs[:-1], read_log(logs[-1])


def _filter(view: LogView, options: argparse.Namespace) -> Shown:
    keep = np.ones(len(view.records), bool)
    events = list(view.events)
    problem = ""
    step: int | None = options.step
    if step is not None:
        steps = np.unique(view.records["step"])
        if step < 0 and len(steps):
            step = int(steps[max(step, -len(steps))])
        keep &= view.records["step"] == step
        events = [event for event in events if event.step == step]
        if not keep.any() and not events:
            held = f"{steps[0]:,} to {steps[-1]:,}" if len(steps) else "none"
            problem = f"step {step} is not in this log; steps held: {held}"
    if options.rank is not None:
        keep &= view.ranks == options.rank
        events = [event for event in events if event.rank == options.rank]
        if options.rank not in view.meta:
            problem = f"rank {options.rank} is not in this log; ranks: {sorted(view.meta)}"
    if options.site is not None:
        matching = {index for index, site in view.sites.items() if matches(site, options.site)}
        if not matching:
            names = {site.module or site.module_type for site in view.sites.values()}
            problem = (
                f"no tensor matches {options.site!r}. {did_you_mean(options.site, sorted(names))}"
            )
        keep &= np.isin(view.records["site"], sorted(matching))
        events = [event for event in events if matches(event.site, options.site)]
    filtered = step is not None or options.site is not None or options.rank is not None
    if options.events:
        keep &= False
    elif not filtered and len(view.records):
        keep &= view.records["step"] == view.records["step"].max()
    if filtered and not problem and not keep.any() and not events:
        problem = "nothing in this log matches all of these filters"
    return Shown(np.flatnonzero(keep), events, problem.strip(), filtered)


def matches(site: Site, pattern: str) -> bool:
    """True if a ``--site`` pattern means this site, by module path, type or whole name.

    ``*`` and ``?`` are wild; brackets are not, since labels have them. A plain path includes what
    is below it. Names in msprobe's style mean any call, since calls belong to records.
    """
    if is_name(pattern):
        name = replace(parse(pattern), call=None)
        return name.matches(site, 0)
    module = site.module or site.module_type
    names = (module, site.module_type, f"{module}.{site.label}", site.key, str(site))
    literal = pattern.replace("[", "[[]")
    below = module.startswith(pattern + ".")
    return below or any(fnmatch.fnmatchcase(name, literal) for name in names)
