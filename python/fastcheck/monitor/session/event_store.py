"""The event store: judges records, counts events, and keeps them in memory and in the log.

It does not depend on hooks or devices: the hooks themselves (on the CPU) or the drain's thread pass
it a step's journal and the records that belong to it.
"""

from __future__ import annotations

import threading
from collections import Counter as Tally
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Callable, NamedTuple, Optional

import numpy as np

from fastcheck.errors import FastcheckWarning
from fastcheck.log.history import History
from fastcheck.log.step_table import StepRow, StepTable
from fastcheck.log.unobserved import UnreadOp, to_meta
from fastcheck.log.writer import RecordLog
from fastcheck.record.event import Event
from fastcheck.record.format import Flag, Verdict, overflowed
from fastcheck.record.site import OUTSIDE, SiteTable
from fastcheck.report.stop_report import StopReport
from fastcheck.verdict import entries
from fastcheck.verdict.allowed import Allowance, allowances
from fastcheck.verdict.findings import Counter, Finding, Findings, SiteMemory
from fastcheck.verdict.module_rules import ModuleRules
from fastcheck.verdict.op_rules import OpMemory, OpRules
from fastcheck.verdict.step import Decision, ReadStored, Step, nothing_stored

from .config import Config

# Events that are held may come out long after their step; of older steps no update is known.
_UPDATED_STEPS = 1024
# A served model never closes a step: what is remembered of it is renewed at these sizes.
_MAX_FINDINGS = 4096
_MAX_EVENTS = 16384

#: An event for which something is to be done, what, and the step that it belongs to.
Due = tuple[Finding, Decision, Step]


class SessionListener:
    """A part of a monitor that is told of what the others do; it is connected by being added to
    ``event_store.listeners``, whose order is that of the calls. Methods that are not overridden do
    nothing.
    """

    # Called by the thread that judges, which holds the event store's lock. None may raise.

    def counted(self, event: Event) -> None:
        """The event counts against ``overflow_nums``."""

    def step_ended(self, step: Step, rows: Sequence[StepRow], chunks: Sequence[np.ndarray]) -> None:
        """Called when a step is over, with its rows of the step table and its records."""

    def run_ended(self) -> None:
        """The last step has ended: none will follow."""

    def setting_changed(self, name: str, before: Optional[float], after: float) -> None:
        """A number of an optimizer, or the clip threshold, is another than before. ``before``
        is None for the first number of an Adam.
        """

    def noticed(self, step: int, name: str, value: float, about: str) -> None:
        """A fact of the training loop that is in no record (``monitor/loop/facts.py``)."""

    def warned(self, step: int, kind: str, text: str) -> None:
        """The watch has found what calls for a look."""

    # Called by the thread of training, outside of all locks.

    def stopping(self, report: StopReport) -> None:
        """The report is about to be acted on. What this raises is reported as an internal error."""

    def replicas_differ(self, step: int, text: str) -> None:
        """check_replicas() has found a difference."""

    def at_boundary(self) -> None:
        """A step boundary. What this raises leaves the training loop."""


