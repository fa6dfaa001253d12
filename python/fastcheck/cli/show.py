"""``fastcheck show``: what a log on disk holds, as text or as strict JSON."""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .._errors import ConfigError, did_you_mean, explain
from .._layout import Part, Section, Table, is_logarithmic, sparkline, wants_ascii, wrap
from .._logread import LogView, find_logs, first_event, read_log, read_logs
from .._numbers import read, spell, spell_nonfinite, to_json
from .._op_names import is_name, parse
from .._op_unread import from_meta, unread_lines
from .._record import Verdict
from .._scaling import ScalingRow, scaling_table
from .._story import report_from_log, story
from .._style import STYLES, place, row_name
from ..dump.files import places_in
from ._console import show_sections
from .show_json import document

if TYPE_CHECKING:
    from .._site import Site

_WIDTH = 100
_LIMIT = 40
_TRENDS = 12

_DESCRIPTION = """\
Shows a log: the directory that a stop message names, the fastcheck_log/ above it (then the newest
log in it), or one file of it. Or a dump: all of it, a step, or a rank of a step. Without filters:
the events, and the records of the last step."""

_EPILOG = """\
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


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "show",
        help="show a log: events, records, trends",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", help="log directory, a file in it, or a dump")
    parser.add_argument("--step", type=int, metavar="N", help="only step N (-1: the last one held)")
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
        help=f"at most N records and N events (0: all; text: {_LIMIT} unless told, JSON: all)",
    )
    parser.add_argument(
        "--style",
        choices=STYLES,
        default=STYLES[0],
        help="how tensors are named; msprobe: Functional.softmax.7.backward.output.0",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Exit code 0 when something was shown, 1 when the filters leave nothing."""
    path, others, view = _read(options.path)
    if options.limit is not None and options.limit < 0:
        raise ConfigError(
            explain("--limit is negative", expected="0 (all) or more", came=str(options.limit))
        )
    wanted = _filter(view, options)
    limit = options.limit if options.limit is not None else (0 if options.json else _LIMIT)
    if options.json:
        shown = document(path, view, wanted.records, wanted.events, limit or None)
        print(json.dumps(to_json(shown), allow_nan=False, indent=1))
    else:
        show_sections(_sections(path, others, view, wanted, limit or None, options))
    return 0 if wanted.found else 1


class _Wanted:
    """What the filters leave: indices of records, and events."""

    def __init__(
        self, records: np.ndarray, events: list[Any], complaint: str, filtered: bool
    ) -> None:
        self.records = records
        self.events = events
        self.complaint = complaint
        self.filtered = filtered

    @property
    def found(self) -> bool:
        return not self.filtered or bool(len(self.records) or self.events)


def _read(path: str) -> tuple[str, list[str], LogView]:
    """The dump at ``path``, all steps and ranks of it; or the newest log at or right below it, and
    the older ones.
    """
    places = [place for _, _, place in sorted(places_in(path))]
    if places:
        return path, [], read_logs(path, places)
    logs = find_logs(path) or [path]
    return logs[-1], logs[:-1], read_log(logs[-1])


def _filter(view: LogView, options: argparse.Namespace) -> _Wanted:
    keep = np.ones(len(view.records), bool)
    events = list(view.events)
    complaint = ""
    step: int | None = options.step
    if step is not None:
        steps = np.unique(view.records["step"])
        if step < 0 and len(steps):
            step = int(steps[max(step, -len(steps))])
        keep &= view.records["step"] == step
        events = [event for event in events if event.step == step]
        if not keep.any() and not events:
            held = f"{steps[0]:,} to {steps[-1]:,}" if len(steps) else "none"
            complaint = f"step {step} is not in this log; steps held: {held}"
    if options.rank is not None:
        keep &= view.ranks == options.rank
        events = [event for event in events if event.rank == options.rank]
        if options.rank not in view.meta:
            complaint = f"rank {options.rank} is not in this log; ranks: {sorted(view.meta)}"
    if options.site is not None:
        matching = {index for index, site in view.sites.items() if matches(site, options.site)}
        if not matching:
            names = {site.module or site.module_type for site in view.sites.values()}
            complaint = (
                f"no tensor matches {options.site!r}. {did_you_mean(options.site, sorted(names))}"
            )
        keep &= np.isin(view.records["site"], sorted(matching))
        events = [event for event in events if matches(event.site, options.site)]
    filtered = step is not None or options.site is not None or options.rank is not None
    if options.events:
        keep &= False
    elif not filtered and len(view.records):
        keep &= view.records["step"] == view.records["step"].max()
    if filtered and not complaint and not keep.any() and not events:
        complaint = "nothing in this log matches all of these filters"
    return _Wanted(np.flatnonzero(keep), events, complaint.strip(), filtered)


def matches(site: Site, pattern: str) -> bool:
    """Whether a ``--site`` pattern means this site, by module path, type or whole name.

    ``*`` and ``?`` are wild; brackets are not, since labels have them. A plain path includes what
    is below it. Names in msprobe's style mean any call, since calls belong to records.
    """
    if is_name(pattern):
        name = replace(parse(pattern), call=None)
        return name.matches(site, 0)
    module = site.module or site.module_type
    names = (module, site.module_type, f"{module}.{site.label}", str(site))
    literal = pattern.replace("[", "[[]")
    below = module.startswith(pattern + ".")
    return below or any(fnmatch.fnmatchcase(name, literal) for name in names)


