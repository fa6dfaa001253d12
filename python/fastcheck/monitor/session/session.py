"""The session of one installed monitor: its steps, and the tensors that are read into its rings.
The records are passed to the event store: at once on the CPU, through the drain elsewhere.

A step is open from its first forward (or gradient) until something closes it; the step index moves
on with the next forward or gradient after that, so that several optimizers that step one after the
other belong to one step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Callable, Optional

import numpy as np
import torch

from fastcheck.backends.backend import Observe
from fastcheck.backends.portable.traversal import dtype_and_order
from fastcheck.backends.table import backend_for
from fastcheck.calls.module_calls import Call, ModuleNode
from fastcheck.calls.recorder import make_lock, make_recorder
from fastcheck.calls.stored import StoredTensors
from fastcheck.record.format import RECORD_DTYPE, nonfinite
from fastcheck.ring.device import DeviceRing, Segment
from fastcheck.ring.host import (
    ELSEWHERE,
    IS_NEW,
    NEW_STREAM,
    NO_TOKEN,
    UNKNOWN_DEVICE,
    UNREAD,
    HostRing,
    identity_of,
    make_reader,
    new_cursor,
)
from fastcheck.utils.torch.readable import are_on_host
from fastcheck.utils.torch.seen_tensors import make_seen
from fastcheck.utils.torch.streams import streams_of
from fastcheck.verdict.entries import Entry, Journal, Note, Returned, Seen

from .config import Config
from .drain import Drain, Faults, Part
from .event_store import EventStore
from .overflow_status import StatusReader

if TYPE_CHECKING:
    from fastcheck.calls.recorder import HookRecorder
    from fastcheck.utils.torch.seen_tensors import SeenTensors
    from fastcheck.verdict.step import Step, Tape


import enum
import sys
import threading
import weakref
from numbers import Real
from threading import Thread, current_thread
from types import FrameType
from typing import Protocol

from fastcheck.errors import ConfigError
from fastcheck.log.unobserved import UnreadOp
from fastcheck.record.format import Depth, Flag
from fastcheck.record.site import Site, SiteTable
from fastcheck.utils.torch.own_operators import unobserved
from fastcheck.utils.torch.transforms import innermost_transform
from fastcheck.utils.torch.versions import GradScaler
from fastcheck.verdict.allowed import Allowance, tell_allowances
from fastcheck.verdict.entries import GradientNorm, Loss, LossKnown
from fastcheck.verdict.step import Step

from .derivatives import Derivatives
from .passes import Passes


class Backward:
    """A call of backward() that is, or may be, about the session's models."""

    __slots__ = ("is_alone", "roots")

    def __init__(self, is_alone: bool, roots: Sequence[torch.Tensor]) -> None:
        #: No other one was under way at any time: the gradients that have come are from this one.
        self.is_alone = is_alone
        #: The tensors that it was called on. Their graph is whole until it runs.
        self.roots = roots


class Backwards:
    """Every method expects the session's lock to be held. A backward() that begins on another
    thread waits for it, so what is answered holds as long as the lock is held.
    """

    def __init__(self) -> None:
        # In the last step in which any did.
        self._callers: set[Thread] = set()
        self._called_in = -1
        self._trainers: set[Thread] = set()
        self._under_way: dict[Thread, Backward] = {}
        #: What is kept of the graphs of this step.
        self.derivatives = Derivatives()

    def called(self, step: int) -> None:
        """This thread calls a model, in the step of this index."""
        if step != self._called_in:
            self._called_in = step
            self._callers.clear()
        self._callers.add(current_thread())

    @property
    def is_foreign(self) -> bool:
        """Whether only other threads call the models: what this one does is about others, unless
        a graph shows that it is not.
        """
        return bool(self._callers) and current_thread() not in self._callers

    @property
    def owns_gradients(self) -> bool:
        """Whether this thread may look at the gradients of the models: no other one trains them."""
        if len(self._trainers) > 1:
            self._trainers = {thread for thread in self._trainers if thread.is_alive()}
        return self._trainers <= {current_thread()}

    @property
    def roots(self) -> Sequence[torch.Tensor]:
        """What this thread's is called on; empty where none is under way."""
        backward = self._under_way.get(current_thread())
        return () if backward is None else backward.roots

    def began(self, is_ours: bool, roots: Sequence[torch.Tensor]) -> bool:
        """This thread begins one on ``roots``. ``is_ours``: its graph leads to parameters of the
        models. Whether it may be about them.
        """
        thread = current_thread()
        self._under_way.pop(thread, None)
        if not is_ours and thread not in self._callers:
            return False
        self._trainers.add(thread)
        for other in self._under_way.values():
            other.is_alone = False
        self._under_way[thread] = Backward(not self._under_way, roots)
        return True

    def ended(self) -> Optional[Backward]:
        """This thread's is over, by an exception or not. None: it was about other models."""
        return self._under_way.pop(current_thread(), None)


