"""Collects the contents of monitor.summary(), with its notes on what was not observed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Optional

from fastcheck.backends.triton import backend as triton
from fastcheck.calls.module_calls import ModuleNode
from fastcheck.monitor.session.run_meta import STILL_STEPS, RunMeta
from fastcheck.monitor.session.session import Session
from fastcheck.monitor.session.stop_handler import report_of_step
from fastcheck.record.site import NUMBER_ROLES
from fastcheck.report.render import WIDTH, parts
from fastcheck.report.spread import harmless, pending_lines
from fastcheck.report.summary import step_table, summary, unread_lines
from fastcheck.utils.text.layout import GUTTER, line_width, listed

from .watching import Watching

_TOP_SITES = 10
# In the table of steps.
_NUMBERS = ("loss_scale", "learning_rate", "found_inf", "grad_norm", *NUMBER_ROLES)
_NAMED_MODULES = 5


def summary_of(
    session: Session, meta: RunMeta, notes: list[str], watching: Optional[Watching], style: str
) -> str:
    """The text of monitor.summary(). The caller holds both locks."""
    width = line_width(WIDTH)
    body = width - GUTTER
    event_store = session.event_store
    verdicts, places = event_store.tallies()
    log = event_store.archive.log
    pending = event_store.pending
    undecided = {int(event.record["seq"]) for event in pending}
    decided = [e for e in event_store.events if int(e.record["seq"]) not in undecided]
    return summary(
        steps=session.step.index + 1 if session.next_seq else 0,
        records=session.next_seq,
        sites=len(session.sites),
        event_count=event_store.counter.total,
        overflow_nums=session.config.overflow_nums,
        verdict_counts=verdicts,
        top_sites=[(session.sites[n], k) for n, k in places.most_common(_TOP_SITES)],
        last_step=[
            (session.sites[int(record["site"])], record)
            for record in event_store.archive.history.last_step()
            if session.sites[int(record["site"])].role not in _NUMBERS
        ],
        log_path=None if log is None else log.directory,
        notes=notes,
        story=_story(session, meta, style, body),
        pending=pending_lines(pending, style, body),
        harmless=harmless(decided, style, body),
        step_table=step_table(event_store.archive.all_steps(), body),
        watch=[] if watching is None else watching.lines(),
        watch_warnings=0 if watching is None else watching.warning_count,
        unread=unread_lines(session.level.unread_ops(), body),
        style=style,
        width=width,
    )


def _story(session: Session, meta: RunMeta, style: str, width: int) -> list[tuple[str, list[str]]]:
    event_store = session.event_store
    if event_store.archive.first_bad is None:
        return []
    path = None if event_store.archive.log is None else event_store.archive.log.directory
    report = report_of_step(session, meta, event_store.archive.first_bad, path)
    return [] if report is None else parts(replace(report, style=style), width)


def monitor_notes(session: Session, nodes: Sequence[ModuleNode]) -> list[str]:
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
    """Whether the largest learning rate is 0, over more than a warm-up's first step or the end of a
    schedule.
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


def compiled_notes(modules: Sequence[str]) -> list[str]:
    """``modules``: those that ran inside torch.compile."""
    if not modules:
        return []
    return [
        f"{len(modules)} modules run compiled, {modules[0]} first: of what is computed "
        "there, only what modules take and return is read"
    ]


def device_notes(session: Session) -> list[str]:
    """Devices that are not read, and the remarks of the backends."""
    notes = [
        f"tensors on {device} are not read: torch.{device} has no streams and events"
        for device in session.faults.unread_devices
    ]
    return notes + triton.remarks() + session.rings.overflow.remarks()


def lost_notes(session: Session) -> list[str]:
    """Records that were not kept, and how often the host waited for a device."""
    notes = []
    lost = sum(ring.lost_count for ring in session.rings.of.values())
    if lost:
        notes.append(
            f"{lost:,} tensors found no slot in a full ring and left no record, but for the "
            "first non-finite ones: the host was too far ahead, give a smaller Stop(max_lag=)"
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
