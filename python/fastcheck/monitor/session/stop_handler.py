"""Carries out a stop: after the hook's own work, or at the step boundary among several ranks. The
evidence for its report is gathered here, its page is written, and the action runs.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import sys
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, NoReturn, Optional, Union

import numpy as np
import torch

from fastcheck.calls.module_calls import Call
from fastcheck.errors import FastcheckError, FastcheckWarning, warn
from fastcheck.log.writer import (
    default_directory,
    found_at,
    is_default,
    save_log,
    working_directory,
)
from fastcheck.monitor.distributed.agreement import RankAgreement
from fastcheck.monitor.distributed.channel import Agreed
from fastcheck.monitor.distributed.replicas import ReplicaCheck, ReplicaMismatch
from fastcheck.record.event import NOT_UPDATED, WHEN_LAST_READ, Event
from fastcheck.record.format import RECORD_DTYPE, Verdict, is_nonfinite
from fastcheck.record.site import Site
from fastcheck.report.build import Evidence, argument_records, make_report
from fastcheck.report.error import OverflowDetected
from fastcheck.report.message import packed, unpacked
from fastcheck.report.page.write import with_page, write_stop_page
from fastcheck.report.render import brief
from fastcheck.report.spread import pending_lines
from fastcheck.report.stop_report import Dumped, MadeBy, StopReport
from fastcheck.report.trend import Trend
from fastcheck.utils.torch.versions import GradScaler
from fastcheck.verdict.findings import Finding
from fastcheck.verdict.step import Decision, Step
from fastcheck.watch.event import WatchEvent

from .config import Config
from .event_store import Due
from .options import Action
from .run_meta import RunMeta
from .session import Session


def call_back(function: Callable[[Event], Any], report: StopReport) -> None:
    """Calls ``function(event)``. Its exceptions reach the training loop; its result is ignored."""
    if report.dump is not None:
        # The function is given the event, which does not name the dump.
        text = " ".join(report.dump.lines(1000))
        warn(f"fastcheck: {text}")
    function(report.culprit)


def warn_of(report: StopReport) -> None:
    """Warns (FastcheckWarning) about the report's culprit, in a few lines.

    The text names the step, so Python's rule of showing equal warnings once hides none of them.
    """
    text = brief(report)
    if report.dump is not None:
        text += "\n  dump: " + " ".join(report.dump.lines(1000))
    if report.log_path is not None:
        text += f"\n  log: {report.log_path}"
    warn(text)


def raise_stop(report: StopReport) -> NoReturn:
    """Raises OverflowDetected, whose text is the whole report."""
    raise OverflowDetected(report)


class StepBoundary:
    """Carries out what is due at the end of a step. Called outside the session's lock, by the
    thread that closed the step.
    """

    def __init__(
        self, session: Session, stop_handler: StopHandler, checks: Sequence[ReplicaCheck]
    ) -> None:
        #: The checks of replicas: those made by themselves, and that of check_replicas().
        self.checks = list(checks)
        self.mismatches: list[ReplicaMismatch] = []
        # Closed after the last stop was delivered; install() adds to it.
        self.at_end = contextlib.ExitStack()
        self._session = session
        self._stop_handler = stop_handler

    def __call__(self) -> None:
        """Raises what the ranks agree on."""
        for check in self.checks:
            self._compare(check.boundary)
        self._stop_handler.at_step_boundary()

    def finish(self, waits: bool) -> None:
        """There will be no further boundary. ``waits``: for what the last boundaries have begun."""
        if not waits:
            self._stop_handler.close()
            return
        for check in self.checks:
            self._compare(check.finish)
        self._stop_handler.at_step_boundary(is_last=True)

    def _compare(self, advance: Callable[[int], Optional[ReplicaMismatch]]) -> None:
        mismatch = advance(self._session.step.index)
        if mismatch is not None:
            self.mismatches.append(mismatch)
            for listener in self._session.event_store.listeners:
                listener.replicas_differ(mismatch.step, str(mismatch))
            warn(str(mismatch))


#: The label of an operand that an operator has written in place.
_IN_PLACE = re.compile(r" \(\S+\.\w+_(\.\w+)?\)$")


def build_report(
    session: Session,
    meta: RunMeta,
    finding: Finding,
    step: Step,
    log_path: Optional[str],
    world_size: int = 1,
) -> StopReport:
    """Expects both locks to be held, and the records of ``step`` in the history (collect())."""
    event_store = session.event_store
    culprit = event_store.event(finding)
    rates = meta.learning_rates()
    if finding.role == "param" and culprit.site.key in meta.never_updated():
        culprit, rates = replace(culprit, reason=f"{culprit.reason}; {NOT_UPDATED}"), ()
    if session.config.level == "op" or finding.uses.inputs:
        inputs = argument_records(event_store.archive.history, culprit, event_store.sites)
    else:
        inputs = _module_inputs(session, finding, step)
    # An operator's operands have no names of parameters.
    written = {int(record["numel"]) for site, record in inputs if _IN_PLACE.search(site.label)}
    weights = {site.key for site, _ in inputs if site.role == "param"}
    never_updated = meta.never_updated() if weights or written else {}
    # Code outside of modules writes those of any.
    module = culprit.site.module
    own = (key for key in never_updated if not module or key.rpartition(".")[0] == module)
    weights.update(key for key in own if never_updated[key] in written)
    return make_report(
        event_store.archive.history,
        culprit,
        event_store.events_of(step.findings.all),
        inputs,
        event_store.sites,
        event_count=event_store.counter.total,
        overflow_nums=session.config.overflow_nums,
        log_path=log_path,
        batch=meta.batches.of(step.index),
        scale=_loss_scale(session, step),
        world_size=world_size,
        style=session.config.stop.style,
        learning_rates=rates,
        fault=meta.schedule.fault,
        left_out_by=meta.left_out_by,
        silent_norms=meta.silent_norms(culprit.site.module),
        not_updated=tuple(key for key in never_updated if key in weights),
        is_op_level=session.config.level == "op",
        **_update(session, finding, step),
    )


def _update(session: Session, finding: Finding, step: Step) -> dict[str, Any]:
    """The fields of a report on the update: whether the weights were updated in the step of the
    finding, and what with.
    """
    began = since_step = int(finding.record["step"])
    if (
        finding.role == "param" and finding.uses.given is None
    ):  # it is read before the update of a step
        finite = session.event_store.archive.history.last_finite(finding.record)
        since_step = began if finite is None else int(finite["step"])
    since = [index for index in session.event_store.archive.updated_steps if index >= since_step]
    of_now = session.step.update
    if of_now.count > of_now.guarded_count and session.step.index >= began:
        since.append(session.step.index)
    fields = _update_in_step(session, finding, step)
    if step.update.is_elsewhere and fields.get("weights_intact") is False:
        fields = {}
    return {"updated_since": tuple(since), **fields}


def _update_in_step(session: Session, finding: Finding, step: Step) -> dict[str, Any]:
    began = int(finding.record["step"])
    if began > step.index:  # it was made after the update of the step that is open
        return {"weights_intact": True}
    if began < step.index:  # what came of it was seen in a later step
        if began not in session.event_store.archive.updated_steps:
            return {}
        why = f"what came of it was seen in step {step.index}"
        return {"weights_intact": False, "why_updated": why}
    update, is_open = step.update, step is session.step
    is_later = update.passes > 0 and finding.seq >= update.first_pass_end
    is_by_hand = session.is_explicit or (is_later and not update.state_read)
    if is_by_hand and not (update.count or session.event_store.archive.updated_steps):
        return {}  # the loop may update weights without an optimizer, or from copies
    if update.is_partial:
        return {"weights_intact": False, "why_updated": "its closure was evaluated several times"}
    if not update.count and (is_open or not update.guarded_count):
        return {"weights_intact": True if is_open else None}
    if update.why_applied or update.count > update.guarded_count > 0:
        return {"weights_intact": False, "why_updated": update.why_applied}
    if are_skipped(step):
        return {"weights_intact": True}
    if update.guarded_count and (session.config.level == "op" or _has_bad_gradient(step)):
        return {}  # no gradient is read as that of a parameter; some of several were skipped
    why = "its gradients were finite" if update.guarded_count else ""
    return {"weights_intact": False, "why_updated": why}


def are_skipped(step: Step) -> bool:
    """True if all updates of the step skipped themselves: the words that decide are on a device,
    and made of the gradients that were read.
    """
    # Each of several updates has its own word.
    is_one = step.update.guarded_count >= 1 >= step.update.count
    return is_one and _has_bad_gradient(step)


def _has_bad_gradient(step: Step) -> bool:
    return any(finding.role == "param_grad" for finding in step.findings.all)


def _loss_scale(session: Session, step: Step) -> Optional[float]:
    """The loss scale of the step, where it is known; reads a device value."""
    if step.update.scale is not None:
        return float(step.update.scale)
    given = session.step.update.scaler
    scaler = session.config.training.scaler if given is None else given()
    if scaler is None:
        return None
    if isinstance(scaler, GradScaler):
        return float(scaler.get_scale())
    return float(scaler()) if callable(scaler) else float(scaler)


def _module_inputs(session: Session, finding: Finding, step: Step) -> Evidence:
    call = finding.blamed.call
    if finding.role == "optimizer_state":
        return _gradient_of_state(session, finding, step)
    if call is None:
        return []
    evidence: Evidence = []
    if finding.is_gradient:
        evidence += _gradients_of_outputs(session, call, step)
    for tensor_seq, site in zip(call.inputs, call.input_sites):
        record = session.event_store.archive.history.find(tensor_seq)
        if record is not None:
            evidence.append((session.event_store.sites[site], record))
    return evidence + _parameters(session, call, step)


def _gradient_of_state(session: Session, finding: Finding, step: Step) -> Evidence:
    """The gradient of which this is the optimizer's state."""
    sites = session.event_store.sites
    module, parameter = sites[finding.site].module, sites[finding.site].label.rpartition(".")[0]
    its = {
        number
        for number, site in enumerate(sites)
        if (site.module, site.role, site.label) == (module, "param_grad", parameter)
    }
    records = session.event_store.archive.history.latest_of(its)
    return [(sites[int(r["site"])], r) for r in records if r["step"] == step.index]


