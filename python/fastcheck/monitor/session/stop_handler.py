"""Carries out a stop: after the hook's own work, or at the step boundary among several ranks."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Callable, Optional, Protocol, Union

import numpy as np

from fastcheck.errors import warn
from fastcheck.log.writer import default_directory, found_at, is_default, working_directory
from fastcheck.monitor.distributed.agreement import RankAgreement
from fastcheck.monitor.distributed.channel import Agreed
from fastcheck.record.event import Event
from fastcheck.record.format import RECORD_DTYPE, Verdict
from fastcheck.record.site import Site
from fastcheck.report.actions import CallbackSink, ConsoleSink, RaisingSink
from fastcheck.report.message import packed, unpacked
from fastcheck.report.spread import pending_lines
from fastcheck.report.stop_report import Dumped, StopReport
from fastcheck.verdict.findings import Finding
from fastcheck.verdict.policy import Decision
from fastcheck.verdict.step import Step

from .config import Config
from .event_store import Due
from .evidence import build_report
from .held import save_held
from .options import Action
from .session import Session
from .stop_page import with_page, write_stop_page

Sink = Callable[[StopReport], None]

_BEGINNINGS = (Verdict.ORIGIN, Verdict.ARRIVED)
# Of events of one step on several ranks, one that began on its rank, or in that rank's batch, comes
# before one that may have come from another rank. Of two alike, the one comes first before which
# its rank had read fewer tensors of the step: ranks do the same work in the same order.
_BEGAN, _ARRIVED, _FOLLOWED = 0, 1, 2
_GRADE_SHIFT = 48
_EXIT_WIDTH = 86


class StopDumper(Protocol):
    """Writes the call that is to blame for a stop to disk."""

    def dump(self, culprit: Event, /) -> Dumped: ...


class StopHandler:
    """Called outside the session's lock and outside every guard: what a sink raises reaches the
    training loop.

    ``agreement``: that of the ranks, None where this one decides alone.
    """

    def __init__(self, session: Session, agreement: Optional[RankAgreement] = None) -> None:
        self._session = session
        self._act = _make_sink(session.config)
        self._agreement = agreement
        # The first stop that is due and was not proposed to the other ranks yet.
        self._held: Optional[Due] = None
        self._proposed: Optional[StopReport] = None
        # Set by Monitor for Stop(dump=): writes the culprit's call to disk.
        self.dumper: Optional[StopDumper] = None
        self._has_dumped = False
        self._start = working_directory()

    def __call__(self) -> None:
        """What is due is done now, but for stops where several ranks have to agree first."""
        event_store = self._session.event_store
        with event_store.lock:
            due = list(event_store.due)
            event_store.due.clear()
        for item in due:
            if item[1] is not Decision.STOP:
                self._sink(self._report(item))
            elif self._agreement is None:
                self._stop(self._report(item))
            elif self._held is None and self._proposed is None:
                self._held = item

    def at_step_boundary(self, is_last: bool = False) -> None:
        """At a step boundary: proposes a due stop to the other ranks, and stops if they agree.

        ``is_last``: there will be no further one, and what the last ones agree on is waited for.
        """
        agreement = self._agreement
        if agreement is None:
            self()
            return
        self._take_in()
        self._propose()
        self._stop_if_agreed(agreement.finish() if is_last else agreement.boundary())

    def close(self) -> None:
        """Leaves the agreement without waiting for other ranks."""
        if self._agreement is not None:
            self._agreement.close()

    def report_at_exit(self) -> None:
        """At exit: raises pending stops without agreement, and tells what is undecided where an
        exception ends the process.
        """
        session, event_store = self._session, self._session.event_store
        with session.lock, event_store.lock:
            session.collect()
            event_store.end_run(session.step)
            pending = pending_lines(event_store.pending, session.config.stop.style, _EXIT_WIDTH)
        error = getattr(sys, "last_type", None)
        if pending and error is not None:
            step = session.step.index
            head = f"fastcheck: {error.__name__} ended the run in step {step}. Undecided until then"
            print("\n  ".join([f"{head}:", *pending]), file=sys.stderr)
        self()
        if self._held is not None:
            held, self._held = self._held, None
            self._proposed = self._report(held)
        if self._proposed is not None:
            self._stop(self._proposed)

    # Several ranks

    def _take_in(self) -> None:
        session = self._session
        with session.lock:
            session.collect()
        self()

    def _propose(self) -> None:
        if self._held is None or self._agreement is None:
            return
        held, self._held = self._held, None
        report = self._proposed = self._report(held)
        with self._session.event_store.lock:
            priority = _priority(_culprit(held), held[2])
        self._agreement.propose(report.step, packed(report), priority)

    def _stop_if_agreed(self, agreed: Optional[Agreed]) -> None:
        if agreed is None:
            return
        own, self._proposed, self._held = self._proposed, None, None
        report, is_own = own, agreed.rank == self._session.event_store.rank
        if agreed.message and not (is_own and own is not None):
            try:
                report = unpacked(agreed.message)
                if is_own or report.rank != agreed.rank:
                    raise ValueError("a report of another rank than the sender's")
            except Exception as error:
                self._session.report_internal_error("what another rank reports", error)
                if own is None and not agreed.together:
                    return  # whoever reaches the store can write to it
                report = own
        self._stop(report or _lost_report(agreed))

    # One rank

    def _stop(self, report: StopReport) -> None:
        session, event_store = self._session, self._session.event_store
        with session.lock, event_store.lock:
            # Whoever catches the stop and goes on starts a new step.
            session.is_closed = True
            if self._agreement is not None:
                # All into one directory, whose name came with the report: what of it is on one
                # file system `fastcheck show` reads as one.
                self._save(self._default(report.log_path))
        try:
            write_stop_page(report, event_store.rank)
        except Exception as error:  # the stop is due, with or without its page
            report = self._without_page(report, error)
        self._sink(report)

    def _with_page(self, report: StopReport) -> StopReport:
        try:
            return with_page(report) if self._session.config.stop.report else report
        except Exception as error:
            return self._without_page(report, error)

    @staticmethod
    def _without_page(report: StopReport, error: Exception) -> StopReport:
        first = str(error).replace("\n", ";") or type(error).__name__
        warn(f"fastcheck: the page of the stop could not be written: {first}")
        return replace(report, page=None)

    def _sink(self, report: StopReport) -> None:
        for listener in self._session.event_store.listeners:
            try:
                listener.stopping(report)
            except Exception as error:
                self._session.report_internal_error("its sinks", error)
        self._act(report)

    def _report(self, due: Due) -> StopReport:
        session, event_store = self._session, self._session.event_store
        finding, decision, step = due
        with session.lock, event_store.lock:
            try:
                report = self._whole_report(due)
            except Exception as error:
                # A poor report is better than none, and far better than a run that goes on.
                session.report_internal_error("the evidence of its events", error)
                report = StopReport(
                    event_store.event(finding), step=step.index, rank=event_store.rank
                )
        if self.dumper is None or (decision is not Decision.STOP and self._has_dumped):
            return report
        self._has_dumped = True
        return replace(report, dump=self.dumper.dump(report.culprit))

    def _whole_report(self, due: Due) -> StopReport:
        session, event_store = self._session, self._session.event_store
        finding, decision, step = due
        session.collect()
        world_size = 1 if self._agreement is None else self._agreement.world_size
        if decision is not Decision.STOP:
            return build_report(session, finding, step, self._log_directory(), world_size)
        culprit = _culprit(due)
        event_store.store(step)
        path = self._log_directory()
        if path is None:
            path = self._default()
            if self._agreement is None:
                path = self._save(path)
        return self._with_page(build_report(session, culprit, step, path, world_size))

    def _log_directory(self) -> Optional[str]:
        log = self._session.event_store.log
        return None if log is None or log.failed else log.directory

    def _default(self, path: Optional[str] = None) -> str:
        """Where a stop writes without log_dir=: below what was the working directory of install(),
        with the name that ``path`` of another rank has, if that is a default's.
        """
        given = os.path.join(*Path(path).parts[-2:]) if path else ""
        return found_at(given if is_default(given) else default_directory(), self._start)

    def _save(self, directory: Optional[str]) -> Optional[str]:
        """Writes what is held in memory, unless all of it is in the log already."""
        if directory is None or self._log_directory() is not None:
            return None
        session = self._session
        return save_held(session.event_store, session.sites, directory, session.batches)


def _culprit(due: Due) -> Finding:
    """The first beginning in the step of an event for which a stop is due."""
    finding, _, step = due
    began = [f for f in step.findings.all if f.counted and f.verdict in _BEGINNINGS]
    return min(began, key=lambda f: f.seq, default=finding)


def _priority(culprit: Finding, step: Step) -> int:
    """For RankAgreement.propose()."""
    grade = _FOLLOWED
    if culprit.verdict is Verdict.ORIGIN or culprit.is_data:
        grade = _BEGAN
    elif culprit.verdict is Verdict.ARRIVED:
        grade = _ARRIVED
    return (grade << _GRADE_SHIFT) + max(0, culprit.seq - step.first_seq)


def _lost_report(agreed: Agreed) -> StopReport:
    """For a stop whose report was lost with the rank that had it."""
    record = np.zeros(1, RECORD_DTYPE)[0]
    record["step"] = agreed.step
    event = Event(
        site=Site("", "", "forward", "output", 0, "output"),
        record=record,
        step=agreed.step,
        verdict=Verdict.ARRIVED,
        reason=f"rank {agreed.rank} found it, and its report was lost with that rank",
        counted=True,
        rank=agreed.rank,
    )
    return StopReport(culprit=event, step=agreed.step, rank=agreed.rank, is_lost=True)


def _make_sink(config: Config) -> Sink:
    action: Union[str, Action] = config.stop.action
    if callable(action):
        return CallbackSink(action)
    return RaisingSink() if action == "raise" else ConsoleSink()
