"""The session at op level: the observer in C++ reads what every op makes; here its records and
incidents are taken in, at the hooks and at step boundaries.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, Callable, Optional

import numpy as np
import torch

from ._calls import Call, ModuleNode
from ._config import Config
from ._errors import ConfigError, explain
from ._extension import extension
from ._finding import Finding
from ._journal import Note
from ._op_filter import filter_options
from ._op_incident import Incident
from ._op_judge import Elders, OpFinding, OpIncident, OpJudge
from ._op_mode import CallMode
from ._op_sites import OpSites
from ._readable import can_hold_nonfinite, can_read
from ._record import RECORD_DTYPE, Flag, nonfinite
from ._session import Session
from ._site import SiteTable
from ._state import StateReader

__all__ = ["OpSession", "OpState"]

# A token for what is known to be finite; no finding has it.
_FINITE = 2**62

_PACKAGES = ("torch", "fastcheck")


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
        self.elders: Elders = {}
        super().__init__(config, sites, rank, world_size)
        self.seen = _Seen()
        self._sites: Optional[OpSites] = None
        self._run = 0
        self._last_seq = 0
        # The outermost module that a pass enters, and those of this step: a loop that calls the
        # parts of a model one by one has only passed when one of them comes again.
        self.entering = ""
        self._entered: set[str] = set()
        self._close_mode: Callable[[], None] = lambda: None

    # From the first hook to the last

    def begin(self, nodes: Sequence[ModuleNode]) -> None:
        """From now on every op is read."""
        self._sites = OpSites(self.sites, nodes)
        filters = filter_options(self.config, nodes)
        self._run = self._ops.start(int(self.config.depth), _line, **filters, copies=self.may_wait)
        self._ops.set_active(self.is_active)
        if self.config.sync == "call":
            mode = CallMode(self)
            self._close_mode = mode.close
            mode.open()
            self._ops.set_mode(mode)
            weakref.finalize(self, mode.close)
        # A model that is deleted takes its monitor along, without remove().
        weakref.finalize(self, self._ops.stop, self._run)

    def end(self) -> None:
        """Judges what still waits. Idempotent."""
        with self.ledger.lock:
            self.ledger.settle_silent(self.step)
        self._last_seq = self.next_seq
        self._close_mode()
        self._ops.stop(self._run)

    @property
    def _is_running(self) -> bool:
        return self._run != 0 and self._ops.run() == self._run

    @property
    def next_seq(self) -> int:
        return self._ops.next_seq() if self._is_running else self._last_seq

    @next_seq.setter
    def next_seq(self, value: int) -> None:
        """The observer numbers the records."""

    # Steps

    def begin_pass(self) -> None:
        self._ops.set_optimizer(False)  # whose step may have raised
        self.begin_step_if_closed()
        self.obey_pause()
        with self.ledger.lock:
            # A served model never closes a step.
            self.collect()
            if self.ledger.history.is_full:
                self.ledger.store(self.step)
                self.ledger.history.drop_oldest()
            self.ledger.renew(self.step)
        begins_again = self.entering in self._entered
        if begins_again:
            self._entered.clear()
        self._entered.add(self.entering)
        if begins_again and any(finding.is_soft for finding in self.step.judge.findings):
            # What waits since an earlier pass of this step has met all its consumers.
            self.note(self.ledger.settle_silent, self.step)

    def begin_step_if_closed(self) -> None:
        if not self.is_closed:
            return
        super().begin_step_if_closed()
        self._entered.clear()
        if not self._is_running:
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
        if self._is_running:
            self._ops.set_active(self.is_active)

    @property
    def _judge(self) -> OpJudge:
        judge = self.step.judge
        assert isinstance(judge, OpJudge)
        judge.elders = self.elders
        return judge

    def update_began(self) -> None:
        self._ops.set_optimizer(self._is_running)

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
        return can_read(tensor) and (tensor.is_cpu or self.may_wait)

    def observe(
        self, tensor: torch.Tensor, site: int, call: int, flags: int
    ) -> tuple[int, Optional[bool]]:
        if not self._is_running or not self._is_readable(tensor):
            return _FINITE, False
        seq, is_bad, _ = self._ops.read(tensor, site, call, flags)
        return (_FINITE if seq < 0 else seq), is_bad

    def judge(
        self,
        is_bad: Optional[bool],
        seq: int,
        role: str,
        call: Optional[Call],
        method: Callable[..., None],
        *args: Any,
    ) -> None:
        if is_bad:
            with self.ledger.lock:
                self.collect()
                record = self.ledger.history.find(seq)
                if record is not None and not self._judge.is_finding(seq):
                    finding = OpFinding(record, role)
                    self.ledger.judge(self.step, Note(method, self._judge, finding, *args))

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
        if self._is_running and can_hold_nonfinite(tensor) and self._is_readable(tensor):
            seq, is_bad, is_collective = self._ops.read(tensor, site, 0, 0)
            self.judge(is_bad, seq, "input", None, OpJudge.entered, is_collective)

    # From the observer to the ledger

    def collect(self) -> None:
        if self._sites is None or not self._is_running:
            return
        with self.ledger.lock:
            rows, incidents, sites, first = self._ops.take()
            if sites:
                self._sites.add(first, sites)
            records: np.ndarray = rows.numpy().reshape(-1).view(RECORD_DTYPE)
            self._sites.translate(records)
            self.ledger.history.add(records)
            if not incidents:
                return
            bad = {int(record["seq"]): record.copy() for record in records[nonfinite(records)]}
            judge = self._judge
            judge.is_scaled = self.is_scaled
            judge.is_filtered = self.has_excluded or self.config.is_filtered
            for incident in map(Incident, incidents):
                # Its records may have come with an earlier batch, by another thread's hook.
                for seq in incident.bad_seqs:
                    if seq not in bad and (record := self.ledger.history.find(seq)) is not None:
                        bad[seq] = record
                self.ledger.judge(self.step, OpIncident(incident), bad)

    def judge_now(self) -> None:
        """In the middle of a forward or backward: what is due is done here."""
        if self.lock._is_owned():
            return  # an op of fastcheck itself: nothing may be raised in the middle of a hook
        with self.lock:
            if not self.removed:
                self.collect()
        if self.ledger.due:
            self.deliver()

    def flush(self) -> None:
        self.collect()

    @property
    def has_incidents(self) -> bool:
        """Whether anything non-finite was met since the last collect()."""
        return self._ops.has_incidents()


class OpState(StateReader):
    """Stored tensors are read once: every later change of them is an op, which is read itself."""

    def read_stored(self) -> None:
        """Parameters and buffers of the modules that are not left out."""
        roles = self._session.config.roles
        if roles and "param" not in roles:
            return
        every, self._nodes = self._nodes, [node for node in self._nodes if node.is_selected]
        try:
            super().read_stored()
        finally:
            self._nodes = every

    def read_for_update(
        self,
        optimizer: Optional[torch.optim.Optimizer],
        *,
        gradients: bool = True,
        scaled: bool = False,
    ) -> None:
        session = self._session
        if not scaled:
            session.note(session.ledger.settle_silent, session.step)
        session.step.state_read = True

    def read_gradients(self, optimizer: torch.optim.Optimizer, *, scaled: bool) -> None:
        self._session.step.state_read = True

    def check(self, step: Any, node: ModuleNode, asked_for: Finding) -> Optional[Finding]:
        return None


class _Seen:
    """Remembers nothing: the observer knows what was read."""

    def add(self, tensor: torch.Tensor, token: int) -> int:
        return -1

    def clear(self) -> None:
        pass

    def __len__(self) -> int:
        return 0


def _line() -> str:
    """Where Python is, outside of torch and of fastcheck."""
    frame: Optional[FrameType] = sys._getframe()
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).split(".", 1)[0]
        if package not in _PACKAGES and not package.startswith("_pytest"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