def report_of_step(
    session: Session, meta: RunMeta, step: Step, log_path: Optional[str]
) -> Optional[StopReport]:
    """The report of a step with counted events, as long as its records are in memory."""
    counted = [f for f in step.findings.all if f.counted]
    began = [f for f in counted if f.verdict in (Verdict.ORIGIN, Verdict.ARRIVED)]
    culprit = min(began or counted, key=lambda f: f.seq, default=None)
    return None if culprit is None else build_report(session, meta, culprit, step, log_path)


def _gradients_of_outputs(session: Session, call: Call, step: Step) -> Evidence:
    evidence: Evidence = []
    for tensor_seq in call.outputs:
        seq = step.gradients.get(tensor_seq)
        record = None if seq is None else session.event_store.archive.history.find(seq)
        if record is not None:
            evidence.append((session.event_store.sites[int(record["site"])], record))
    return evidence


def _parameters(session: Session, call: Call, step: Step) -> Evidence:
    module = call.node.module()
    evidence: Evidence = []
    for name in () if module is None else module._parameters:
        number = call.node.site("param", name, 0)
        record = session.event_store.archive.history.latest(number)
        # A parameter read in an earlier step was changed by an update since.
        if record is not None and record["step"] == step.index:
            evidence.append((session.event_store.sites[number], record))
    return evidence