class Archive:
    """The records, the rows of steps and the events of a run, in memory and in the log. It judges
    nothing. ``log``: None without log_dir=.
    """

    def __init__(self, steps: int, sites: SiteTable, rank: int, log: Optional[RecordLog]) -> None:
        self.history = History(steps, is_logged=log is not None)
        self.steps = StepTable(sites, rank)
        self.log = log
        #: The last steps of which it is known that their update was applied.
        self.updated_steps: deque[int] = deque(maxlen=_UPDATED_STEPS)
        # The first step with a counted event: summary() reports it.
        self.first_bad: Optional[Step] = None
        #: Records that arrived before the step that they are of began.
        self.early: list[np.ndarray] = []
        # The events of the steps that are over.
        #: Oldest first, the youngest 16,384.
        self.events: deque[Event] = deque(maxlen=_MAX_EVENTS)
        #: The number of events that are not held any more.
        self.forgotten = 0
        #: The number of events of each verdict.
        self.verdicts: Tally[Verdict] = Tally()
        # The number of counted events at each blamed site.
        self._sites: Tally[int] = Tally()

    def add(self, findings: list[Finding], events: list[Event]) -> None:
        """Adds a step that is over. ``events``: its findings as users see them."""
        self.forgotten += max(len(self.events) + len(events) - _MAX_EVENTS, 0)
        self.events.extend(events)
        _tally(findings, self.verdicts, self._sites)

    def take_back(self, seq: int, verdict: Verdict) -> None:
        """The event with this record is an event of the open step again."""
        self.verdicts[verdict] -= 1
        kept = [event for event in self.events if int(event.record["seq"]) != seq]
        self.events = deque(kept, maxlen=_MAX_EVENTS)

    def tallies(self, findings: list[Finding]) -> tuple[Tally[Verdict], Tally[int]]:
        """The tallies with those of the open step: of each verdict, and counted events at each
        blamed site.
        """
        verdicts, sites = Tally(self.verdicts), Tally(self._sites)
        _tally(findings, verdicts, sites)
        return verdicts, sites

    def note_unread(self, rows: Sequence[UnreadOp]) -> None:
        """Writes what op level could not observe into the meta file of the log, if there is a
        log.
        """
        if self.log is not None and rows:
            self.log.add_meta(**to_meta(rows))

    def all_steps(self) -> list[StepRow]:
        """The rows of all steps, also of the open step, oldest first."""
        return [*self.steps.rows, *self.steps.rows_of(self.history.open_chunks)]


def _tally(findings: list[Finding], verdicts: Tally[Verdict], places: Tally[int]) -> None:
    for finding in findings:
        verdicts[finding.verdict] += 1
        if finding.counted:
            places[finding.blamed.site] += 1


class ProcessRank(NamedTuple):
    """The place of this process among the others. ``together``: how many stop together;
    ``in_group``: over how many gradients may be reduced before the optimizer uses them.
    """

    own: int
    together: int
    in_group: int