def _sections(
    path: str,
    others: list[str],
    view: LogView,
    wanted: _Wanted,
    limit: int | None,
    options: argparse.Namespace,
) -> list[Section]:
    blocks = [Section("log", _about(path, others, view))]
    if wanted.complaint:
        return [*blocks, Section("", wrap(wanted.complaint, _WIDTH - 10))]
    body = _WIDTH - 10
    if not wanted.filtered and not options.events:
        report = report_from_log(view, first_event(wanted.events), options.style)
        blocks += [Section(label, lines) for label, lines in story(report, body)]
        scaling = scaling_table(_scaling(view), body)
        if scaling:
            blocks.append(Section("scaling", scaling))
        unread = unread_lines(from_meta(view.meta.values()), body)
        if unread:
            blocks.append(Section("unread", unread))
    if wanted.events or options.events or not wanted.filtered:
        blocks.append(Section("events", _events(view, wanted.events, limit, body, options.style)))
    if len(wanted.records):
        blocks.append(Section("records", _records(view, wanted, limit, body, options.style)))
        if options.site is not None:
            trends = _trends(view, wanted.records, body, options.style)
            if trends is not None:
                blocks.append(Section("trend", [trends]))
    return blocks


def _about(path: str, others: list[str], view: LogView) -> list[str]:
    lines = [path]
    records = view.records
    if len(records):
        steps = np.unique(records["step"])
        lines.append(
            f"steps {steps[0]:,} to {steps[-1]:,} ({len(steps):,} held), {len(records):,} records "
            f"of {len(np.unique(records['site'])):,} tensors, {_count(len(view.events), 'event')}"
        )
    else:
        lines.append("no records")
    ranks = sorted(view.meta)
    meta = view.meta[ranks[0]] if ranks else {}
    said = [
        f"{name} {meta[name]}" for name in ("fastcheck", "torch", "host", "created") if name in meta
    ]
    if len(ranks) > 1:
        said.insert(0, f"ranks {', '.join(map(str, ranks))}")
    if said:
        lines.append(" · ".join(said))
    if view.dropped_bytes:
        lines.append(
            f"{view.dropped_bytes:,} bytes at the end were cut short (the process died while "
            "writing)"
        )
    if others:
        lines.append(
            f"{len(others)} older log{'s' if len(others) > 1 else ''} beside it: "
            f"{os.path.basename(others[-1])}" + (", ..." if len(others) > 1 else "")
        )
    return lines


def _scaling(view: LogView) -> list[ScalingRow]:
    """Of the first rank that has any: all of them scale alike."""
    for rank in sorted(view.meta):
        rows = view.meta[rank].get("scaling")
        if rows:
            return [
                ScalingRow(
                    int(row["step"]),
                    None if row["loss"] is None else float(row["loss"]),
                    bool(row["overflow"]),
                    float(row["scale"]),
                )
                for row in rows
            ]
    return []


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _events(
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
            + place(first.site, int(first.record["call"]), style, first.api)
            + (also if with_it else ""),
            width,
            "",
            "  ",
        )
    for event in events[:limit]:
        reading = read(event.record)
        counted = "counted" if event.counted else "not counted"
        rank = f"rank {event.rank}, " if several or event.rank else ""
        lines += wrap(
            f"{rank}step {event.step:,}: {spell_nonfinite(reading)} in "
            f"{place(event.site, reading.call, style, event.api)}, {event.site.direction}",
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


def _records(
    view: LogView, wanted: _Wanted, limit: int | None, width: int, style: str
) -> list[Part]:
    chosen = wanted.records
    # The end of a list is where the overflow is, unless one step was asked for as a whole.
    shown = chosen if limit is None else _around_bad(view.records, chosen, limit)
    several = len(view.meta) > 1
    rows: list[list[str]] = []
    bad = {}
    for index in shown:
        reading = read(view.records[index])
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
                spell(reading.min),
                spell(reading.max),
                spell(reading.rms),
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
    lines: list[Part] = [Table(header, rows, left=2, width=width, styles=bad)]
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
    counts = records[chosen]
    bad = np.flatnonzero(counts["nan_count"] + counts["posinf_count"] + counts["neginf_count"])
    end = min(len(chosen), int(bad[0]) + 1 + limit // 4) if len(bad) else len(chosen)
    start = max(0, end - limit)
    return chosen[start : start + limit]


def _trends(view: LogView, chosen: np.ndarray, width: int, style: str) -> Table | None:
    """A sparkline of abs max for each tensor that has more than one record."""
    ascii_only = wants_ascii(sys.stdout)
    rows: list[list[str]] = []
    records, ranks = view.records[chosen], view.ranks[chosen]
    several = len(view.meta) > 1
    for site, rank in dict.fromkeys(zip(records["site"].tolist(), ranks.tolist())):
        if len(rows) >= _TRENDS:
            break
        readings = [read(r) for r in records[(records["site"] == site) & (ranks == rank)]]
        if len(readings) < 2:
            continue
        series = [None if r.abs_max is None else float(r.abs_max) for r in readings]
        bad = [r.nonfinite_count > 0 for r in readings]
        line = sparkline(series, bad, width=32, ascii_only=ascii_only)
        good = [v for v, is_bad in zip(series, bad) if v is not None and not is_bad]
        scale = "log" if is_logarithmic(good) else ""
        first, last = (spell(good[0]), spell(good[-1])) if good else ("-", "-")
        name = view.sites[site]
        label = row_name(name, None, style)
        rows.append([label + (f", rank {rank}" if several else ""), line, first, last, scale])
    if not rows:
        return None
    return Table(["abs max of", "steps", "first", "last", "scale"], rows, left=2, width=width)
