"""The session at op level: the observer in C++ reads what every op makes; here its records and
incidents are taken in, at the hooks and at step boundaries.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Callable, Optional

import numpy as np
import torch

from ._calls import Call, ModuleNode
from ._config import Config
from ._device import streams_of
from ._device_ring import DeviceRing
from ._errors import ConfigError, explain
from ._extension import extension
from ._journal import BadRecords, Journal, Note
from ._op_deferred import OpPart, OpReading, Stretch
from ._op_filter import filter_options
from ._op_incident import Incident
from ._op_judge import OpFinding, OpIncident, OpJudge
from ._op_launch import Launcher, Lines, where, why_not
from ._op_mode import CallMode, Captures
from ._op_sites import OpSites
from ._op_state import NothingSeen
from ._op_unread import UnreadOp, describing, unread_ops
from ._readable import can_hold_nonfinite, can_read
from ._record import RECORD_DTYPE, Flag, overflowed
from ._session import Session
from ._site import SiteTable
from ._step import Step
from .backends import backend_for

__all__ = ["OpSession"]

_MODES = torch._C.DispatchKeySet(torch._C.DispatchKey.Python) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.PythonTLSSnapshot
)


# A token for what was not read; no finding has it.
_UNREAD = 2**62


class OpSession(Session):
    """One at a time in a process: the observer sees the ops of all threads and models."""

    def __init__(self, config: Config, sites: SiteTable, rank: int, world_size: int = 1) -> None:
        self._ops = extension.op_observer()
        if self._ops.run():
            raise ConfigError(
                explain(
                    'a monitor with level="op" is installed already',
                    expected="one at a time: it sees the ops of the whole process",
                    came="a second one",
                    do="remove() the first, or give both models to one install(model, other)",
                )
            )
        super().__init__(config, sites, rank, world_size)
        self.seen = NothingSeen()
        self._sites: Optional[OpSites] = None
        self._run = 0
        self._last_seq = 0
        # The outermost module that a pass enters, and those of this step: a loop that calls the
        # parts of a model one by one has only passed when one of them comes again.
        self.entering = ""
        self._entered: set[str] = set()
        self._close_mode: Callable[[], None] = lambda: None
        # Where a device reads: records of the host that wait for those of the device, and where
        # Python was when the step's records were asked for.
        self._rows: list[np.ndarray] = []
        self._launcher = Launcher(self)
        #: Modules that ran compiled: what calls no operators.
        self.compiled: dict[str, int] = {}
        self._unread_ops: list[UnreadOp] = []
        # Set by the owner: what calls have read and made is kept for a dump.
        self.captures: Optional[Captures] = None

    # From the first hook to the last

    def begin(self, nodes: Sequence[ModuleNode]) -> None:
        """From now on every op is read."""
        self._sites = OpSites(self.sites, nodes)
        filters = filter_options(self.config, nodes)
        self._run = self._ops.start(
            int(self.config.depth),
            where,
            **filters,
            copies=self.config.may_wait,
            launch=None if self.config.may_wait else self._launcher,
        )
        self._ops.set_active(self.is_active)
        if self.config.sync == "call":
            self._learn_modes(nodes)
            mode = CallMode(self, self.captures)
            self._close_mode = mode.close
            mode.open()
            self._ops.set_mode(mode)
            weakref.finalize(self, mode.close)
        self.ledger.describe = describing(self.ledger.describe, weakref.WeakMethod(self.unread_ops))
        # A model that is deleted takes its monitor along, without remove().
        weakref.finalize(self, self._ops.stop, self._run)

    def _learn_modes(self, nodes: Sequence[ModuleNode]) -> None:
        """Of the devices that the models lie on: copies are read as if they still were there."""
        modules = filter(None, (node.module() for node in nodes))
        tensors = (p for module in modules for p in module.parameters(recurse=False))
        for device in dict.fromkeys(tensor.device for tensor in tensors):
            if device.type not in ("cpu", "meta"):
                backend = backend_for(device)
                self._ops.set_device_mode(str(device), int(backend.device_mode))
                self.overflow.add(device, backend)

    def end(self) -> None:
        """Judges what still waits. Idempotent."""
        with self.ledger.lock:
            self.ledger.settle_silent(self.step)
            self.ledger.note_unread(self.unread_ops())
        self._last_seq = self.next_seq
        self._close_mode()
        self._ops.stop(self._run)

    @property
    def is_running(self) -> bool:
        """Whether the observer is this session's."""
        return self._run != 0 and self._ops.run() == self._run

    @property
    def next_seq(self) -> int:
        return self._ops.next_seq() if self.is_running else self._last_seq

    @next_seq.setter
    def next_seq(self, value: int) -> None:
        """The observer numbers the records."""

    # Steps

    def begin_pass(self) -> None:
        self._ops.set_optimizer(False)  # whose step may have raised
        self.begin_step_if_closed()
        self.obey_pause()
        begins_again = self.entering in self._entered
        if begins_again:
            self._entered.clear()
        self._entered.add(self.entering)
        if self.is_deferred:
            if begins_again:
                self.note(self.ledger.settle_silent, self.step)
            if not len(self.drain):
                self._submit()
            return
        with self.ledger.lock:
            # A served model never closes a step.
            self.collect()
            if self.ledger.history.is_full:
                self.ledger.store(self.step)
                self.ledger.history.drop_oldest()
            self.ledger.renew(self.step)
        if begins_again and any(finding.is_soft for finding in self.step.judge.findings):
            # What waits since an earlier pass of this step has met all its consumers.
            self.note(self.ledger.settle_silent, self.step)

    def begin_step_if_closed(self) -> None:
        if not self.is_closed:
            return
        super().begin_step_if_closed()
        self._entered.clear()
        self._launcher.lines = Lines()
        if not self.is_running:
            return
        self._ops.begin_step(self.step.index)
        self._ops.set_active(self.is_active)
        self._ops.set_backward_flags(0)

    def begin_at(self, step: int) -> None:
        super().begin_at(step)
        self._ops.begin_step(step)

    def pause(self, is_paused: bool) -> None:
        """Operators are not read from now on, in a pass or not, or are again."""
        super().pause(is_paused)
        self.obey_pause()

    def obey_pause(self) -> None:
        super().obey_pause()
        if self.is_running:
            self._ops.set_active(self.is_active)

    def close_step(self) -> None:
        with self._aside():
            super().close_step()
        before, rows = self._unread_ops, self.unread_ops()
        # Once for each operator and reason: the file is written anew each time.
        if len(rows) != len(before):
            self.note(self.ledger.note_unread, rows)

    def unread_ops(self) -> list[UnreadOp]:
        """What passed unread, why, and in how many calls; most calls first."""
        if self.is_running:
            self._unread_ops = unread_ops(self._ops, self.compiled)
        return self._unread_ops

    def _judge_of(self, step: Step) -> OpJudge:
        judge = step.judge
        assert isinstance(judge, OpJudge)
        return judge

    def update_began(self) -> None:
        self._ops.set_optimizer(self.is_running)

    def update_ended(self) -> None:
        self._ops.set_optimizer(False)

    @contextlib.contextmanager
    def unread(self) -> Iterator[None]:
        self._ops.pause(1)
        try:
            yield
        finally:
            self._ops.pause(-1)

    def scaled_by(self, scaler: Any) -> None:
        super().scaled_by(scaler)
        self._ops.set_backward_flags(int(Flag.SCALED))

    # Readings by name

    def _is_readable(self, tensor: torch.Tensor) -> bool:
        if not can_read(tensor):
            return False
        if tensor.is_cpu or self.config.may_wait or streams_of(tensor.device) is not None:
            return True
        self.unread_devices[tensor.device.type] = None
        return False

    def observe(
        self, tensor: torch.Tensor, site: int, call: int, flags: int
    ) -> tuple[int, Optional[bool]]:
        if not self.is_running or not self._is_readable(tensor):
            return _UNREAD, False
        seq, is_bad, _ = self._ops.read(tensor, site, call, flags)
        return seq, is_bad

    def judge(
        self,
        is_bad: Optional[bool],
        seq: int,
        role: str,
        call: Optional[Call],
        method: Callable[..., None],
        *args: Any,
    ) -> None:
        if is_bad is False:
            return
        if self.is_deferred:
            self._gather()
            self.step.journal.entries.append(OpReading(seq, role, method, args))
            return
        with self.ledger.lock:
            self.collect()
            record = self.ledger.history.find(seq)
            judge = self._judge_of(self.step)
            if record is not None and not judge.is_finding(seq):
                finding = OpFinding(record, role)
                self.ledger.judge(self.step, Note(method, judge, finding, *args))

    def observe_list(
        self,
        tensors: Sequence[torch.Tensor],
        sites: Sequence[int],
        roles: Sequence[str],
        flags: int,
        method: Callable[..., None],
        *args: Any,
    ) -> None:
        for tensor, site, role in zip(tensors, sites, roles):
            seq, is_bad = self.observe(tensor, site, 0, flags)
            self.judge(is_bad, seq, role, None, OpJudge.stored)

    def read_argument(self, tensor: torch.Tensor, site: int) -> None:
        """What enters the model; nothing to do if an observed op has made it."""
        if self.is_running and can_hold_nonfinite(tensor) and self._is_readable(tensor):
            seq, is_bad, is_collective = self._ops.read(tensor, site, 0, 0)
            self.judge(is_bad, seq, "input", None, OpJudge.entered, is_collective)

    def read_compiled(self, tensor: torch.Tensor, node: ModuleNode, site: int, role: str) -> None:
        """What a module takes, returns or is given back within compiled code."""
        if self.config.roles and role not in self.config.roles:
            return
        if not self.is_running or not can_hold_nonfinite(tensor) or not self._is_readable(tensor):
            return
        before, flags = self.next_seq, 0
        if role.startswith("grad"):
            flags = int(Flag.SCALED) if self.is_scaled else 0
        seq, is_bad, _ = self._ops.read(tensor, site, 0, flags)
        if seq >= before:  # by no operator that was observed
            self.compiled[node.name] = self.compiled.get(node.name, 0) + 1
            self.judge(is_bad, seq, role, None, OpJudge.compiled, node.name, self.is_scaled)

    # From the observer to the ledger

    def _take(self) -> tuple[np.ndarray, list[Incident], Optional[Any]]:
        """The observer's records since the last time, its incidents, and the operators that wait
        for records of a device.
        """
        assert self._sites is not None
        rows, incidents, sites, first, waiting = self._ops.take()
        if sites:
            self._sites.add(first, sites)
        records: np.ndarray = np.frombuffer(rows, RECORD_DTYPE)
        return records, [Incident(raw) for raw in incidents], waiting

    def collect(self) -> None:
        if self._sites is None or not self.is_running:
            return
        if self.is_deferred:
            with self._aside():
                self.drain.process()
            return
        with self.ledger.lock:
            records, incidents, waiting = self._take()
            self._sites.translate(records)
            self.ledger.history.add(records)
            if waiting is not None:
                # Left to a device that can't be read: of the others all is known.
                found = self._ops.settle(waiting, [], self.next_seq)
                incidents += [Incident(raw) for raw in found]
            if incidents:
                bad = {int(record["seq"]): record.copy() for record in records[overflowed(records)]}
                self._judge_incidents(self.step, self.is_scaled, incidents, bad)

    def _judge_incidents(
        self, step: Step, is_scaled: bool, incidents: Sequence[Incident], bad: BadRecords
    ) -> None:
        known = dict(bad)
        judge = self._judge_of(step)
        judge.is_scaled = is_scaled
        judge.is_filtered = self.has_excluded or self.config.is_filtered
        for incident in incidents:
            # Its records may have come with an earlier batch, by another thread's hook.
            for seq in incident.bad_seqs:
                if seq not in known and (record := self.ledger.history.find(seq)) is not None:
                    known[seq] = record
            self.ledger.judge(step, OpIncident(incident), known)

    # On a device

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Within it, ops of this thread are fastcheck's own: neither read nor seen by anybody's
        dispatch mode.
        """
        with self.unread(), torch._C._ExcludeDispatchKeyGuard(_MODES):
            yield

    def ring_for(self, tensor: torch.Tensor, site: int) -> Optional[DeviceRing]:
        """The ring of its device; None if it passes unread."""
        device = tensor.device
        if not self.is_running or site in self.off_sites:
            return None
        if self.tape is not None:
            self.notes["what a graph captures passes unread at op level"] = None
            return None
        if device not in self.rings:
            problem = why_not(device)
            if problem:
                self.notes[f"op level does not read {device}: {problem}"] = None
                self._ops.leave_out(tensor)
                return None
            self._ring(device)
            if self.overflow.follow_ops(device):
                self._ops.watch_status(str(device))
        return self._ring(device)

    def _gather(self) -> None:
        """What the observer has seen until now becomes an entry of the journal."""
        if self._sites is None or not self.is_running:
            return
        stop = self.next_seq
        records, _, waiting = self._take()
        if len(records):
            self._rows.append(records)
        if waiting is not None:
            step, is_scaled = self.step, self.is_scaled

            def judge(incidents: list[Incident], bad: BadRecords) -> None:
                self._judge_incidents(step, is_scaled, incidents, bad)

            step.journal.note(Stretch(judge, waiting, stop, self._launcher.lines))

    def note(self, function: Callable[..., Any], *args: Any) -> None:
        if self.is_deferred:
            self._gather()
        super().note(function, *args)

    def _submit(self, closes_step: bool = False) -> None:
        if self._sites is None or self.tape is not None:  # after the capture
            return
        with self._aside():
            self._gather()
            step = self.step
            journal, step.journal = step.journal, Journal()
            self.recorder.redirect(step.journal.entries)
            self.recorder.unaim()
            records, self._rows = self._rows, []
            segments = []
            for ring in self.rings.values():
                early, in_flight = ring.cut()
                records += early
                segments += [(ring, segment) for segment in in_flight]
        overflow, lines = self.overflow, self._launcher.lines
        self.drain.submit(
            OpPart(self._sites, step, journal, records, segments, closes_step, overflow, lines)
        )

    def judge_now(self) -> None:
        """In the middle of a forward or backward: what is due is done here."""
        if self.lock._is_owned():
            return  # an op of fastcheck itself: nothing may be raised in the middle of a hook
        with self.lock:
            if not self.removed:
                self.collect()
        if self.ledger.due:
            self.deliver()

    @property
    def has_incidents(self) -> bool:
        """Whether anything non-finite was met since the last collect()."""
        return self._ops.has_incidents()
