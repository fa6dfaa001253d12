"""Writes the page of a log: one HTML file that loads nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Callable, Optional, Union

import numpy as np

from fastcheck._version import __version__
from fastcheck.errors import LogError
from fastcheck.log.reader import log_parts, newest_log, read_watch
from fastcheck.log.view import first_event
from fastcheck.record.event import Event
from fastcheck.record.format import VERDICT_MASK, VERDICT_SHIFT, Verdict
from fastcheck.record.site import Site
from fastcheck.report.advice.choose import advise
from fastcheck.report.advice.watched import advice_of, first_mover, gravest
from fastcheck.report.build import report_from_log, stop_path
from fastcheck.report.message import packed
from fastcheck.report.render import headline, report_sections
from fastcheck.report.stop_report import StopReport
from fastcheck.utils.names.style import STYLES
from fastcheck.utils.private import write_private, writing
from fastcheck.utils.text.numbers import counted, format_steps, to_json

from .collect import Collected, collect
from .container import (
    Container,
    details_html,
    headline_html,
    lines_html,
    page_html,
    text_html,
    write_html,
)
from .grid import values_of
from .parts import add_grid, dtype_list, json_numbers, step_columns

#: The page's name in the directory of the log.
PAGE = "report.html"
# About a second of work. `fastcheck report` makes the page of a larger log.
_MOST_BYTES = 128 << 20
_MOST_WATCHED = 500
# A forecast beyond it is no place on an axis.
_MOST_STEPS = 1 << 53
_LOSS = "the loss"


def watched_events(contents: Collected) -> dict[str, Any]:
    """``watched``: the first events by step, where there are more than 500 those that warn first;
    ``watch_count``: how many there are. What is no such event is left out.
    """
    lines = watch_lines(contents)
    if not lines:
        return {"watched": [], "watch_count": 0}
    chosen = sorted(lines, key=lambda line: not line.get("is_warning"))[:_MOST_WATCHED]
    row_of = _rows_by_name(contents)
    shown = [_event_fields(line, row_of) for line in sorted(chosen, key=lambda line: line["step"])]
    return {"watched": shown, "watch_count": len(lines)}


def watch_lines(contents: Collected) -> list[dict[str, Any]]:
    """The events of the watch, by step."""
    return [line for line in read_watch(contents.directory) if _is_whole(line)]


def _rows_by_name(contents: Collected) -> dict[tuple[int, str], int]:
    rows = {(rank, str(site)): row for (rank, site), row in contents.row_of.items()}
    losses = [(rank, row) for (rank, site), row in contents.row_of.items() if site.role == "loss"]
    # A mover without a site; the first loss of several.
    return {**rows, **{(rank, _LOSS): row for rank, row in reversed(losses)}}


def _is_whole(line: Mapping[str, Any]) -> bool:
    return (
        type(line["step"]) is int
        and abs(line["step"]) < _MOST_STEPS
        and type(line.get("rank")) is int
        and isinstance(line.get("kind"), str)
    )


def _event_fields(line: Mapping[str, Any], row_of: Mapping[tuple[int, str], int]) -> dict[str, Any]:
    rank, where = line["rank"], _site_text(line.get("site"))
    return {
        "step": line["step"],
        "rank": rank,
        "kind": line["kind"],
        "row": row_of.get((rank, where), -1),
        "where": where,
        "value": _number(line.get("value")),
        "reference": _number(line.get("reference")),
        "score": _number(line.get("score")),
        "is_warning": line.get("is_warning") is True,
        "cause": str(line.get("cause") or ""),
        "interval": _interval(line["step"], line.get("interval")),
        "mover": _mover(line, row_of),
        "text": line["text"],
    }


def _site_text(fields: Any) -> str:
    try:
        return "" if fields is None else str(Site.from_dict(fields))
    except (AttributeError, TypeError):
        return ""


def _mover(
    line: Mapping[str, Any], row_of: Mapping[tuple[int, str], int]
) -> Optional[dict[str, Any]]:
    """The first mover."""
    first = first_mover(line)
    if first is None:
        return None
    site = first.get("site")
    name = site if isinstance(site, str) else _LOSS
    text = f"{name} ({first.get('signal')}, step {first['step']:,})"
    return {
        "row": row_of.get((line["rank"], name), -1) if site is None or site == name else -1,
        "step": first["step"],
        "text": text,
    }


def _interval(step: int, interval: Any) -> Optional[list[float]]:
    """The steps between which a forecast lies, of the numbers of steps from here."""
    if not isinstance(interval, list) or len(interval) != 2:
        return None
    ends = [float(_number(end) or 0) for end in interval]
    if any(end != end for end in ends):
        return None
    return [float(max(min(step + end, _MOST_STEPS), -_MOST_STEPS)) for end in ends]


def _number(value: Any) -> Any:
    """A number for JSON: text for what is not finite, None for what is no number."""
    if isinstance(value, str):
        return value if value in ("nan", "inf", "-inf") else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return to_json(float(value) if abs(value) < 1e308 or isinstance(value, float) else "inf")


_WIDTH = 96


def verdict_html(report: StopReport, host: str) -> str:
    """The report's headline, what to try, and its other sections. ``host``: that of the rank."""
    first = headline(report) + (f" ({host})" if host and report.world_size > 1 else "")
    parts = [headline_html(first, "bad", []), "<h3>Try</h3>", "<ol>"]
    for item in advise(report):
        code = f"<pre><code>{text_html(item.code)}</code></pre>" if item.code else ""
        parts.append(f"<li>{text_html(item.text)}{code}</li>")
    parts.append("</ol>")
    for label, lines in report_sections(report, _WIDTH):
        is_open = label in ("what", "where")
        title = "Run again" if label == "replay" else label.capitalize()
        parts.append(details_html(title, lines_html(lines), is_open))
    return "\n".join(parts)