def save_held(
    session: Session, meta: RunMeta, watched: Iterable[WatchEvent], directory: str
) -> Optional[str]:
    """Writes the records of the last steps, the events, those of the watch, the rows of all steps,
    and the names of their batches. Returns the directory of the log; never raises: warns and
    returns None when it can't be written. The caller holds the store's lock.
    """
    event_store, batches = session.event_store, meta.batches
    named = {"batches": batches.lines()} if batches else {}
    rows = [row.to_dict() for row in event_store.archive.all_steps()]
    steps = {"steps": rows} if rows else {}
    return save_log(
        directory,
        event_store.ranks.own,
        event_store.archive.history.all(),
        event_store.events,
        session.event_store.sites,
        {**meta.to_dict(session.level.unread_ops()), **steps, **named},
        [event.to_dict() for event in watched],
    )


_BEGINNINGS = (Verdict.ORIGIN, Verdict.ARRIVED)
# An event that began on its rank, or in that rank's batch, comes before an event of the same step
# that may have come from another rank. Of two alike, the event comes first before which its rank
# had read fewer tensors of the step: ranks do the same work in the same order. A weight was not
# finite before the step's first tensor was made.
_BEGAN, _ARRIVED, _FOLLOWED = 0, 1, 2
_GRADE_SHIFT = 48
_EXIT_WIDTH = 86
#: Causes of events of the watch that may let numbers grow, and the length of what is cut to a
#: sentence there, to three lines.
_GROWING, _LONG = ("gradient", "loss", "data", "optimizer"), 220
# A part of a report.
_OPERATOR = "the operator that made its events"
# The time for which the end of the process waits for a device that may hang.
_EXIT_SECONDS = 5.0


