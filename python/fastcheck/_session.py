"""The session: one installed monitor at work. Owns ring, drain, history, log and verdicts, and
walks the steps.

A step is open from its first forward (or gradient) until something closes it; the step index moves
on with the next forward or gradient after that, so that several optimizers that step one after the
other belong to one step.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import Counter as Tally
from collections import deque
from typing import Any, Callable, Optional

import torch

from ._calls import Call, CallLog, ModuleNode
from ._config import Config
from ._drain import Drain
from ._errors import FastcheckWarning
from ._extension import extension
from ._history import History
from ._log import RecordLog
from ._policy import Decision, Policy
from ._record import Flag, Verdict
from ._ring import Ring
from ._site import SiteTable
from ._verdict import Event, Finding, Judge

__all__ = ["Session"]

# A served model never closes a step: what is remembered of it is renewed at these sizes.
_MAX_SEEN = 65536
_MAX_FINDINGS = 4096
_MAX_EVENTS = 16384


class Session:
    """The state of one monitor. Every method expects ``lock`` to be held, deliver() excepted."""

    def __init__(self, config: Config, sites: SiteTable, rank: int) -> None:
        self.config = config
        self.sites = sites
        self.rank = rank
        self.lock = threading.RLock()
        self.removed = False
        self.step = 0
        self.is_active = True
        self.is_closed = False
        # Set by the owner: monitor.step() was called, and from then on nothing else closes a step.
        self.is_explicit = False
        self.has_excluded = False
        self.ring = Ring(config.depth, when_full=self._make_room)
        self.drain = Drain(self.ring)
        self.history = History(config.history)
        self.seen = extension.SeenTensors()
        self.policy = Policy(config)
        self.log: Optional[RecordLog] = None
        # Set by the owner: reads a module's parameters now, and returns a non-finite one.
        self.check_parameters: Callable[[ModuleNode], Optional[Finding]] = lambda node: None
        # What a stop, a warning or a callback is due for; acted on outside the lock and outside all
        # guards.
        self.due: list[tuple[Finding, Decision]] = []
        self.deliver: Callable[[], None] = lambda: None
        # The process knows its watchers weakly, and the user need not keep the Monitor: the hooks
        # on the model hold this session, and it holds the watcher.
        self.watcher: Optional[object] = None
        self.verdict_tally: Tally[Verdict] = Tally()
        self.site_tally: Tally[int] = Tally()
        self.notes: dict[str, None] = {}
        # Sites that could not be read once; they are not tried again.
        self.off_sites: set[int] = set()
        self._past_events: deque[Event] = deque(maxlen=_MAX_EVENTS)
        self._masks: set[int] = set()
        self._skipped_steps = 0
        self._new_step_state()

    def _new_step_state(self) -> None:
        self.calls = CallLog()
        self.judge = Judge(self.sites, self._masks, self.calls, self._check)
        self.gradients: dict[int, int] = {}
        self.update_count = 0
        self.state_read = False
        self._scaler: Optional[weakref.ref[torch.amp.GradScaler]] = None
        self.leaf_handles: list[Any] = []
        # The verdicts that the log has, by sequence number.
        self._logged: dict[int, Verdict] = {}

    def _check(self, node: ModuleNode) -> Optional[Finding]:
        return self.check_parameters(node)

    # Steps

    def begin_pass(self) -> None:
        """A forward enters the observed modules from outside."""
        self.begin_step_if_closed()
        if len(self.seen) > _MAX_SEEN:
            self.seen.clear()
        if len(self.judge.findings) > _MAX_FINDINGS:
            self._store()
            self._archive()
            self.judge = Judge(self.sites, self._masks, self.calls, self._check)
            self._logged.clear()

    def begin_step_if_closed(self) -> None:
        """The first forward or gradient after a step was closed opens the next one."""
        if not self.is_closed:
            return
        if self.judge.has_held_gradients:
            self.settle_scaled(skipped=self.update_count == 0)
        self._archive()
        self._store()
        self.history.close_step()
        for handle in self.leaf_handles:
            handle.remove()
        self.seen.clear()
        self._new_step_state()
        self.step += 1
        self.is_closed = False
        self.is_active = self.step % self.config.every == 0

    def close_step(self) -> None:
        """Settles the step and writes it down. May be called again for the same step, after more
        records.
        """
        self.is_closed = True
        if self.is_active:
            self.judge.settle()
            self.take_changes()
            self._store()

    def settle_scaled(self, skipped: bool) -> None:
        """Loss scaling has decided whether the update of this step is skipped."""
        first = self.judge.settle_scaled(skipped)
        self._skipped_steps = self._skipped_steps + 1 if skipped else 0
        if first is not None and self._skipped_steps >= self.config.max_skipped:
            self.judge.overdue(first, self._skipped_steps)
            self._skipped_steps = 0
        self.take_changes()

    # Records and findings

    def found(self, seq: int, role: str, call: Optional[Call] = None) -> Finding:
        """A finding of the record that was just written, still to be judged."""
        return Finding(self.drain.peek(seq), role, call, threading.get_ident())

    def take_changes(self) -> None:
        """Counts what the judge has decided since the last time, and notes what is to be done about
        it.
        """
        changed, self.judge.changed = self.judge.changed, []
        for finding in changed:
            if finding.counted or not self.policy.counts(finding.verdict):
                continue
            finding.counted = True
            decision = self.policy.decide(self.step)
            if decision is not Decision.CONTINUE:
                self.due.append((finding, decision))

    def event(self, finding: Finding) -> Event:
        """The finding as it stands now, as a user sees it."""
        record = finding.record.copy()
        record["flags"] = (int(record["flags"]) & 0xFF & ~int(Flag.EVENT)) | finding.flags
        return Event(
            site=self.sites[finding.blamed_site],
            record=record,
            step=int(record["step"]),
            verdict=finding.verdict,
            reason=finding.reason,
            counted=finding.counted,
            rank=self.rank,
        )

    @property
    def events(self) -> tuple[Event, ...]:
        """The events that are held, oldest first."""
        return (*self._past_events, *map(self.event, self.judge.findings))

    def tallies(self) -> tuple[Tally[Verdict], Tally[int]]:
        """How many events there were of each verdict, and counted ones at each blamed site."""
        verdicts, places = Tally(self.verdict_tally), Tally(self.site_tally)
        _tally(self.judge.findings, verdicts, places)
        return verdicts, places

    def collect(self) -> None:
        """Brings what is in the ring to the history, with the verdicts of the step as they stand
        now.
        """
        self.history.add(self.drain.take())
        for finding in self.judge.findings:
            self.history.set_flags(finding.seq, finding.flags)

    def _archive(self) -> None:
        self._past_events.extend(map(self.event, self.judge.findings))
        _tally(self.judge.findings, self.verdict_tally, self.site_tally)

    def _store(self) -> None:
        self.collect()
        self.write_log()

    def write_log(self) -> None:
        """Appends to the log, if there is one, what it doesn't have yet; collect() first."""
        records = self.history.take_unlogged()
        if self.log is None:
            return
        self.log.append(records, self.step)
        for finding in self.judge.findings:
            # Again where it changed: the later line holds.
            if self._logged.get(finding.seq) is not finding.verdict:
                self._logged[finding.seq] = finding.verdict
                self.log.append_event(self.event(finding))

    def _make_room(self) -> None:
        self.collect()
        if self.history.is_full:
            self.write_log()
            self.history.drop_oldest()

    # Trouble

    def switch_off(self, site: int, error: Exception) -> None:
        """A site can't be read: it is left out from now on, which is said once."""
        self.off_sites.add(site)
        self.trouble(str(self.sites[site]), error)

    def trouble(self, where: str, error: Exception) -> None:
        """Says once that fastcheck itself failed at ``where``, which the caller has switched
        off.
        """
        note = f"fastcheck no longer observes {where}: {type(error).__name__}: {error}"
        if note not in self.notes:
            self.notes[note] = None
            warnings.warn(f"{note}. Training is not affected.", FastcheckWarning, stacklevel=4)

    # Loss scaling

    def scaled_by(self, scaler: torch.amp.GradScaler) -> None:
        """The loss of this step was scaled by ``scaler``."""
        self._scaler = weakref.ref(scaler)

    @property
    def has_own_scaling(self) -> bool:
        """The user gave a number or a callable: nobody tells which updates are skipped."""
        scaler = self.config.scaler
        return scaler is not None and not isinstance(scaler, torch.amp.GradScaler)

    @property
    def is_scaled(self) -> bool:
        """Gradients of this step carry a loss scale."""
        return self._scaler is not None or (self.has_own_scaling and self.config.scaler != 1.0)

    def current_scale(self) -> Optional[float]:
        """The loss scale where it is known; reads a device value."""
        scaler = self.config.scaler if self._scaler is None else self._scaler()
        if scaler is None:
            return None
        if isinstance(scaler, torch.amp.GradScaler):
            return float(scaler.get_scale())
        return float(scaler()) if callable(scaler) else float(scaler)


def _tally(findings: list[Finding], verdicts: Tally[Verdict], places: Tally[int]) -> None:
    for finding in findings:
        verdicts[finding.verdict] += 1
        if finding.counted:
            places[finding.blamed_site] += 1