def watched_html(contents: Collected, warnings: Sequence[Mapping[str, Any]]) -> str:
    """The verdict on a log whose watch warns: the gravest warning, what to try, and how many others
    there are.
    """
    line, count = gravest(warnings), f"{counted(len(warnings), 'warning')} of the watch"
    first, end, more = _told(contents, line).partition(". ")
    head = headline_html(first + end.strip(), "bad", advice_of(line), more)
    return f"{head}\n<p>{count}, listed under What was unusual. {_extent(contents)}</p>"


def _told(contents: Collected, line: Mapping[str, Any]) -> str:
    """The text of an event of the watch; of several ranks with the rank and its host."""
    rank, text = line["rank"], str(line["text"])
    if len(contents.meta) == 1:
        return text
    host = contents.meta.get(rank, {}).get("host")
    on = f" on rank {rank}" + (f" ({host})" if host else "")
    # Texts of the watch begin with "step 12: "; those of another form keep theirs.
    head, colon, rest = text.partition(": ")
    return f"{head}{on}{colon}{rest}" if head.startswith("step ") else f"{text}{on}"


def healthy_html(contents: Collected, harmless: int) -> str:
    """The verdict on a log without a counted event."""
    bad = len(contents.bad)
    lines = watch_lines(contents)
    warnings = [line for line in lines if line.get("is_warning") is True]
    if warnings:
        return watched_html(contents, warnings)
    if not contents.records:
        text = "This log holds no records."
    elif harmless or bad:
        text = (
            f"No event was counted. {counted(bad, 'record')} with a NaN or an infinity, "
            f"{harmless:,} of them with a verdict."
        )
    else:
        text = "Every number that was read is finite."
    kind = "good" if contents.records else ""
    if lines:
        text += f" Unusual, but without a warning: {_told(contents, gravest(lines))}"
        kind = ""
    return f"{headline_html(text, kind, [])}\n<p>{_extent(contents)}</p>"


def _extent(contents: Collected) -> str:
    steps = sorted({int(step) for step in contents.rows.columns()["last_step"].tolist()})
    last = f" up to {format_steps(steps[-1:])}" if steps else ""
    return (
        f"{counted(contents.records, 'record')} of {counted(contents.rows.count, 'tensor')}{last}."
    )


_MOST = 400
# The words of a reason before the finding that it follows from (verdict/findings.py).
_FOLLOWS = "it follows from "