@dataclass(eq=False)
class StopHandler:
    """Carries out what is due: stops, or the action of events that stop nothing. Called outside the
    session's lock and outside every guard: what a sink raises reaches the training loop.

    ``agreement``: that of the ranks, None where this rank decides alone. ``write_dump``: writes the
    call that is to blame to disk, for Stop(dump=). ``find_maker``: finds the operator that made a
    finding. ``broken_weights``: returns the names of the parameters that hold NaN or Inf.
    ``watched``: returns the events of the watch, as the run stops.
    """

    _session: Session
    _meta: RunMeta
    agreement: Optional[RankAgreement]
    _write_dump: Optional[Callable[[Event], Dumped]]
    _find_maker: Callable[[Finding, Step], Optional[MadeBy]]
    _read_weights: Callable[[], tuple[str, ...]]
    _watched: Callable[[], Sequence[WatchEvent]]

    def __post_init__(self) -> None:
        self._act = _action_of(self._session.config)
        # The first stop that is due and was not proposed to the other ranks yet.
        self._held: Optional[Due] = None
        self._held_maker: Optional[MadeBy] = None
        self._proposed: Optional[StopReport] = None
        self._has_dumped = False
        # The first sequence number after the last stop: what a device was given before follows from
        # that.
        self._first_told = 0
        self._start = working_directory()
        _live.add(self)

    def __call__(self) -> None:
        """Carries out everything that is due, except stops that several ranks have to agree on
        first.
        """
        session, event_store = self._session, self._session.event_store
        is_late = session.rings.is_deferred and session.config.sync != "call"
        if is_late and torch._C._current_graph_task_id() != -1:
            return  # a device's thread of autograd can't run a call again; backward() ends soon
        with event_store.lock:
            due = [item for item in event_store.due if item[0].seq >= self._first_told]
            event_store.due.clear()
        for item in due:
            if item[1] is not Decision.STOP:
                self._sink(self._report(item))
            elif self.agreement is None:
                self._stop(self._report(item))
            elif self._held is None and self._proposed is None:
                # The line that tells of the operator is gone at the boundary.
                self._held, self._held_maker = item, self._made_by(item)

    def at_step_boundary(self, is_last: bool = False) -> None:
        """Proposes a due stop to the other ranks at a step boundary, and stops if they agree.

        ``is_last``: there will be no further boundary, and what the last boundaries agree on is
        waited for.
        """
        agreement = self.agreement
        if agreement is None:
            if self._session.event_store.due:
                self()
            return
        self._take_in()
        self._propose()
        self._stop_if_agreed(agreement.finish() if is_last else agreement.boundary())

    def close(self) -> None:
        """Leaves the agreement without waiting for other ranks."""
        if self.agreement is not None:
            self.agreement.close()

    def finish_at_exit(self) -> None:
        """The process ends: no hook will run any more that could raise what is due."""
        session = self._session
        session.drain.finish(_EXIT_SECONDS)
        if session.removed:
            return
        session.faults.look()
        listeners = session.event_store.listeners
        for finish in (self.report_at_exit, *(listener.at_boundary for listener in listeners)):
            try:
                finish()
            except (FastcheckError, FastcheckWarning) as stop:
                print(f"{type(stop).__module__}.{type(stop).__name__}: {stop}", file=sys.stderr)

    def report_at_exit(self) -> None:
        """Raises pending stops at exit, without agreement, and tells what is undecided where an
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
        if self._held is None or self.agreement is None:
            return
        held, self._held = self._held, None
        report = self._proposed = self._report(held)
        message, priority = b"", _FOLLOWED << _GRADE_SHIFT
        try:
            with self._session.event_store.lock:
                priority = _priority(_culprit(held), held[2])
            message = packed(report)
        except Exception as error:
            self._session.report_internal_error("what the other ranks are told", error)
        self.agreement.propose(report.step, message, priority)

    def _stop_if_agreed(self, agreed: Optional[Agreed]) -> None:
        if agreed is None:
            return
        own, self._proposed, self._held, self._held_maker = self._proposed, None, None, None
        report, is_own = own, agreed.rank == self._session.event_store.ranks.own
        if agreed.message and not (is_own and own is not None):
            try:
                report = unpacked(agreed.message)
                if is_own or report.rank != agreed.rank:
                    raise ValueError("a report of another rank than the sender's")
            except Exception as error:
                self._session.report_internal_error("what another rank reports", error)
                if own is None and not agreed.together:
                    return  # whoever reaches the store can write to it
                report = None if own is None else self._with_fault(own)
        self._stop(report or _lost_report(agreed))

    # One rank

    def _stop(self, report: StopReport) -> None:
        session, event_store = self._session, self._session.event_store
        with session.lock, event_store.lock:
            # Whoever catches the stop and goes on starts a new step.
            session.recorder.close()
            session.is_closed = True
            if session.rings.is_deferred and session.config.stop.action == "raise":
                self._first_told = session.next_seq
            if self.agreement is not None:
                # All into one directory, whose name came with the report: what of it is on one
                # file system `fastcheck show` reads as one.
                try:
                    self._save(self._default(report.log_path))
                except Exception as error:
                    session.report_internal_error("the log of its stop", error)
        try:
            write_stop_page(report, event_store.ranks.own, self._watched)
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
        warn(f"fastcheck: the report of the stop could not be written: {first}")
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
        made = self._held_maker
        try:
            with session.lock, event_store.lock:
                session.collect()
            made = made or self._made_by(due)
            due = self._with_blame(due, made)
        except Exception as error:
            session.report_internal_error(_OPERATOR, error)
        finding, decision, step = due
        with session.lock, event_store.lock:
            try:
                report = self._whole_report(due)
            except Exception as error:
                # A poor report is better than none, and far better than a run that goes on.
                session.report_internal_error("the evidence of its events", error)
                event, ranks = event_store.event(finding), event_store.ranks
                report = self._with_fault(
                    StopReport(event, step.index, rank=ranks.own, world_size=ranks.together)
                )
        report = replace(report, made_by=made)
        if self._write_dump is None or (decision is not Decision.STOP and self._has_dumped):
            return report
        self._has_dumped = True
        return replace(report, dump=self._write_dump(report.culprit))

    def _made_by(self, due: Due) -> Optional[MadeBy]:
        _, decision, step = due
        config = self._session.config
        if not config.stop.find_operator or decision is not Decision.STOP:
            return None
        try:
            return self._find_maker(_culprit(due), step)
        except Exception as error:
            self._session.report_internal_error(_OPERATOR, error)
            return None

    def _with_blame(self, due: Due, made: Optional[MadeBy]) -> Due:
        """Returns the same, of an operator that has made more infinities of those that a module was
        given: it is to blame, not these.
        """
        session, given, (_, decision, step) = self._session, _culprit(due), due
        result = None if made is None else made.result
        if made is None or made.site is None or result is None or not _has_made_more(made, given):
            return due
        rows = [(replace(made.site, role="input", label=name), r) for name, r in made.inputs]
        rows.append((made.site, result))
        with session.lock, session.event_store.lock:
            session.collect()
            records = np.array([record for _, record in rows], RECORD_DTYPE)
            records["site"] = [session.sites.intern(site) for site, _ in rows]
            records["seq"] = np.arange(session.next_seq, session.next_seq + len(rows))
            records["step"], records["call"] = given.record["step"], records["call"][-1]
            session.next_seq += len(rows)
            maker = session.event_store.blame_operator(
                step, given, records, [name for name, _ in made.inputs], made.line
            )
        return maker, decision, step

    def _whole_report(self, due: Due) -> StopReport:
        session, event_store = self._session, self._session.event_store
        finding, decision, step = due
        session.collect()
        world_size = event_store.ranks.together
        if decision is not Decision.STOP:
            path = self._log_directory()
            return build_report(session, self._meta, finding, step, path, world_size)
        culprit = _culprit(due)
        event_store.store(step)
        path = self._log_directory()
        if path is None:
            path = self._default()
            if self.agreement is None:
                path = self._save(path)
        report = build_report(session, self._meta, culprit, step, path, world_size)
        report = _with_noticed(report, self._watched())
        report = self._with_fault(report)
        return self._with_page(replace(report, broken_weights=self._broken_weights(report)))

    def _with_fault(self, report: StopReport) -> StopReport:
        """The report with the first error of fastcheck's own, if there was one."""
        first = self._session.faults.first
        if not first and self.agreement is not None and self.agreement.is_alone:
            first = f"rank {self.agreement.rank} can't agree with the other ranks any more"
        noticed = f"that {first}. What is said here may be incomplete"
        return replace(report, noticed=noticed) if first else report

    def _broken_weights(self, report: StopReport) -> Optional[tuple[str, ...]]:
        """The parameters that hold NaN or Inf now, where the run ends here and they may."""
        is_over = self._session.config.stop.action == "raise" and report.world_size == 1
        site, is_intact = report.culprit.site, report.weights_intact is not False
        may_be = bool(report.updated_since) or not is_intact or site.role == "param"
        may_be |= WHEN_LAST_READ in report.culprit.reason
        # A consequence of what an operator made counts later: the program may have written it.
        if not is_over or not (may_be or site.op):
            return None
        return self._read_weights() or (() if may_be else None)

    def _log_directory(self) -> Optional[str]:
        log = self._session.event_store.archive.log
        return None if log is None or log.failed else log.directory

    def _default(self, path: Optional[str] = None) -> str:
        """The directory that a stop writes to without log_dir=: below what was the working
        directory of install(), with the name that ``path`` of another rank has, if that is a
        default's.
        """
        given = os.path.join(*Path(path).parts[-2:]) if path else ""
        return found_at(given if is_default(given) else default_directory(), self._start)

    def _save(self, directory: Optional[str]) -> Optional[str]:
        """Writes what is held in memory, unless all of it is in the log already."""
        if directory is None or self._log_directory() is not None:
            return None
        return save_held(self._session, self._meta, self._watched(), directory)


