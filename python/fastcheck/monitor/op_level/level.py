"""Op level: takes records and incidents from the C++ observer, and passes them to the event store:
at once on the CPU, through the drain on a device. With sync="call" the operator itself raises.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Callable, Optional

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastcheck.backends.portable.traversal import dtype_and_order
from fastcheck.backends.table import backend_for
from fastcheck.calls.module_calls import ModuleNode
from fastcheck.calls.recorder import HookRecorder
from fastcheck.calls.stored import TensorBatch, buffers_of, parameters_of
from fastcheck.dump.on_stop.captured_op import OpCaptures
from fastcheck.extension import extension
from fastcheck.log.unobserved import UnreadOp
from fastcheck.monitor.session.drain import StepPart
from fastcheck.monitor.session.level import Level
from fastcheck.monitor.session.overflow_status import StatusReader
from fastcheck.monitor.session.session import Session
from fastcheck.record.format import RECORD_DTYPE, Flag, overflowed
from fastcheck.ring.device import DeviceRing
from fastcheck.ring.segments import Segment
from fastcheck.utils.torch.flatten import flatten
from fastcheck.utils.torch.frames import frames, program_frames
from fastcheck.utils.torch.own_operators import is_unobserved, unobserved
from fastcheck.utils.torch.patching import Listeners, wrap_method
from fastcheck.utils.torch.readable import can_hold_nonfinite, can_read
from fastcheck.utils.torch.seen_tensors import SeenTensors
from fastcheck.utils.torch.streams import streams_of
from fastcheck.utils.torch.transforms import take_off, unwrapped
from fastcheck.utils.torch.versions import is_compiling
from fastcheck.verdict import entries
from fastcheck.verdict.incident import HOST, Destination, Incident
from fastcheck.verdict.step import Step

from .sites import OpSites, filter_options


class NothingSeen(SeenTensors):
    """A store of seen tensors that remembers nothing, because the observer knows what was read."""

    def add(self, tensor: torch.Tensor, seq: int) -> int:
        return -1


#: Where Python was when the record of this number was requested, ``train.py:12 in forward``; empty
#: where it is not known.
LineOf = Callable[[int], str]


class OpPart(StepPart):
    """A part whose records carry the observer's numbers of their sites."""

    def __init__(
        self,
        sites: OpSites,
        step: Step,
        journal: entries.Journal,
        records: list[np.ndarray],
        segments: list[tuple[DeviceRing, Segment]],
        closes_step: bool,
        overflow: StatusReader,
        line_of: LineOf,
        compared: Callable[[int, bool], None],
    ) -> None:
        super().__init__(step, journal, records, segments, closes_step, compared)
        self._sites = sites
        self._overflow = overflow
        self._line_of = line_of

    def take(self) -> np.ndarray:
        records = super().take()
        is_status = self._sites.are_status(records)
        self._sites.translate(records)
        return self._without_status(records, is_status) if is_status.any() else records

    def _without_status(self, records: np.ndarray, is_status: np.ndarray) -> np.ndarray:
        """The records without the status words behind operators that report nothing new."""
        bad = records["seq"][overflowed(records) & ~is_status]
        hits = self._overflow.arrived(records[is_status], bad)
        for hit in reversed(hits):
            line = self._line_of(int(hit.record["seq"]))
            note = entries.Note(self._overflow.tell, self.step, hit, line)
            self.journal.entries.insert(0, note)
            self.journal.due.insert(0, note)
        kept = np.isin(records["seq"], [int(hit.record["seq"]) for hit in hits])
        return records[~is_status | kept]


@dataclass(eq=False)
class DeferredOps(entries.Task):
    """Operators that ran in this order, and whose records arrive with this part at the
    latest. Settled in healthy parts too, because the observer waits for their records.
    """

    _judge: Callable[[list[Incident], entries.Records], None]
    _waiting: Any
    _stop: int
    _line_of: LineOf

    def run(self, bad: entries.Records) -> None:
        raw_incidents = extension.op_observer().settle(self._waiting, list(bad), self._stop)
        if raw_incidents:
            self._judge([self._incident(raw) for raw in raw_incidents], bad)

    def _incident(self, raw: Any) -> Incident:
        incident = Incident(raw)
        if not incident.line:
            seqs = (incident.forward_seq, *(seq for seq, _ in incident.made))
            incident.line = next(filter(None, map(self._line_of, seqs)), "")
        return incident