def passed_places(contents: Collected, events: Sequence[Event]) -> dict[str, Any]:
    """The tensors of the first event's step that overflowed, in the order of the device.

    Each has the numbers of the places that it came from: ``read``, what the operator that made it
    had read, as op level records it; else ``follows``, which finding the verdict derives it from.
    """
    first, records = contents.evidence.first, contents.evidence.spread()
    if first is None:
        return {"count": 0, "places": []}
    of_step = {
        int(event.record["seq"]): event
        for event in events
        if (event.rank, event.step) == (first.rank, first.step)
    }
    shown = records[:_MOST]
    number_of = {int(seq): number for number, seq in enumerate(shown["seq"].tolist())}
    # The first of those with one name: the verdict names tensors, not calls.
    named: dict[str, int] = {}
    for seq, found_event in of_step.items():
        if seq in number_of:
            named.setdefault(str(found_event.site), number_of[seq])
    rows = contents.rows_at(first.rank, shown["site"].tolist())
    places = []
    for number, (record, row) in enumerate(zip(shown, rows)):
        seq = int(record["seq"])
        event = of_step.get(seq)
        read = [] if event is None else [number_of.get(seq) for _, seq in event.inputs]
        cause = None if event is None else named.get(event.reason.partition(_FOLLOWS)[2])
        verdict = (int(record["flags"]) & VERDICT_MASK) >> VERDICT_SHIFT
        places.append(
            {
                "row": row,
                "seq": seq,
                "call": int(record["call"]),
                "verdict": verdict if event is None else int(event.verdict),
                "counts": [int(record[f"{kind}_count"]) for kind in ("nan", "posinf", "neginf")],
                "read": sorted(
                    {source for source in read if source is not None and source != number}
                ),
                "follows": [] if cause is None or cause == number else [cause],
            }
        )
    return {"count": len(records), "places": places}


_MOST_EVENTS, _MOST_AROUND = 500, 40


def page_data(contents: Collected, events: Sequence[Event]) -> tuple[str, str]:
    """The header and the arrays in base64. ``events``: those of the log, with their records."""
    container = Container()
    columns = contents.rows.columns()
    header: dict[str, Any] = {
        "format": 1,
        "fastcheck": __version__,
        "directory": contents.name,
        "records": contents.records,
        "damaged": contents.damaged,
        "dropped_bytes": contents.dropped_bytes,
        "dtypes": dtype_list(),
        "verdicts": [verdict.name.lower() for verdict in Verdict],
        "sites": _site_columns(contents.sites),
        "rows": {name: json_numbers(column) for name, column in columns.items()},
        "bad": contents.bad.T.tolist(),
        "steps": to_json(
            {rank: step_columns(contents.steps, rank) for rank in sorted(contents.meta)}
        ),
        "events": [_event(event, contents) for event in events[:_MOST_EVENTS]],
        "event_count": len(events),
        "first": _first(contents),
        "opens": _opens(contents),
        "spread": passed_places(contents, events),
        **watched_events(contents),
        "meta": to_json({rank: _options(meta) for rank, meta in contents.meta.items()}),
    }
    header.update(add_grid(container, contents.grid, len(columns["site"])))
    header["around"] = _add_around(container, contents)
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


def _add_around(container: Container, contents: Collected) -> Optional[dict[str, Any]]:
    """Exact values of the first event's step, and of the steps around it, of the sites that it
    reached on its rank; None without an event.
    """
    first = contents.evidence.first
    records = contents.evidence.around()
    if first is None or not len(records):
        return None
    reached = [first.site, *contents.evidence.spread()["site"].tolist()]
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
    return {"rows": contents.rows_at(first.rank, sites), "steps": steps.tolist()}


def _event(event: Event, contents: Collected) -> dict[str, Any]:
    return {
        "step": event.step,
        "rank": event.rank,
        # -1: a site without records on this rank; a gradient is blamed on who read it.
        "row": contents.row_of.get((event.rank, event.site), -1),
        "where": str(event.site),
        "verdict": int(event.verdict),
        "counted": event.counted,
        "reason": event.reason,
        "line": event.line,
        "counts": [int(event.record[f"{kind}_count"]) for kind in ("nan", "posinf", "neginf")],
    }