def _with_noticed(report: StopReport, events: Sequence[WatchEvent]) -> StopReport:
    """The report with the last invariant that warns, rather one that may let numbers grow: if they
    have grown, it is to blame.
    """
    told = [e for e in reversed(events) if e.kind == "invariant" and e.is_warning]
    if not told or report.fault:
        return report
    last = min(told, key=lambda event: event.cause not in _GROWING)
    if last.cause not in _GROWING or not Trend.of(report.trend).has_grown:
        return replace(report, noticed=f"by {last.text}")
    text = f"By {last.text}"
    return replace(report, fault=text if len(text) <= _LONG else text.partition(". ")[0])


_live: weakref.WeakSet[StopHandler] = weakref.WeakSet()


# Behind the agreement's, whose thread lives until then: what was registered last runs first.
@atexit.register
def _finish_all() -> None:
    for stop_handler in list(_live):
        stop_handler.finish_at_exit()


def _culprit(due: Due) -> Finding:
    """The first beginning in the step of an event for which a stop is due."""
    finding, _, step = due
    began = [f for f in step.findings.all if f.counted and f.verdict in _BEGINNINGS]
    return min(began, key=lambda f: f.seq, default=finding)


def _has_made_more(made: MadeBy, given: Finding) -> bool:
    if made.result is None or made.is_backward or given.has_nan or made.result["nan_count"]:
        return False
    is_given = given.role == "input" and given.verdict is Verdict.ORIGIN
    return is_given and any(is_nonfinite(record) for _, record in made.inputs)