class _Session(Protocol):
    """What is needed of the Session."""

    step: Step

    @property
    def sites(self) -> SiteTable: ...

    @property
    def reads_numbers(self) -> bool: ...

    def read_number(self, number: torch.Tensor, site: int, /) -> int: ...


class StepNumbers:
    """Of one session. Methods expect its lock to be held, and a step that is observed."""

    def __init__(self, session: _Session) -> None:
        self._session = session
        # What was read last, which is the same in most steps.
        self._last: Optional[tuple[Sequence[float], torch.Tensor]] = None

    def loss_scale(self, scale: Any) -> None:
        """The loss of this step is multiplied by ``scale``, a number or a tensor."""
        with unobserved():
            own = scale.detach().clone() if _is_tensor(scale) else float(scale)
        self._session.step.update.scale = own
        self._read(scale, Site("", "", "optimizer", "loss_scale", 0, "loss scale"))

    def found_inf(self, word: torch.Tensor) -> int:
        """What a GradScaler has found in the gradients of one device; the number of its record."""
        site = Site("", "GradScaler", "optimizer", "found_inf", 0, "found_inf")
        return self._session.read_number(word, self._session.sites.intern(site))

    def skipped(self, word: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Whether the optimizer is about to skip its update: 1.0 or 0.0, on its device."""
        site = Site(
            "", type(optimizer).__name__, "optimizer", "skipped_update", 0, "skipped update"
        )
        self._session.read_number(word, self._session.sites.intern(site))

    def learning_rates(self, optimizer: torch.optim.Optimizer) -> None:
        """Those of the groups, as the optimizer is about to use them."""
        kind = type(optimizer).__name__
        rates: list[Any] = [group.get("lr") for group in optimizer.param_groups]
        site = Site("", kind, "optimizer", "learning_rate", 0, "lr")
        elsewhere = [rate for rate in rates if _is_tensor(rate) and not rate.is_cpu]
        here = [float(r) for r in rates if isinstance(r, Real) or (_is_tensor(r) and r.is_cpu)]
        if here:
            self._read(here, site)
        for rate in elsewhere:
            self._read(rate, site)

    def _read(self, number: Any, site: Site) -> None:
        session = self._session
        if not session.reads_numbers:
            return
        if not _is_tensor(number):
            values: Sequence[float] = number if isinstance(number, list) else [float(number)]
            if self._last is None or self._last[0] != values:
                with unobserved():
                    self._last = values, torch.tensor(values, dtype=torch.float64, device="cpu")
            number = self._last[1]
        if number.is_cpu or streams_of(number.device) is not None:
            session.read_number(number, session.sites.intern(site))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


_PIPELINING = "torch.distributed.pipelining.stage"
# Of torch 2.5 to 2.12, and of later ones.
_FUNCTIONS = frozenset(
    ("_shape_inference", "_forward_metadata_inference", "_backward_metadata_inference")
)


def is_dry_run() -> bool:
    """Whether this thread is within a pipeline stage's inference of shapes."""
    if _PIPELINING not in sys.modules:
        return False
    frame: Optional[FrameType] = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _FUNCTIONS and frame.f_globals.get("__name__") == _PIPELINING:
            return True
        frame = frame.f_back
    return False


# A served model never closes a step: what is remembered of it is renewed at this size.
_MAX_SEEN = 65536


class Removal(enum.IntEnum):
    """Why a session is over; 0: it is not."""

    NO = 0
    DONE = 1
    #: It is that of the process which this one was forked from.
    FORKED = 2


class Reading:
    """Reads tensors of the host, and remembers what was read. ``has_excluded``: some modules are
    not observed.
    """

    def __init__(
        self,
        nodes: Sequence[ModuleNode],
        has_excluded: bool,
        depth: Depth,
        when_full: Callable[[], None],
        lock: Any,
    ) -> None:
        self.stored = StoredTensors(nodes)
        self.has_excluded = has_excluded
        self.cursor = new_cursor()
        self.host = HostRing(depth, when_full=when_full, cursor=self.cursor)
        self.seen: SeenTensors = make_seen()
        self.reader = make_reader(self.seen, self.host)
        self.recorder: HookRecorder = make_recorder(self.reader, self.cursor, lock)


class Rings:
    """The rings of a session's devices."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.of: dict[torch.device, DeviceRing] = {}
        self.overflow = StatusReader(session)
        # From the first tensor that is not on the CPU on: what is read is judged when the drain
        # brings it.
        self.is_deferred = False
        self.settles_calls = False

    def ring_of(self, device: torch.device) -> DeviceRing:
        """The ring of a device, which is made for its first tensor."""
        ring = self.of.get(device)
        if ring is None:
            streams, session = streams_of(device), self._session
            if streams is None:
                raise RuntimeError(f"torch.{device.type} has no streams and events")
            with torch.inference_mode(False):
                ring = DeviceRing(streams, backend_for(device), session.config.depth)
            self.of[device] = ring
            self.overflow.add(device, ring.backend)
            if not self.is_deferred:
                # What the ring of the host holds has been judged.
                session.collect()
                self.is_deferred = True
                session.recorder.redirect(session.step.journal.entries)
                if session.config.sync == "call":
                    self.settles_calls = True
                    session.recorder.settle()
        return ring

    def cut(self) -> tuple[list[np.ndarray], list[tuple[DeviceRing, Segment]]]:
        """What was read until now: the records that are here, and those in flight."""
        records: list[np.ndarray] = []
        segments = []
        for ring in self.of.values():
            early, in_flight = ring.cut()
            records += early
            segments += [(ring, segment) for segment in in_flight]
        return records, segments


def _by_device(
    tensors: Sequence[torch.Tensor], sites: Sequence[int], roles: Sequence[str]
) -> Iterator[tuple[torch.device, Sequence[torch.Tensor], Sequence[int], Sequence[str]]]:
    """Those of one device after the other."""
    if tensors and are_on_host(tensors):
        yield tensors[0].device, tensors, sites, roles
        return
    by_device: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(index)
    for device, chosen in by_device.items():
        part, numbers = [tensors[i] for i in chosen], [sites[i] for i in chosen]
        yield device, part, numbers, [roles[i] for i in chosen]


class Session:
    """The state of one monitor: its steps, and what it reads. Every method expects ``lock`` to be
    held.
    """

    #: Whether what it observes includes models that install() was not given.
    observes_all_models = False
    #: Whether the tensors of captured graphs are read.
    reads_captured_graphs = True

    def __init__(
        self,
        config: Config,
        event_store: EventStore,
        nodes: Sequence[ModuleNode],
        has_excluded: bool,
    ) -> None:
        self.config = config
        self.lock = make_lock()
        self.event_store = event_store
        self.faults = Faults(self)
        self.drain = Drain(self.event_store, config.stop.max_lag, self.faults)
        self.reading = Reading(nodes, has_excluded, config.depth, self._make_room, self.lock)
        self.rings = Rings(self)
        self.step = self.new_step(0)
        self.removed = Removal.NO
        self.is_active: bool = config.observes(0)
        self.is_closed = False
        # monitor.step() was called: nothing else closes a step any more.
        self.is_explicit = False
        # While a graph is captured: what the hooks see is written down for its replays.
        self.tape: Optional[Tape] = None
        self.backwards = Backwards()
        self.passes = Passes()
        tell_allowances(self)

    @property
    def sites(self) -> SiteTable:
        return self.event_store.sites

    @property
    def recorder(self) -> HookRecorder:
        return self.reading.recorder

    @property
    def next_seq(self) -> int:
        """Sequence numbers start at 0 when the monitor is installed and never repeat."""
        return self.reading.cursor.seq

    @next_seq.setter
    def next_seq(self, value: int) -> None:
        self.reading.cursor.seq = value

    def new_step(self, index: int, first_seq: int = 0) -> Step:
        """A step that begins at this sequence number."""
        return self.event_store.new_step(index, first_seq, self.read_stored)

    # What the hooks saw

    def read(
        self, tensor: torch.Tensor, site: int, call: int, flags: int, any_dtype: bool = False
    ) -> int:
        """Reads a tensor unless it was read before: UNREAD, or bits and a token (HookReader).

        IS_BAD is only set for what was read on the host, and means nothing where the drain brings
        the records. A tensor that the kernel refuses (its memory was freed, say) passes unread, and
        its site with it from then on.
        """
        host, seq = self.reading.host, self.next_seq
        index = self.step.index
        if site in self.faults.off_sites:
            self.reading.seen.add(tensor, NO_TOKEN)
            return UNREAD
        try:
            code = self.reading.reader.read(
                tensor, host.next_slot(), site, call, index, seq, flags, any_dtype
            )
            if code == UNKNOWN_DEVICE:
                if streams_of(tensor.device) is None:
                    self.faults.unread_devices[tensor.device.type] = None
                    return UNREAD
                self.reading.reader.add_device(tensor)
                return self.read(tensor, site, call, flags, any_dtype)
            if not code & IS_NEW or code < 0:
                return code
            if code & ELSEWHERE:
                if not self.read_elsewhere(tensor, code, site, call, flags):
                    return UNREAD
            else:
                host.used += 1
        except Exception as error:
            self.on_unreadable(tensor, site, error)
            return UNREAD
        self.next_seq = seq + 1
        return code

    def read_elsewhere(
        self, tensor: torch.Tensor, code: int, site: int, call: int, flags: int
    ) -> bool:
        """The second half of read(), of a tensor that isn't on the CPU. False: it was refused."""
        try:
            identity = (self.next_seq, self.step.index, call, site, flags, *identity_of(code))
            ring = self.rings.ring_of(tensor.device)
            ring.observe(tensor, identity, not code & NEW_STREAM, self.observe_for(site))
            rows = ring.next_rows()
            if rows is not None:
                self.recorder.set_target(*rows)
        except Exception as error:
            self.on_unreadable(tensor, site, error)
            return False
        return True

    def observe_for(self, site: int) -> Optional[Observe]:
        """What reads a tensor of this site in the place of its backend's observe(); None: that."""
        return None

    def on_unreadable(self, tensor: torch.Tensor, site: int, error: Exception) -> None:
        """A tensor could not be read, and is remembered under the number that the next record will
        have.
        """
        self.reading.seen.clear()
        self.reading.seen.add(tensor, NO_TOKEN)
        self.switch_off(site, error)

    def observe(
        self, tensor: torch.Tensor, site: int, call: int, flags: int
    ) -> tuple[int, Optional[bool]]:
        """Reads a tensor: the sequence number of its record, and whether it holds anything
        non-finite; None when that is not known yet.
        """
        seq, step = self.next_seq, self.step.index
        if tensor.is_cpu:
            is_bad = self.reading.host.observe(tensor, site, call, step, seq, flags)
            self.next_seq = seq + 1
            return seq, None if self.rings.is_deferred else is_bad
        ring = self.rings.ring_of(tensor.device)
        ring.observe(tensor, (seq, step, call, site, flags, *dtype_and_order(tensor)))
        self.next_seq = seq + 1
        return seq, None

    def saw(self, entry: Seen, is_bad: Optional[bool]) -> None:
        """What was just read is judged if it is non-finite: now, or when its record arrives."""
        if is_bad is None:
            self.step.journal.entries.append(entry)
        elif is_bad:
            record = self.reading.host.last()
            with self.event_store.lock:
                self.event_store.judge(self.step, entry, {int(record["seq"]): record})

    def observe_list(
        self,
        tensors: Sequence[torch.Tensor],
        sites: Sequence[int],
        roles: Sequence[str],
        flags: int,
        kind: Callable[..., Seen],
        *fields: Any,
    ) -> None:
        """observe() and saw() of many tensors, in one call for each device, with the entry
        ``kind(first_seq, roles, *fields)``.
        """
        for device, part, numbers, part_roles in _by_device(tensors, sites, roles):
            entry = kind(self.next_seq, part_roles, *fields)
            found = self.read_list(device, part, numbers, flags)
            if self.rings.is_deferred:
                self.step.journal.entries.append(entry)
            elif found:
                with self.event_store.lock:
                    self.collect()  # the history has to show when a stored tensor was last finite
                    bad = {int(record["seq"]): record for record in found}
                    self.event_store.judge(self.step, entry, bad)

    def read_list(
        self,
        device: torch.device,
        tensors: Sequence[torch.Tensor],
        sites: Sequence[int],
        flags: int,
    ) -> list[np.void]:
        """Reads tensors of one device; the records that are non-finite, as far as they are here."""
        first, step = self.next_seq, self.step.index
        found: list[np.void] = []
        if device.type == "cpu":
            for records in self.reading.host.observe_list(tensors, sites, step, first, flags):
                found.extend(records)
        else:
            self.rings.ring_of(device).observe_list(tensors, sites, step, first, flags)
        self.next_seq = first + len(tensors)
        return found

    def read_stored(self, node: ModuleNode) -> Iterator[tuple[np.void, str]]:
        """In the middle of a verdict: the records that are non-finite, and the roles, of what a
        module and its submodules store. Read now on the CPU; on a device, where this is called
        later, by the last reading.
        """
        batch = self.reading.stored.within(node)
        if self.rings.is_deferred:
            records = self.event_store.archive.history.latest_of(set(batch.sites))
        else:
            with self.lock:
                records = self._read_now(batch.tensors, batch.sites)
        roles = dict(zip(batch.sites, batch.roles))
        for record in records[nonfinite(records)] if len(records) else ():
            yield record.copy(), roles[int(record["site"])]

    def _read_now(self, tensors: Sequence[torch.Tensor], sites: Sequence[int]) -> np.ndarray:
        """Reads tensors of the host; the records that are non-finite."""
        host = [i for i, tensor in enumerate(tensors) if tensor.is_cpu]
        part, numbers = [tensors[i] for i in host], [sites[i] for i in host]
        found = list(
            self.reading.host.observe_list(part, numbers, self.step.index, self.next_seq, 0)
        )
        self.next_seq += len(part)
        return np.concatenate(found) if found else np.zeros(0, RECORD_DTYPE)

    def call_ended(self, call: Call, is_complete: bool, ended_by: str = "") -> None:
        """As Returned has it. Nothing has to be done while nothing was found."""
        returned = Returned(call, is_complete, ended_by)
        if self.rings.is_deferred:
            self.step.journal.entries.append(returned)
        else:
            with self.event_store.lock:
                self.event_store.judge(self.step, returned)

    def note(self, function: Callable[..., Any], *args: Any) -> None:
        """``function(*args)`` of the event store is due when all that was read so far is judged."""
        self.due(Note(function, *args))

    def due(self, entry: Entry) -> None:
        """An entry that matters even where nothing that was read is non-finite."""
        if self.rings.is_deferred:
            self.step.journal.add_due(entry)
            return
        with self.event_store.lock:
            self.collect()
            self.event_store.judge(self.step, entry)

    @property
    def follows_gap(self) -> bool:
        """Steps before this one passed unread."""
        return self.config.every > 1 and self.step.index > 0

    # From the rings to the event store

    def collect(self) -> None:
        """Takes in what is on the host already, and waits for nothing."""
        with self.event_store.lock:
            if self.rings.is_deferred:
                self.drain.process()
            else:
                self.event_store.archive.history.add(self.reading.host.take())

    def flush(self) -> None:
        """Waits for the devices, and takes in everything."""
        if self.rings.is_deferred:
            self.submit()
            self.drain.wait()
        self.collect()

    def settle_call(self) -> None:
        """The end of a hook, if ``settles_calls``: with sync="call" nothing is left open behind
        it.
        """
        self.submit()
        self.drain.wait()

    def settle_update(self) -> None:
        """An optimizer is about to step: with sync="step" it waits for the verdicts."""
        if self.rings.is_deferred and self.config.sync != "never":
            self.submit()
            self.drain.wait()

    @property
    def rereads_stored(self) -> bool:
        """Whether each step begins with what the model stores: where a verdict can neither wait for
        the reading before the update, nor read in its middle.
        """
        return self.rings.settles_calls

    def submit(self, closes_step: bool = False) -> None:
        step = self.step
        journal, step.journal = step.journal, Journal()
        if self.tape is not None:
            self.tape.take(step, journal, closes_step)
            return
        self.recorder.redirect(step.journal.entries)
        self.recorder.clear_target()
        records = [self.reading.host.take()]
        early, segments = self.rings.cut()
        self.drain.submit(Part(step, journal, records + early, segments, closes_step))

    def _make_room(self) -> None:
        if self.rings.is_deferred:
            self.submit()
            return
        with self.event_store.lock:
            self.collect()
            self.event_store.make_room(self.step)

    # Trouble

    def switch_off(self, site: int, error: Exception) -> None:
        """A site can't be read: it is left out from now on, with one warning."""
        self.faults.off_sites.add(site)
        self.recorder.close()
        self.report_internal_error(str(self.sites[site]), error)

    def report_internal_error(self, where: str, error: Exception) -> None:
        """Warns once that fastcheck itself failed at ``where``, which the caller has switched
        off.
        """
        self.faults.report(where, error)
        self.faults.settle()

    # Steps

    def allow(self, allowances: list[Allowance]) -> None:
        """What is observed from now on may be non-finite where one of these covers it. Takes the
        lock itself.
        """
        with self.lock:
            try:
                if not self.removed:
                    self.note(self.event_store.allow, allowances)
            except Exception as error:
                self.report_internal_error("allow_nonfinite()", error)

    @property
    def finds_operators(self) -> bool:
        """Whether a stop will look for the operator in what is kept of the step."""
        config = self.config
        is_wanted = config.level == "module" and config.stop.find_operator and config.may_stop
        return is_wanted and self.tape is None

    @cached_property
    def numbers(self) -> StepNumbers:
        """Reads the numbers of the open step."""
        return StepNumbers(self)

    def open_recorder(self) -> None:
        """The step is open, and what the model stores was read: until something else is to be done
        the hooks may go their short way.
        """
        if not self.is_active or self.is_closed or self.removed or self.faults.off_sites:
            return
        if (
            self.tape is not None or innermost_transform() is not None
        ):  # it would leave wrapped tensors unread
            return
        step = self.step
        self.recorder.open(
            step.index,
            step.calls.add,
            step.findings.all,
            step.journal.entries if self.rings.is_deferred else None,
            step.gradients,
            self.follows_gap,
            int(Flag.SCALED) if self.is_scaled else 0,
        )

    def rest_recorder(self) -> None:
        """The step is not observed: its hooks are to take no time, but those of outermost calls."""
        is_module_level = self.config.level == "module" and self.tape is None
        if is_module_level and not self.is_closed and not self.config.observes(self.step.index):
            self.recorder.rest()

    # Steps

    def begin_pass(self) -> None:
        """A forward enters the observed modules from outside."""
        self.begin_step_if_closed()
        self.backwards.called(self.step.index)
        self.apply_pause()
        self.passes.began()
        if len(self.reading.seen) > _MAX_SEEN:
            self.reading.seen.clear()
        if len(self.step.journal.entries) > _MAX_SEEN:
            self.submit()
        if not self.rings.is_deferred:
            with self.event_store.lock:
                self.event_store.renew(self.step)
        self.recorder.close()

    def end_pass(self) -> None:
        """A forward that no backward will follow has left the observed modules."""
        if self.rings.is_deferred and not len(self.drain):
            self.submit()

    def begin_step_if_closed(self) -> None:
        """The first forward or gradient after a step was closed opens the next one."""
        if not self.is_closed:
            return
        step = self.step
        self.note(self.event_store.end, step)
        if self.rings.is_deferred:
            self.submit()
        for handle in step.leaf_handles:
            handle.remove()
        self.reading.seen.clear()
        self.backwards.derivatives.clear()
        if step.update.count > step.update.guarded_count or step.update.is_partial:
            self.event_store.archive.updated_steps.append(step.index)
        self.step = self.new_step(step.index + 1, self.next_seq)
        self.is_closed = False
        # On a device what a step held comes out in one of the next three.
        self.passes.drop_before(self.step.index - 3 * self.rings.is_deferred)
        self.is_active = self.config.observes(self.step.index)

    def let_go(self) -> None:
        """No stop will ask any more for what is held of calls and of graphs."""
        self.passes.drop_before(self.step.index + 1)
        self.backwards.derivatives.clear()

    def begin_at(self, step: int) -> None:
        """The first step has this number. ConfigError: it is not one, or something was read."""
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ConfigError(f"step must be an int >= 0, got {step!r}")
        if self.next_seq:
            raise ConfigError(
                f"begin_at() was called too late, after {self.next_seq:,} tensors were read"
            )
        self.recorder.close()
        self.step = self.new_step(step)
        self.is_active = self.config.observes(step)

    def pause(self, is_paused: bool) -> None:
        """The passes that begin from now on are not read, or are again."""
        self.passes.are_paused = is_paused

    def apply_pause(self) -> None:
        """A pass begins, and is read or not."""
        is_wanted = self.config.observes(self.step.index) and not self.passes.are_paused
        is_wanted = is_wanted and not is_dry_run()
        if self.is_active and not is_wanted:
            # What it would have decided stays as it is.
            self.note(self.event_store.close, self.step)
        self.is_active = is_wanted

    def close_step(self) -> None:
        """Settles the step and has it written down. May be called again for the same step, after
        more records.
        """
        self.recorder.close()
        self.is_closed = True
        if not self.is_active:
            return
        self.rings.overflow.read()
        self.note(self.event_store.close, self.step)
        if self.rings.is_deferred:
            self.submit(closes_step=True)
            if self.config.sync == "never":
                self.drain.bound()
            else:
                self.drain.wait()

    def end_part(self) -> None:
        """An optimizer has stepped, and another one is going to, in the same step."""
        # Where ranks meet before an update, they do it before the next one too.
        self.step.update.has_met = False
        if self.is_active and self.rings.is_deferred:
            self.submit()
            if self.config.sync != "never":
                self.drain.wait()

    def update_began(self) -> None:
        """An optimizer steps, in this thread, until update_ended() or until it raises."""

    def update_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """The opposite of update_began()."""

    def evaluation_began(self) -> None:
        """The optimizer calls the closure of its step; update_began() once it has returned."""

    def update_uses(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer is about to use its gradients, which carry no loss scale."""

    def backward_began(self, roots: Sequence[torch.Tensor]) -> None:
        """``torch.autograd.backward`` is called on these."""

    def backward_ended(self) -> None:
        """It, or ``torch.autograd.grad``, is over."""

    def loss_given(self, loss: Any) -> None:
        """``monitor.step(loss=)`` was called with these tensors."""

    def unread_ops(self) -> list[UnreadOp]:
        """The operators that op level could not observe."""
        return []

    # The loss, and other numbers

    @property
    def reads_numbers(self) -> bool:
        """Whether the loss and other numbers are read by themselves."""
        return True

    def read_number(self, number: torch.Tensor, site: int) -> int:
        """Reads a tensor that is none of the model; the number of its record."""
        return self.observe(number, site, 0, 0)[0]

    def read_norm(self, norm: torch.Tensor, site: int) -> None:
        """Reads the norm of all gradients, as clipping has computed it."""
        seq, is_bad = self.observe(norm, site, 0, 0)
        self.saw(GradientNorm(seq, self.is_scaled), is_bad)

    def read_loss(self, loss: torch.Tensor, site: int, flags: int) -> None:
        """Reads a loss, under this name too if it is known already: as an output of a module.
        ``flags``: SCALED, if it carries a scale of the user's own, and ANEW.
        """
        token = self.reading.seen.add(loss, self.next_seq)
        if token >= 0:
            self.due(LossKnown(token))
        seq, is_bad = self.observe(loss, site, 0, flags)
        if token < 0:
            self.saw(Loss(seq, bool(flags & Flag.SCALED), threading.get_ident()), is_bad)

    # Loss scaling

    def scaled_by(self, scaler: GradScaler) -> None:
        """The loss of this step was scaled by ``scaler``."""
        self.recorder.close()
        self.step.update.scaler = weakref.ref(scaler)

    @property
    def is_scaled(self) -> bool:
        """Gradients of this step carry a loss scale."""
        return self.step.update.scaler is not None or self.has_own_scale

    @property
    def has_own_scale(self) -> bool:
        """The loss is scaled without a GradScaler."""
        training = self.config.training
        return training.has_own_scaling and training.scaler != 1.0