Named = Iterable[tuple[str, torch.Tensor]]


def _named_parameters(nodes: Sequence[ModuleNode]) -> Iterator[tuple[str, torch.Tensor]]:
    for node, name, p in parameters_of(nodes, None):
        yield node.name_of(name), p


def _updated_by(
    optimizer: torch.optim.Optimizer, nodes: Sequence[ModuleNode]
) -> Iterator[tuple[str, torch.Tensor]]:
    names = {id(p): name for name, p in _named_parameters(nodes)}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if isinstance(p, torch.Tensor):
                yield names.get(id(p), "a parameter"), p


def _state_of(
    optimizer: torch.optim.Optimizer, nodes: Sequence[ModuleNode]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that an update has written."""
    kind = type(optimizer).__name__
    for name, p in _updated_by(optimizer, nodes):
        yield f"{kind} wrote it to {name}", p
        for label, tensor in flatten(optimizer.state.get(p), ""):
            yield f"{kind} keeps it in its state{label} of {name}", tensor


def _reached(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The gradients of these parameters."""
    for name, p in named:
        if p.grad is not None:
            yield f"it reached the gradient of {name}", p.grad


def plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors whose memory holds its values: those within functorch's wrappers, a DTensor or
    another subclass, or a sparse tensor.
    """
    tensor = unwrapped(tensor)
    if not can_hold_nonfinite(tensor):
        return []
    if tensor.layout is torch.sparse_coo:
        return [tensor._values()]
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return [tensor]
    within = getattr(tensor, "__tensor_flatten__", None)
    if within is None:
        return [tensor]
    inner = [getattr(tensor, name) for name in within()[0]]
    return [
        plain for part in inner if isinstance(part, torch.Tensor) for plain in plain_tensors(part)
    ]


_IN_COMPILED = "compiled code calls no operators: what it takes and returns is read"


def unread_ops(observer: Any, compiled: dict[str, int]) -> list[UnreadOp]:
    """The operators that passed unread, most calls first. ``compiled``: how often modules were
    called within compiled code.
    """
    rows = [
        UnreadOp(op, reason, calls)
        for op, reason, calls, has_no_values in observer.unread()
        # A traced program runs on fake tensors first, and then for good.
        if not (has_no_values and _has_traced())
    ]
    rows += [
        UnreadOp(f"{name} (compiled)", _IN_COMPILED, calls) for name, calls in compiled.items()
    ]
    return sorted(rows, key=lambda row: (-row.calls, row.op))


def _has_traced() -> bool:
    utils = sys.modules.get("torch._dynamo.utils")
    counters: Any = getattr(utils, "counters", None)
    return bool(counters and counters.get("frames", {}).get("total"))


# Methods by which the values of a tensor leave torch without an operator: arrays and pictures,
# numbers, and files and other processes (pickle, torch.save).
_LEAVES_BY = ("numpy", "tolist", "__reduce_ex__")


def _wrap_leaving(at_end: contextlib.ExitStack) -> None:
    for name in _LEAVES_BY:
        wrap_method(at_end, torch.Tensor, name, _telling, is_inherited=True)


def _telling(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not (is_unobserved() or is_compiling()):
            for listener in _leaving:
                listener.leaves(tensor)
        return original(tensor, *args, **kwargs)

    return method


_leaving: Listeners[Leaving] = Listeners(_wrap_leaving)


@dataclass(eq=False)
class Leaving:
    """A listener to tensors of one session whose values leave torch. ``_stops``: does what is due
    then.
    """

    _level: OpLevel
    _stops: Callable[[], None]

    def leaves(self, tensor: torch.Tensor) -> None:
        """The tensor's values leave torch on this thread, which holds no lock."""
        session, level = self._level.session, self._level
        if not level.is_running or not session.is_active:
            return
        try:
            with session.lock:
                if not session.removed:
                    level.reach(HOST.kind, ((HOST.clause, tensor),))
        except Exception as error:
            session.report_internal_error("a tensor that leaves torch", error)
        if session.event_store.due and not _is_written_as_text():
            self._stops()


# Modules that write tensors as text: who has it written may take in an exception (reprlib, a
# handler of logging), and a stop would be lost. It comes with what the program does next.
_WRITERS = "torch._tensor_str", "logging"


def _is_written_as_text() -> bool:
    return any(frame.f_globals.get("__name__") in _WRITERS for frame in frames())


# The seq of what was not read; no finding has it.
_UNREAD = 2**62


class OpLevel(Level):
    """The level at which operators are read; one at a time in a process: the observer sees the ops
    of all threads and models.
    """

    reads_captured_graphs = False
    seen = NothingSeen()
    recorder = HookRecorder()

    def __init__(
        self, session: Session, has_excluded: bool, captures: Optional[OpCaptures]
    ) -> None:
        self._ops = extension.op_observer()
        self.session = session
        self.has_excluded = has_excluded
        self._sites: Optional[OpSites] = None
        self._run = 0
        self._last_seq = 0
        # The outermost module that a pass enters, and those of this step: a loop that calls the
        # parts of a model one by one has only passed when one of them comes again.
        self.entering = ""
        self._entered: set[str] = set()
        self._at_end = contextlib.ExitStack()
        # Records of the host that wait for those of the device, if a device reads, and where Python
        # was when the step's records were asked for.
        self._rows: list[np.ndarray] = []
        launcher, depth = Launcher(self), int(session.config.depth)
        self.launches = extension.DeviceLaunches(session.lock, launcher, depth)
        #: Modules that ran compiled: what calls no operators.
        self.compiled: dict[str, int] = {}
        self._unread_ops: list[UnreadOp] = []
        self._nodes: Sequence[ModuleNode] = ()
        # Keeps what calls have read and made, for a dump of the stop.
        self._captures = captures

    # Hooks, from the first to the last

    def begin(self, nodes: Sequence[ModuleNode], stops: Callable[[], None]) -> None:
        """Starts to read every op. ``stops``: carries out stops that are due during a pass."""
        self._sites = OpSites(self.session.sites, nodes)
        self._nodes = nodes
        config = self.session.config
        self._run = self._ops.start(
            int(config.depth),
            where,
            **filter_options(config, nodes),
            copies=config.may_wait,
            launches=None if config.may_wait else self.launches,
        )
        self._ops.set_active(self.session.is_active)
        if config.sync == "call":
            self._learn_modes(nodes)
            mode = CallMode(self, stops, self._captures)
            mode.open()
            self._ops.set_mode(mode)
            self._at_end.callback(mode.close)
            weakref.finalize(self.session, mode.close)
        leaving = Leaving(self, stops)
        _leaving.connect(leaving)
        self._at_end.callback(_leaving.disconnect, leaving)
        # A model that is deleted takes its monitor along, without remove().
        weakref.finalize(self.session, self._ops.stop, self._run)
        weakref.finalize(self.session, self.launches.clear_rows)

    def _learn_modes(self, nodes: Sequence[ModuleNode]) -> None:
        """Passes on the modes of the devices that the models lie on: copies are read as if they
        still were there.
        """
        for device in dict.fromkeys(p.device for _, _, p in parameters_of(nodes, None)):
            if device.type not in ("cpu", "meta"):
                backend = backend_for(device)
                self._ops.set_device_mode(str(device), int(backend.device_mode))
                self.session.rings.overflow.add(device, backend)

    def end(self) -> None:
        """Judges what still waits. Idempotent."""
        store = self.session.event_store
        with store.lock:
            store.judge(self.session.step, entries.Moment.ALL_READ)
            store.archive.note_unread(self.unread_ops())
        self._last_seq = self.next_seq
        self._at_end.close()
        self._ops.stop(self._run)
        self.launches.clear_rows()

    @property
    def is_running(self) -> bool:
        """True if the observer is this session's."""
        return self._run != 0 and self._ops.run() == self._run

    @property
    def observes_all_models(self) -> bool:
        """True if this run goes on: another monitor's may have replaced it."""
        return self.is_running

    @property
    def next_seq(self) -> int:
        return self._ops.next_seq() if self.is_running else self._last_seq

    @next_seq.setter
    def next_seq(self, value: int) -> None:
        """The observer numbers the records."""

    # Steps

    def enters(self, path: str) -> None:
        """A pass enters the outermost module ``path``."""
        self.entering = path
        self._ops.set_optimizer(False)  # whose step may have raised

    def pass_began(self, goes_on: bool) -> None:
        session, store = self.session, self.session.event_store
        begins_again = self.entering in self._entered
        if begins_again:
            self._entered.clear()
        self._entered.add(self.entering)
        if session.rings.is_deferred:
            if begins_again:
                session.due(entries.Moment.ALL_READ)
            if session.drain.is_idle:
                session.submit()
        else:
            with store.lock:
                self.collect()
                store.make_room(session.step)
                store.renew(session.step)
            if begins_again and any(f.is_tentative for f in session.step.findings.all):
                # Tensors that wait since an earlier pass of this step have met all their consumers,
                # as a rule.
                session.due(entries.Moment.ALL_READ)
        if not goes_on:
            trained = ((n, p) for n, p in _named_parameters(self._nodes) if p.requires_grad)
            self.reach("weight", ((f"it was written into {name}", p) for name, p in trained))

    def set_depth(self, depth: int) -> None:
        self._ops.set_depth(depth)
        self.launches.set_depth(depth)

    def step_began(self) -> None:
        self._entered.clear()
        self.launches.begin_step()
        if not self.is_running:
            return
        self._ops.begin_step(self.session.step.index)
        self._ops.set_active(self.session.is_active)
        self._ops.set_backward_flags(0)

    def begin_at(self, step: int) -> None:
        self._ops.begin_step(step)

    def set_active(self, is_active: bool) -> None:
        if self.is_running:
            self._ops.read_waiting()  # what is written while it is not active is not seen
            self._ops.set_active(is_active)

    def step_closed(self) -> None:
        following = self.session.step.index + 1
        if self.is_running and self.session.config.observes(following):
            # A batch that is made after an update is that of the next step.
            self._read_as_of(following)
        before, rows = self._unread_ops, self.unread_ops()
        # Once for each operator and reason: the file is written anew each time.
        if len(rows) != len(before):
            self.session.note(self.session.event_store.archive.note_unread, rows)

    def unread_ops(self) -> list[UnreadOp]:
        """The operators that passed unread, why, and in how many calls; most calls first."""
        if self.is_running:
            self._unread_ops = unread_ops(self._ops, self.compiled)
        return self._unread_ops

    def step_goes_on(self) -> None:
        if self.is_running:
            self._read_as_of(self.session.step.index)

    def _read_as_of(self, step: int) -> None:
        """Lets what is read from now on be of this step, though the session may be in another."""
        self._ops.begin_step(step)
        self.session.rings.set_depth(self.session.rings.depth_at(step))

    def update_began(self) -> None:
        self._ops.set_optimizer(self.is_running)

    def update_ended(self, optimizer: torch.optim.Optimizer) -> None:
        self._ops.set_optimizer(False)
        self.reach("state", _state_of(optimizer, self._nodes))

    def evaluation_began(self) -> None:
        self._ops.set_optimizer(False)

    def update_uses(self, optimizer: torch.optim.Optimizer) -> None:
        self.reach("update", _reached(_updated_by(optimizer, self._nodes)))

    def loss_given(self, loss: Any) -> None:
        tensors = (tensor for _, tensor in flatten(loss, "loss") if tensor.numel() == 1)
        self.reach("loss", (("it reached the loss", tensor) for tensor in tensors))

    def scaled(self) -> None:
        self._ops.set_backward_flags(int(Flag.SCALED))

    # Consequences

    def reach(self, kind: str, tensors: Named) -> None:
        """Notes that these tensors have reached a place of this kind; each comes with the clause
        that a reason ends in. Judged at once on the CPU.
        """
        if not self.is_running or not self.session.is_active or self.session.config.is_strict:
            return
        if not self.session.rings.is_deferred:
            self.collect()
            # No loss is infinite on purpose.
            if not self.session.event_store.op_memory.has_open and kind != "loss":
                return
        with unobserved():
            parts = [(clause, part) for clause, tensor in tensors for part in plain_tensors(tensor)]
            if parts:
                places = self.session.event_store.op_memory.places
                made = (Destination(kind, clause) for clause, _ in parts)
                numbers = [places.setdefault(place, len(places)) for place in made]
                self._ops.reach([tensor for _, tensor in parts], numbers)
        if not self.session.rings.is_deferred:
            self.collect()

    def gradients_clipped(self, norm: torch.Tensor) -> None:
        if not self.session.is_scaled:
            clause = "it reached the norm by which gradients were clipped"
            self.reach("norm", ((clause, norm),))

    def backward_ended(self) -> None:
        self._read_waiting()
        # The scaler decides about scaled gradients.
        if not self.session.is_scaled and self.session.backwards.owns_gradients:
            self.reach("gradient", _reached(_named_parameters(self._nodes)))

    def returned(self, node: ModuleNode, outputs: Named) -> None:
        """The module of an outermost call has returned these."""
        self.reach("output", ((node.returned_it, tensor) for _, tensor in outputs))
        buffers = buffers_of(self._nodes)
        kept = ((f"it is kept in buffer {node.name_of(name)}", b) for node, name, b in buffers)
        self.reach("buffer", kept)

    # Readings by name

    def _is_readable(self, tensor: torch.Tensor) -> bool:
        if not can_read(tensor):
            return False
        if tensor.is_cpu or self.session.config.may_wait or streams_of(tensor.device) is not None:
            return True
        self.session.faults.unread_devices[tensor.device.type] = None
        return False

    def observe(
        self, tensor: torch.Tensor, site: int, call: int, flags: int
    ) -> tuple[int, Optional[bool]]:
        if not self.is_running or not self._is_readable(tensor):
            return _UNREAD, False
        seq, is_bad, _ = self._ops.read(tensor, site, call, flags)
        return seq, is_bad

    def saw(self, entry: Any, is_bad: Optional[bool]) -> None:
        if is_bad is False:
            return
        step, store = self.session.step, self.session.event_store
        if self.session.rings.is_deferred:
            self.gather()
            step.journal.entries.append(entry)
            return
        with store.lock:
            self.collect()
            record = store.archive.history.find(entry.seq)
            if record is not None:
                store.judge(step, entry, {entry.seq: record})

    @property
    def reads_numbers(self) -> bool:
        config = self.session.config
        return not (config.is_filtered or config.include or config.exclude)

    def read_loss(self, loss: torch.Tensor, site: int, flags: int, is_scaled: bool) -> None:
        """An operator that was observed has made it: it is only noted that it is the loss, and its
        value is read once more under this name.
        """
        first = self.next_seq
        seq, is_bad = self.observe(loss, site, 0, flags)
        if seq >= first:
            self.saw(entries.Loss(seq, is_scaled, 0), is_bad)
            return
        if is_bad is not False:
            self.session.due(entries.LossKnown(seq))
        self.read_number(loss, site, flags)

    def read_norm(self, norm: torch.Tensor, site: int) -> None:
        """An operator that was observed has made it: what becomes of it decides."""
        if self.reads_numbers:
            self.read_number(norm, site)

    def read_number(self, number: torch.Tensor, site: int, flags: int = 0) -> int:
        """Reads a copy of a number: what is known of the tensor itself has another name."""
        with unobserved():
            copy = number.detach().clone()
        return self.observe(copy, site, 0, flags)[0]

    def observe_list(
        self,
        batch: TensorBatch,
        flags: int = 0,
        kind: Callable[..., entries.Seen] = entries.Stored,
        *fields: Any,
    ) -> None:
        for tensor, site, role in zip(batch.tensors, batch.sites, batch.roles):
            seq, is_bad = self.observe(tensor, site, 0, flags)
            self.saw(entries.OpStored(seq, role), is_bad)

    def read_argument(self, tensor: torch.Tensor, site: int) -> None:
        """Reads a tensor that enters the model, even where an observed op has made it: what has
        been written since without torch (through ``x.numpy()``) is seen here. Integers are read
        for their checksum: a batch is known by all that the model was given.
        """
        if self.is_running and self._is_readable(tensor):
            seq, is_bad, is_collective, sources = self._ops.take_over(tensor, site)
            for known in sources if self.session.event_store.has_allowances else ():
                self.session.due(entries.ArgumentKnown(known, site))
            self.saw(entries.Entered(seq, is_collective, tuple(sources)), is_bad)

    def read_again(
        self, tensor: torch.Tensor, site: int, call: int, flags: int
    ) -> tuple[int, Optional[bool], int]:
        """Reads a tensor by name whether it was read or not: observe(), and the number of the
        record of its contents; -1 if there is none.
        """
        if not self.is_running or not self._is_readable(tensor):
            return _UNREAD, False, -1
        return self._ops.read_again(tensor, site, call, flags)

    def read_compiled(self, tensor: torch.Tensor, node: ModuleNode, site: int, role: str) -> None:
        """Reads what a module takes, returns or is given back within compiled code."""
        roles = self.session.config.filter.roles
        if roles and role not in roles:
            return
        if not self.is_running or not can_hold_nonfinite(tensor) or not self._is_readable(tensor):
            return
        before, flags = self.next_seq, 0
        if role.startswith("grad"):
            flags = int(Flag.SCALED) if self.session.is_scaled else 0
        seq, is_bad, _ = self._ops.read(tensor, site, 0, flags)
        if seq >= before:  # by no operator that was observed
            self.compiled[node.name] = self.compiled.get(node.name, 0) + 1
            self.saw(entries.Compiled(seq, role, node.name, self.session.is_scaled), is_bad)

    # Results of the observer

    def _take(self) -> tuple[np.ndarray, list[Incident], Optional[Any]]:
        """The observer's records since the last time, its incidents, and the operators that wait
        for records of a device.
        """
        assert self._sites is not None
        rows, incidents, sites, first, waiting, unread = self._ops.take()
        self.session.leave_unread(unread)
        if sites:
            self._sites.add(first, sites)
        records: np.ndarray = np.frombuffer(rows, RECORD_DTYPE)
        return records, [Incident(raw) for raw in incidents], waiting

    def collect(self) -> None:
        if self._sites is None or not self.is_running:
            return
        if self.session.rings.is_deferred:
            with unobserved():
                self.session.drain.process()
            return
        with self.session.event_store.lock:
            records, incidents, waiting = self._take()
            self._sites.translate(records)
            self.session.event_store.archive.history.add(records)
            if waiting is not None:
                # Left to a device that can't be read: of the others all is known.
                raw_incidents = self._ops.settle(waiting, [], self.next_seq)
                incidents += [Incident(raw) for raw in raw_incidents]
            if incidents:
                bad = {int(record["seq"]): record.copy() for record in records[overflowed(records)]}
                self._judge_incidents(self.session.step, self.session.is_scaled, incidents, bad)

    def _judge_incidents(
        self, step: Step, is_scaled: bool, incidents: Sequence[Incident], bad: entries.Records
    ) -> None:
        known, store = dict(bad), self.session.event_store
        is_filtered = self.has_excluded or self.session.config.is_filtered
        for incident in incidents:
            # Its records may have come with an earlier batch, by another thread's hook.
            for seq in incident.bad_seqs:
                if seq not in known and (record := store.archive.history.find(seq)) is not None:
                    known[seq] = record
            store.judge(step, entries.Operator(incident, is_scaled, is_filtered), known)

    # Records on a device

    def ring_for(self, tensor: torch.Tensor, site: int) -> Optional[DeviceRing]:
        """The ring of its device; None if it passes unread."""
        device, rings, faults = tensor.device, self.session.rings, self.session.faults
        if not self.is_running or site in faults.off_sites:
            return None
        if self.session.tape is not None:
            faults.notes["what a graph captures passes unread at op level"] = None
            return None
        if device not in rings.of:
            problem = why_not(device)
            if problem:
                faults.notes[f"op level does not read {device}: {problem}"] = None
                self._ops.leave_out(tensor)
                return None
            rings.ring_of(device)
            if rings.overflow.follow_ops(device):
                self._ops.watch_status(str(device))
        return rings.ring_of(device)

    def gather(self) -> None:
        """Makes what the observer has seen until now an entry of the journal."""
        if self._sites is None or not self.is_running:
            return
        stop = self.next_seq
        records, _, waiting = self._take()
        if len(records):
            self._rows.append(records)
        if waiting is not None:
            step, is_scaled = self.session.step, self.session.is_scaled

            def judge(incidents: list[Incident], bad: entries.Records) -> None:
                self._judge_incidents(step, is_scaled, incidents, bad)

            step.journal.add_due(DeferredOps(judge, waiting, stop, self.launches.lines().of))

    def submit(self, closes_step: bool) -> None:
        if self._sites is None or self.session.tape is not None:  # after the capture
            return
        with unobserved():
            self._read_waiting()
            self.gather()
            step = self.session.step
            journal, step.journal = step.journal, entries.Journal()
            self.launches.clear_rows()
            records, self._rows = self._rows, []
            early, segments = self.session.rings.cut()
            records += early
        overflow, line_of = self.session.rings.overflow, self.launches.lines().of
        rest = closes_step, overflow, line_of, self._ops.compared
        self.session.drain.submit(OpPart(self._sites, step, journal, records, segments, *rest))

    def let_wait(self, device_type: str) -> None:
        self._ops.let_wait(device_type)

    def _read_waiting(self) -> None:
        if self.is_running:
            self._ops.read_waiting()

    def judge_now(self) -> bool:
        """Judges in the middle of a forward or backward. Returns whether anything is due, and may
        be done here.
        """
        if self.session.lock._is_owned():
            return False  # an op of fastcheck itself: nothing may be raised in the middle of a hook
        with self.session.lock:
            if not self.session.removed:
                self.collect()
        return bool(self.session.event_store.due)

    @property
    def has_incidents(self) -> bool:
        """True if anything non-finite was met since the last collect()."""
        return bool(self._ops.has_incidents())


# ---- On a device ---------------------------------------------------------------------------------

# A tensor to be read, and seq, step, call, site and flags of its record; or, if the last is True,
# the overflow status of its device.
Launch = tuple[torch.Tensor, int, int, int, int, int, bool]


def why_not(device: torch.device) -> str:
    """The reason why op level can't read a device without making the host wait; empty when it
    can.
    """
    if streams_of(device) is None:
        return f"torch.{device.type} has no streams and events"
    return ""


class Launcher:
    """Launches the readings of operators on devices where the extension's ``DeviceLaunches`` can't:
    of other backends, and the first of each stream and of each segment of a ring. Called in the
    middle of an operator, on any thread. Has a weak reference to op level, and raises nothing into
    the operator.
    """

    def __init__(self, level: OpLevel) -> None:
        self._level = weakref.ref(level)

    def __call__(self, launches: Sequence[Launch]) -> None:
        """Launches the reading of the tensors, on the streams of their devices."""
        level = self._level()
        if level is None:
            return
        session = level.session
        with session.lock:
            for tensor, seq, step, call, site, flags, is_status in launches:
                try:
                    ring = level.ring_for(tensor, site)
                    if ring is None:
                        continue
                    if is_status:
                        session.rings.overflow.read_after_op(
                            ring, tensor.device, (seq, step, call, site)
                        )
                    else:
                        identity = dtype_and_order(tensor)
                        ring.observe(tensor, (seq, step, call, site, flags, *identity))
                        self._open(level, ring)
                except Exception as error:
                    session.faults.off_sites.add(site)
                    level.launches.clear_rows()
                    session.report_internal_error(
                        f"one operator's tensors on {tensor.device.type}", error
                    )

    def _open(self, level: OpLevel, ring: DeviceRing) -> None:
        """Lets what is read next on this stream need no call of Python, as long as there are rows
        and no site is left out.
        """
        direct, rows = ring.backend.direct_observe, ring.next_rows()
        if direct is not None and rows is not None and not level.session.faults.off_sites:
            cursor: Any = rows.cursor
            level.launches.set_rows(direct, rows.slots, rows.identities, cursor)


def where() -> str:
    """The line where Python is, outside of torch and of fastcheck: ``train.py:12 in forward``;
    empty where it is nowhere else.
    """
    for frame in program_frames():
        return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
    return ""


# ---- sync="call" ---------------------------------------------------------------------------------


class CallMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has it untyped
    """A dispatch mode on the stack of the thread that called install(), and of those that run its
    backward, until the monitor is removed. The observer reads the operators as this mode calls
    them; what it finds is judged before they return.
    """

    def __init__(
        self, level: OpLevel, stops: Callable[[], None], captures: Optional[OpCaptures]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has it untyped
        # It may stay on the stack of another thread.
        self._level: Optional[weakref.ref[OpLevel]] = weakref.ref(level)
        self._stops = weakref.ref(stops)
        self._captures = captures

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        captures = self._captures
        call = None if captures is None else captures.begin(func, args, kwargs)
        out = func(*args, **kwargs)
        level = None if self._level is None else self._level()
        if level is not None and level.has_incidents:
            if captures is not None:
                captures.end(call, out)
            stops = self._stops() if level.judge_now() else None
            if stops is not None:
                stops()
            if captures is not None:
                captures.keep()
        return out

    def open(self) -> None:
        """Puts it on this thread's stack."""
        self.__enter__()  # type: ignore[no-untyped-call]  # torch has it untyped

    def close(self) -> None:
        """Takes it off, from under any other; on another thread's stack it stays, and does
        nothing. Idempotent.
        """
        self._level = self._captures = None
        take_off(self)