def _priority(culprit: Finding, step: Step) -> int:
    """The priority for RankAgreement.propose()."""
    if culprit.role == "param":
        return _BEGAN << _GRADE_SHIFT
    grade = _FOLLOWED
    if culprit.verdict is Verdict.ORIGIN or culprit.is_data:
        grade = _BEGAN
    elif culprit.verdict is Verdict.ARRIVED:
        grade = _ARRIVED
    return (grade << _GRADE_SHIFT) + max(0, culprit.seq - step.first_seq)


def _lost_report(agreed: Agreed) -> StopReport:
    """The report of a stop whose own did not come from the rank that had it."""
    record = np.zeros(1, RECORD_DTYPE)[0]
    record["step"] = agreed.step
    event = Event(
        site=Site("", "", "forward", "output", 0, "output"),
        record=record,
        step=agreed.step,
        verdict=Verdict.ARRIVED,
        reason=f"rank {agreed.rank} found it, and its report did not reach this rank",
        counted=True,
        rank=agreed.rank,
    )
    return StopReport(culprit=event, step=agreed.step, rank=agreed.rank, is_lost=True)


def _action_of(config: Config) -> Callable[[StopReport], None]:
    action: Union[str, Action] = config.stop.action
    if callable(action):
        return functools.partial(call_back, action)
    return raise_stop if action == "raise" else warn_of