@dataclass(eq=False)
class EventStore:
    """Judges what is read, and holds the events. Every method expects ``lock`` to be held. Whoever
    needs the session's lock too takes that first.
    """

    config: Config
    sites: SiteTable
    ranks: ProcessRank
    archive: Archive

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self.counter = Counter(
            self.config.overflow_nums, self.config.stop.within, self.config.stop.count
        )
        # The other parts of the monitor that are told of events, steps, stops and boundaries.
        self.listeners: list[SessionListener] = []
        self._has_run_ended = False
        # Events for which a stop, a warning or a callback is due; acted on outside all locks and
        # guards. One list for good: the recorder looks at it, too.
        self.due: list[Due] = []
        #: Warnings that the training thread is to give, outside of all locks too, with the class of
        #: each.
        self.warnings: deque[tuple[str, type[Warning]]] = deque()
        #: Events that listeners are to tell of there; without any they are not asked.
        self.news: deque[Any] = deque()
        self._allowances = allowances()
        self._sites_memory = SiteMemory()
        self.op_memory = OpMemory()
        # The step whose findings are not among the past events yet.
        self._current: Optional[Step] = None

    def warn_later(self, text: str, kind: type[Warning] = FastcheckWarning) -> None:
        """Notes what the training thread is to warn of. Needs no lock."""
        self.warnings.append((text, kind))

    # Steps

    def new_step(
        self, index: int, first_seq: int = 0, read_stored: ReadStored = nothing_stored
    ) -> Step:
        """A step that has just begun, at this sequence number."""
        step = Step(index, first_seq, read_stored)
        step.is_observed = self.config.observes(index)
        self._judge_anew(step)
        return step

    def _judge_anew(self, step: Step) -> None:
        """Gives the step new rules, and drops its findings."""
        findings = Findings(self.sites, self._sites_memory, self._allowances)
        last_finite, is_strict = self.archive.history.last_finite_step, self.config.is_strict
        if self.config.level == "op":
            find = self.archive.history.find
            step.rules = OpRules(findings, self.op_memory, last_finite, find, is_strict=is_strict)
        else:
            has_others = self.ranks.in_group > 1
            step.rules = ModuleRules(findings, step, last_finite, is_strict, has_others)
        step.findings = findings

    def renew(self, step: Step) -> None:
        """Lets go of what was found, if that is much, between two passes of a step that never
        closes.
        """
        if len(step.findings.all) > _MAX_FINDINGS:
            step.rules.renew()
            self._take_changes(step)
            self.store(step)
            self._archive(step)
            self._judge_anew(step)

    def make_room(self, step: Step) -> None:
        """A served model never closes a step: the oldest of too many records go."""
        if self.archive.history.is_full:
            self.store(step)
            self.archive.history.drop_oldest()

    def _close(self, step: Step) -> None:
        """Settles the step and writes it down."""
        if step.findings.all:
            step.rules.settle()
            self._take_changes(step)
        if step.findings.all or self.archive.log is not None:
            self.store(step)

    def _end(self, step: Step) -> None:
        if not hasattr(step, "rules"):  # an interrupt came before the next step
            return
        if step.findings.all:
            if step.findings.has_held_gradients:
                self._settle_scaled(step, skipped=step.update.count == 0)
            # Findings that were made since it was closed: at op level the next step may use them.
            step.rules.settle_open()
            self._take_changes(step)
        if step.findings.all or self.archive.log is not None:
            self.store(step)
        self._tell_end(step, self.archive.steps.add)
        if step.findings.all:
            self._archive(step)
        self.archive.history.close_step()
        self._current = None
        # They hold the step, which nothing but the garbage collector would free.
        del step.rules

    def end_run(self, step: Step) -> None:
        """The run ends within ``step``, which is open: nothing more will be read."""
        if hasattr(step, "rules"):
            step.rules.count_cut_off()
        self._take_changes(step)
        self.store(step)
        if not self._has_run_ended:  # at exit, and when the monitor is removed: once
            self._tell_end(step, self.archive.steps.rows_of)
            for listener in self.listeners:
                listener.run_ended()
        self._has_run_ended = True

    def _tell_end(
        self, step: Step, rows_of: Callable[[Sequence[np.ndarray]], Sequence[StepRow]]
    ) -> None:
        """Tells the listeners of the rows and the records of a step that is over."""
        chunks: Sequence[np.ndarray] = self.archive.history.open_chunks
        if self.config.level == "op":
            chunks = self._without_early(step)
        rows = rows_of(chunks)
        for listener in self.listeners if chunks else ():
            listener.step_ended(step, rows, chunks)

    def _without_early(self, step: Step) -> Sequence[np.ndarray]:
        """The records of a step, in pieces. At op level those of the next step may have arrived
        before it ends: of tensors that were made after the update.
        """
        chunks = [*self.archive.early, *self.archive.history.open_chunks]
        is_early = [chunk["step"] > step.index for chunk in chunks]
        self.archive.early = [
            c.compress(early) for c, early in zip(chunks, is_early) if early.any()
        ]
        return [
            c.compress(~early) if early.any() else c
            for c, early in zip(chunks, is_early)
            if not early.all()
        ]

    def _settle_scaled(self, step: Step, skipped: bool) -> None:
        first = step.rules.settle_scaled(skipped)
        counter = self.counter
        counter.skipped_steps = counter.skipped_steps + 1 if skipped else 0
        if first is not None and counter.skipped_steps >= self.config.stop.max_skipped:
            step.findings.overdue(first, counter.skipped_steps)
            counter.skipped_steps = 0
        self._take_changes(step)

    def _settle_left_out(self, step: Step) -> None:
        step.findings.skip_unused()
        self._settle_scaled(step, skipped=True)

    def _settle_own_scale(self, step: Step) -> None:
        self._settle_scaled(step, skipped=step.findings.has_held_gradients)

    def _is_set(self, seq: int) -> bool:
        record = self.archive.history.find(seq)
        return record is not None and int(record["zero_count"]) == 0

    @property
    def has_allowances(self) -> bool:
        """True if any non-finite tensor is allowed."""
        return bool(self._allowances)

    def allow(self, allowances: list[Allowance]) -> None:
        """Lets what is judged from now on be non-finite where one of these covers it."""
        self._allowances[:] = allowances

    # Records and findings

    def judge(
        self, step: Step, entry: entries.Entry, bad: entries.Records = entries.NO_RECORDS
    ) -> None:
        """Judges one entry, whose records are on the host, or does what is due at that moment."""
        self._current = step
        if type(entry) is entries.Moment:
            _AT[entry._value_](self, step)
        elif isinstance(entry, entries.Task):
            entry.run(bad)
        elif isinstance(entry, entries.ScaleDecided):
            self._settle_scaled(step, entry.skipped or any(map(self._is_set, entry.words)))
        else:
            step.rules.apply(entry, bad)
        if step.findings.changed:
            self._take_changes(step)

    def replay(self, step: Step, journal: entries.Journal, records: np.ndarray) -> None:
        """Takes in the records of a part of a step and judges its entries, in order."""
        self.archive.history.add(records)
        self.make_room(step)
        step.findings.unread_count += len(journal.unread)
        bad_records = records[overflowed(records)] if len(records) else records
        bad = {int(record["seq"]): record.copy() for record in bad_records}
        # A healthy part is judged by its due entries alone: its other readings do not matter.
        is_healthy = not bad and not step.findings.all
        for written in journal.due if is_healthy else journal.entries:
            for entry in entries.expanded(written, bad):
                self.judge(step, entry, bad)

    def _take_changes(self, step: Step) -> None:
        """Counts the decisions since the last call, and notes the stops and actions that are
        due.
        """
        changed, step.findings.changed = step.findings.changed, []
        for finding in changed:
            if finding.uses.archived is not None:
                # A finding of an earlier step has turned out to count: it is one of the open step
                # now.
                self.archive.take_back(finding.seq, finding.uses.archived)
                finding.uses.archived = None
            if finding.counted or not self._counts(finding):
                continue
            finding.counted = True
            if self.config.stop.count == "calls":
                call = self._call_of(finding)
                if call in step.counted_calls:
                    continue
                step.counted_calls.add(call)
            for listener in self.listeners:
                listener.counted(self.event(finding))
            self.archive.first_bad = self.archive.first_bad or step
            if self.counter.add(step.index):
                is_stop = self.config.stop.action == "raise"
                self.due.append((finding, Decision.STOP if is_stop else Decision.WARN, step))

    def _counts(self, finding: Finding) -> bool:
        if self.config.stop.count == "calls" and finding.verdict is Verdict.PROPAGATED:
            site = self.sites[finding.blamed.site]
            is_outside = site.direction == "backward" and site.module_type == OUTSIDE
            if site.role == "loss" or (is_outside and not finding.uses.api):
                return (
                    False  # no call: sums of gradients that autograd adds, a loss without its scale
                )
        return finding.verdict in self.counter.verdicts

    def _call_of(self, finding: Finding) -> tuple[object, ...]:
        site = self.sites[finding.blamed.site]
        if finding.uses.api:
            return finding.uses.api, site.direction
        return site.module, site.op, site.direction, int(finding.record["call"])

    def blame_operator(
        self, step: Step, given: Finding, records: np.ndarray, names: Sequence[str], line: str
    ) -> Finding:
        """Returns the finding of an operator that is blamed for ``given``: it has made more
        infinities beside these. ``records``: of what it read, by these names, and of its result.
        """
        self.archive.history.add(records)
        maker = Finding(records[-1].copy(), "output", given.call, given.thread)
        maker.uses.line = line
        maker.uses.inputs = list(zip(names, records["seq"][:-1].tolist()))
        follows = given.reason.partition("; ")[2]
        reason = "it made infinities beside those that it read"
        step.findings.pass_blame(given, maker, f"{reason}; {follows}" if follows else reason)
        self._take_changes(step)
        return maker

    def event(self, finding: Finding) -> Event:
        """The current state of the finding, as an event."""
        record = finding.record.copy()
        record["flags"] = (int(record["flags"]) & 0xFF & ~int(Flag.EVENT)) | _flags(finding)
        return Event(
            site=self.sites[finding.blamed.site],
            record=record,
            step=int(record["step"]),
            verdict=finding.verdict,
            reason=finding.reason,
            counted=finding.counted,
            rank=self.ranks.own,
            line=finding.uses.line,
            api=finding.uses.api,
            inputs=tuple(finding.uses.inputs),
        )

    @property
    def pending(self) -> list[Event]:
        """The events that are undecided in the open step, with the reason for which each would
        count.
        """
        findings = [] if self._current is None else self._current.rules.undecided()
        return [replace(self.event(f), reason=_why_pending(f)) for f in findings]

    def events_of(self, findings: Iterable[Finding]) -> list[Event]:
        """The current state of several findings."""
        return [self.event(finding) for finding in findings]

    @property
    def events(self) -> tuple[Event, ...]:
        """The events that are held, oldest first."""
        return (*self.archive.events, *self.events_of(self._findings))

    def tallies(self) -> tuple[Tally[Verdict], Tally[int]]:
        """The number of events of each verdict, and of counted events at each blamed site."""
        return self.archive.tallies(self._findings)

    @property
    def _findings(self) -> list[Finding]:
        return [] if self._current is None else self._current.findings.all

    def _archive(self, step: Step) -> None:
        findings = step.findings.all
        self.archive.add(findings, self.events_of(findings))
        step.rules.let_go()
        for finding in (*findings, *self.op_memory.earlier_findings.values()):
            finding.detach()

    def store(self, step: Step) -> None:
        """Puts the verdicts as they stand now on the records that are held, and writes the log."""
        for finding in step.findings.all:
            self.archive.history.set_flags(finding.seq, _flags(finding))
        if self.archive.log is None:
            return
        self.archive.log.append(self.archive.history.take_unlogged(), step.index)
        logged = step.findings.logged
        changed = [f for f in step.findings.all if logged.get(f.seq) is not f.verdict]
        if changed:  # some again: the later line holds
            logged.update((f.seq, f.verdict) for f in changed)
            self.archive.log.append_event(*self.events_of(changed))


# The actions by the value of the moment: an Enum's hash runs a line of Python, as does `value`.
_AT: Mapping[int, Callable[[EventStore, Step], object]] = {
    entries.Moment.CLOSED._value_: EventStore._close,
    entries.Moment.ENDED._value_: EventStore._end,
    entries.Moment.UPDATE_DUE._value_: lambda _, step: step.rules.ensure_event(),
    entries.Moment.SCALED_USED._value_: lambda _, step: step.rules.settle_scaled(skipped=False),
    entries.Moment.UPDATE_LEFT_OUT._value_: EventStore._settle_left_out,
    entries.Moment.OWN_SCALE_UPDATED._value_: EventStore._settle_own_scale,
    entries.Moment.ALL_READ._value_: lambda _, step: step.rules.settle(),
}


def _flags(finding: Finding) -> int:
    """The bits for the flags word of its record."""
    return (int(Flag.EVENT) if finding.counted else 0) | (int(finding.verdict) << 8)


def _why_pending(finding: Finding) -> str:
    reason = finding.reason if finding.then is None else finding.then.reason
    return f"{reason}; {finding.uses.ended_by}" if finding.uses.ended_by else reason
