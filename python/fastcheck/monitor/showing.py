"""Shows a monitor: its summary with notes on what was not observed, its records, its page, and its
HTML in a notebook.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Optional, Union

import numpy as np

from fastcheck.backends.triton import backend as triton
from fastcheck.calls.module_calls import ModuleNode
from fastcheck.errors import LogError
from fastcheck.log.reader import read_log
from fastcheck.monitor.session.run_meta import STILL_STEPS, RunMeta
from fastcheck.monitor.session.session import Session
from fastcheck.monitor.session.stop_handler import report_of_step, save_held
from fastcheck.notebook import MOST_ROWS, block_html, fields_html, lines_html, table_html
from fastcheck.record.statistics import RecordStatistics, statistics_of
from fastcheck.report.live.trends import SiteTrends
from fastcheck.report.page.write import write_page
from fastcheck.report.render import WIDTH, parts
from fastcheck.report.spread import harmless, pending_lines
from fastcheck.report.summary import (
    found_lines,
    last_step_lines,
    step_table,
    summary,
    unread_lines,
    where_lines,
)
from fastcheck.utils.names.style import row_name, tensor_place
from fastcheck.utils.text.layout import GUTTER, line_width, listed, sparkline, wrap
from fastcheck.utils.text.numbers import counted
from fastcheck.watch.event import WatchEvent

from .core import Core

# Columns of the table of steps.
_NUMBERS = ("loss_scale", "learning_rate", "found_inf", "grad_norm", "skipped_update")
_TOP_SITES = 10
_NAMED_MODULES = 5
_EVENTS = 5

# ---- The summary ---------------------------------------------------------------------------------


def summary_of(core: Core, style: str) -> str:
    """The text of monitor.summary(). The caller holds both locks."""
    body = line_width(WIDTH) - GUTTER
    session, watching, event_store = core.session, core.watching, core.session.event_store
    verdicts, places = event_store.tallies()
    archive, pending = event_store.archive, event_store.pending
    undecided = {int(event.record["seq"]) for event in pending}
    decided = [e for e in event_store.events if int(e.record["seq"]) not in undecided]
    steps = session.step.index + 1 if session.next_seq else 0
    counts = (steps, "step"), (session.next_seq, "record"), (len(session.sites), "tensor")
    watched = "{}, {} of {}".format(*(counted(number, noun) for number, noun in counts))
    warnings = 0 if watching is None else watching.warning_count
    total, most = event_store.counter.total, session.config.overflow_nums
    last = [(session.sites[int(record["site"])], record) for record in archive.history.last_step()]
    last = [(site, record) for site, record in last if site.role not in _NUMBERS]
    top_sites = [(session.sites[n], k) for n, k in places.most_common(_TOP_SITES)]
    log = "" if archive.log is None else archive.log.directory
    return summary(
        [
            ("watched", wrap(watched, body)),
            ("found", found_lines(total, most, verdicts, warnings, body)),
            *_story(session, core.meta, style, body),
            ("pending", pending_lines(pending, style, body)),
            ("harmless", harmless(decided, style, body)),
            ("steps", step_table(archive.all_steps(), body)),
            ("watch", _wrapped([] if watching is None else watching.lines(), body)),
            ("where", where_lines(top_sites, body, style)),
            ("last step", last_step_lines(last, body, style)),
            ("unread", unread_lines(session.level.unread_ops(), body)),
            ("log", wrap(f"{log}   (fastcheck show {log})", body) if log else []),
            ("note", _wrapped(notes_of(core), body)),
        ]
    )


def _wrapped(texts: Sequence[str], width: int) -> list[str]:
    return [line for text in texts for line in wrap(text, width)]


def _story(session: Session, meta: RunMeta, style: str, width: int) -> list[tuple[str, list[str]]]:
    event_store = session.event_store
    if event_store.archive.first_bad is None:
        return []
    path = None if event_store.archive.log is None else event_store.archive.log.directory
    report = report_of_step(session, meta, event_store.archive.first_bad, path)
    return [] if report is None else parts(replace(report, style=style), width)


def notes_of(core: Core) -> list[str]:
    """Notes that name what was not observed, with the reason."""
    stalled = core.state.stalled_weights
    return [
        *_monitor_notes(core.session, core.nodes),
        *_compiled_notes(core.hooks.compiled_modules),
        *map(str, core.boundary.mismatches),
        *([] if stalled is None else stalled.notes),
        *_device_notes(core.session),
        *core.hooks.graphs.remarks(),
        *_lost_notes(core.session),
    ]


def _monitor_notes(session: Session, nodes: Sequence[ModuleNode]) -> list[str]:
    """Notes on what was switched off in the run, and on the modules that never ran."""
    notes = list(session.faults.notes)
    silent = [node.name for node in nodes if node.is_callable and not node.total_calls]
    if silent:
        notes.append(
            "never seen running, because nothing called them or because they are compiled "
            f"where nothing can be read: {listed(silent, _NAMED_MODULES)}"
        )
    return notes + _still_rates(session)


def _still_rates(session: Session) -> list[str]:
    """A line if the largest learning rate is 0 over more than a warm-up's first step or the end of
    a schedule.
    """
    rows = [row for row in session.event_store.archive.all_steps() if row.learning_rate is not None]
    moving = [at for at, row in enumerate(rows) if row.learning_rate != 0.0]
    still = rows[moving[-1] + 1 :] if moving else rows
    if not moving and len(still) > 1:
        return [
            f"the learning rate of every parameter group was 0 in all {len(still):,} steps: no "
            "weight has moved"
        ]
    if len(still) >= STILL_STEPS:
        return [
            "the learning rate of every parameter group has been 0 since step "
            f"{still[0].step:,} ({len(still):,} steps): no weight moves any more"
        ]
    return []


def _compiled_notes(modules: Sequence[str]) -> list[str]:
    """``modules``: those that ran inside torch.compile."""
    if not modules:
        return []
    return [
        f"{len(modules)} modules run compiled, {modules[0]} first: of what is computed "
        "there, only what modules take and return is read"
    ]


def _device_notes(session: Session) -> list[str]:
    """Devices that are not read, and the remarks of the backends."""
    notes = [
        f"tensors on {device} are not read: torch.{device} has no streams and events"
        for device in session.faults.unread_devices
    ]
    return notes + triton.remarks() + session.rings.overflow.remarks()


def _lost_notes(session: Session) -> list[str]:
    """Records that were not kept, and how often the host waited for a device."""
    notes = []
    lost = sum(ring.lost_count for ring in session.rings.of.values())
    if lost:
        notes.append(
            f"{lost:,} tensors found no slot in a full ring and left no record, but for the "
            "first non-finite tensors: the host was too far ahead, give a smaller Stop(max_lag=)"
        )
    unread = session.faults.unread_count
    if unread:
        notes.append(
            f"small tensors that left no record: {unread:,}, overwritten before "
            "their turn to be read. Tensors of the same sites are read at once since then"
        )
    if session.drain.wait_count:
        notes.append(
            f"the host waited {session.drain.wait_count:,} times because it was "
            f"max_lag={session.config.stop.max_lag} steps ahead of the device"
        )
    event_store = session.event_store
    dropped = event_store.archive.history.dropped_records
    if dropped:
        notes.append(f"{dropped:,} records of a very long step were dropped from memory")
    if event_store.archive.forgotten:
        notes.append(
            f"{event_store.archive.forgotten:,} older events were dropped from memory: "
            f"monitor.events has the youngest {len(event_store.events):,}"
        )
    log = event_store.archive.log
    if log is not None and log.dropped_events:
        notes.append(
            f"{log.dropped_events:,} events are not in the log, whose limit "
            f"({session.config.log.limit}) left no room: the first ones are"
        )
    return notes


# ---- Records and the page ------------------------------------------------------------------------


@contextmanager
def _held(session: Session, log_is_whole: bool) -> Iterator[Optional[str]]:
    """Takes both locks, and the records in that have arrived. Gives the folder of the log; None:
    it does not hold all that is held in memory.
    """
    event_store = session.event_store
    with session.lock, event_store.lock:
        session.collect()
        log = event_store.archive.log
        if not session.rings.is_deferred or session.removed:
            event_store.store(session.step)
        is_whole = log is not None and (log_is_whole or not log.failed)
        yield log.directory if log is not None and is_whole else None


def held_records(session: Session, log_is_whole: bool) -> np.ndarray:
    """The records of Monitor.records(). ``log_is_whole``: the log was closed after all was written
    to it.
    """
    store = session.event_store
    with _held(session, log_is_whole) as log:
        if log is None:
            return store.archive.history.all()
        return read_log(log, rank=store.ranks.own).records


def write_report(
    session: Session,
    meta: RunMeta,
    watched: Sequence[WatchEvent],
    path: Union[str, os.PathLike[str]],
    log_is_whole: bool,
    style: str,
) -> None:
    """Writes the page of Monitor.report(). ``watched``: the events of the watch, which a log has;
    ``log_is_whole``: as in held_records().
    """
    with _held(session, log_is_whole) as log:
        if log is not None:
            write_page(log, path, style)
            return
        with tempfile.TemporaryDirectory() as directory:
            saved = save_held(session, meta, watched, os.path.join(directory, "memory"))
            if saved is None:
                raise LogError("the records in memory could not be written to a temporary folder")
            write_page(saved, path, style, "held in memory")


# ---- In a notebook -------------------------------------------------------------------------------


def html_of(core: Core, title: str) -> str:
    """The HTML of a monitor in a notebook. Takes both locks."""
    session, watching, event_store = core.session, core.watching, core.session.event_store
    with session.lock, event_store.lock:
        session.collect()
        rows = event_store.archive.all_steps()
        last = event_store.archive.history.last_step()
        history = event_store.archive.history.all()
        events = [event for event in event_store.events if event.counted]
    numbers = rows[-1] if rows else None
    log = event_store.archive.log
    fields: list[tuple[str, object]] = [
        ("steps", session.step.index + 1 if session.next_seq else 0),
        ("records", session.next_seq),
        ("tensors", len(session.sites)),
        ("counted events", event_store.counter.total),
        ("log", None if log is None else log.directory),
    ]
    if numbers is not None:
        fields += [
            (f"loss, step {numbers.step:,}", numbers.loss),
            ("loss scale", numbers.scale),
            ("learning rate", numbers.learning_rate),
            ("gradient norm", numbers.gradient_norm),
        ]
    lines = [
        f"step {event.step:,}: {event.verdict.name.lower()}, "
        f"{tensor_place(event.site, int(event.record['call']), session.config.stop.style)}"
        for event in events[:_EVENTS]
    ]
    more = [f"and {len(events) - _EVENTS:,} more events"] if len(events) > _EVENTS else []
    return block_html(
        title,
        fields_html(fields),
        lines_html([*lines, *more, *([] if watching is None else watching.lines())]),
        _sites(session, last, history),
    )


def _sites(session: Session, last: np.ndarray, history: np.ndarray) -> str:
    """The tensors of the last step with the least headroom; non-finite tensors come first."""
    numbers = [n for n, site in enumerate(session.sites) if site.role in _NUMBERS]
    last = last[~np.isin(last["site"], numbers)]
    if not len(last):
        return ""
    now = SiteTrends()
    now.add(last)
    trends = SiteTrends()
    trends.add(history)
    bits = now.headroom()
    seen = np.flatnonzero(now.seen)
    order = seen[np.argsort(np.where(np.isnan(bits[seen]), np.inf, bits[seen]), kind="stable")]
    shown = [(int(n), statistics_of(now.last[n])) for n in order[:MOST_ROWS]]
    cells = [
        [
            row_name(session.sites[number], None, session.config.stop.style),
            reading.dtype,
            reading.nonfinite_count,
            reading.abs_max,
            reading.rms,
            _bits(float(bits[number]), reading),
            _spark(trends, number),
        ]
        for number, reading in shown
    ]
    bad = [reading.overflow_count > 0 for _, reading in shown]
    header = ["tensor", "dtype", "NaN+Inf", "abs max", "rms", "headroom, bits", "last steps"]
    return table_html(header, cells, bad, len(order))


def _bits(bits: float, reading: RecordStatistics) -> Optional[float]:
    return None if reading.overflow_count or not np.isfinite(bits) else round(bits, 1)


def _spark(trends: SiteTrends, number: int) -> str:
    values, bad = trends.series(number)
    return sparkline(values, bad, len(values)).strip()