def _first(contents: Collected) -> Optional[dict[str, int]]:
    first = contents.evidence.first
    if first is None:
        return None
    (row,) = contents.rows_at(first.rank, [first.site])
    return {"rank": first.rank, "step": first.step, "row": row}


def _opens(contents: Collected) -> Optional[dict[str, int]]:
    """The cell that is chosen when the page opens: that of the first counted event, else the first
    mover of what the headline tells of the watch, else the first of what is not finite; None where
    there is no such cell.
    """
    if contents.evidence.is_counted:
        return _first(contents)
    lines = watch_lines(contents)
    if lines:
        warnings = [line for line in lines if line.get("is_warning") is True]
        event = _event_fields(gravest(warnings or lines), _rows_by_name(contents))
        for at in (event["mover"], event):
            if at is not None and at["row"] >= 0:
                return {"rank": event["rank"], "step": at["step"], "row": at["row"]}
    return _first(contents)


def _options(meta: dict[str, Any]) -> dict[str, Any]:
    """The options of a run, without the rows of steps, which the page has already."""
    return {name: v for name, v in meta.items() if name != "steps" or not isinstance(v, list)}


def page_of_log(
    log: Union[str, os.PathLike[str]],
    style: str = STYLES[0],
    name: Optional[str] = None,
    report: Optional[StopReport] = None,
) -> str:
    """The page of a log directory, or of the newest log right below ``log``, as HTML. ``style``:
    how the verdict names tensors. ``name``: what stands for the log's path in it, where the log
    does not stay. ``report``: that of the stop; None: as report_from_log() has it.

    Raises:
        LogError: there is no log, or it can't be read.
    """
    contents = collect(newest_log(os.fspath(log)))
    view = contents.evidence.view(contents.directory, contents.sites_of, contents.meta)
    report = report or report_from_log(view, first_event(view.events), style)
    contents.name = name or contents.directory
    if report is not None:
        ranks = max(report.world_size, len(contents.meta))
        report = replace(report, log_path=None if name else contents.directory, world_size=ranks)
        verdict = verdict_html(report, str(contents.meta.get(report.rank, {}).get("host") or ""))
    else:
        verdict = healthy_html(contents, len(view.events))
    return page_html(
        f"fastcheck: {contents.name}" if report is None else headline(report),
        os.path.basename(os.path.abspath(contents.name)),
        verdict,
        page_data(contents, view.events),
    )


def write_page(
    log: Union[str, os.PathLike[str]],
    path: Union[str, os.PathLike[str]],
    style: str = STYLES[0],
    name: Optional[str] = None,
    report: Optional[StopReport] = None,
) -> int:
    """Writes the page of ``log`` (see page_of_log()) to ``path``, which it replaces as a whole;
    returns its size in bytes.

    Raises:
        LogError: the log can't be read, or the file can't be written.
    """
    return write_html(path, page_of_log(log, style, name, report))


# ---- The page that a stop leaves in its log ------------------------------------------------------


def with_page(report: StopReport) -> StopReport:
    """The report with the path that its page is to have: none without a log, or with one of more
    than 128 MiB. All ranks that stop together name the same page.

    Raises:
        FastcheckError, OSError: the log can't be read.
    """
    log = report.log_path
    if log is None or report.is_lost:
        return report
    # No rank of several that hold their records in memory has written any yet.
    parts = log_parts(log) if os.path.isdir(log) else {}
    if sum(os.path.getsize(path) for paths in parts.values() for path in paths) > _MOST_BYTES:
        return report
    return replace(report, page=os.path.join(log, PAGE))


def write_stop_page(report: StopReport, rank: int, watched: Callable[[], object]) -> None:
    """Writes the report to its log, and the page that it names, if ``rank``, this rank, is that of
    the culprit: it has the records of the event. ``watched``: has the watch judge the steps that
    wait for it, whose events the log has then.

    Raises:
        FastcheckError, OSError: the log can't be read, or the page can't be written.
    """
    if report.log_path is None or report.rank != rank:
        return
    place = stop_path(report.log_path, rank)
    if not os.path.exists(place):  # the first event is what is shown of a log
        with writing(place, "the report of the stop", LogError):
            write_private(place, packed(report))
    if report.page is not None:
        watched()
        write_page(report.log_path, report.page, report.style, report=report)
