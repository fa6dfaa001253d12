"""The session of one installed monitor: its steps, and its level, which reads tensors into its
rings. The records are passed to the event store: at once on the CPU, through the drain elsewhere.

A step is open from its first forward (or gradient) until something closes it; the step index moves
on with the next forward or gradient after that, so that several optimizers that step in turn belong
to one step.
"""

from __future__ import annotations

import contextlib
import enum
import operator
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Callable, Optional

import numpy as np
import torch
from torch.nn import Parameter

from fastcheck.backends.backend import Observe
from fastcheck.backends.portable.traversal import dtype_and_order
from fastcheck.backends.table import backend_for
from fastcheck.calls.module_calls import Call, ModuleNode
from fastcheck.calls.recorder import HookRecorder, make_lock, make_recorder
from fastcheck.calls.stored import StoredTensors, TensorBatch
from fastcheck.errors import ConfigError, plain
from fastcheck.record.event import Event
from fastcheck.record.format import MAX_STEP, RECORD_DTYPE, Depth, Flag, nonfinite
from fastcheck.record.site import SiteTable
from fastcheck.ring.depths import Depths
from fastcheck.ring.device import DeviceRing
from fastcheck.ring.host import (
    ELSEWHERE,
    IS_NEW,
    NEW_STREAM,
    NO_SEQ,
    UNKNOWN_DEVICE,
    UNREAD,
    HostRing,
    identity_of,
    make_reader,
    new_cursor,
)
from fastcheck.ring.segments import Segment
from fastcheck.utils.grouping import grouped
from fastcheck.utils.torch.own_operators import no_grad, unobserved
from fastcheck.utils.torch.readable import are_on_host, can_hold_nonfinite, common_device
from fastcheck.utils.torch.seen_tensors import SeenTensors, make_seen
from fastcheck.utils.torch.streams import streams_of
from fastcheck.utils.torch.transforms import is_transformed
from fastcheck.utils.torch.versions import GradScaler
from fastcheck.verdict import entries
from fastcheck.verdict.allowed import Allowance, tell_allowances
from fastcheck.verdict.step import ReadTensor, Tape

from .config import Config
from .drain import Drain, Faults, StepPart
from .event_store import EventStore, SessionListener
from .level import Level
from .overflow_status import StatusReader
from .passes import Backwards, Passes, is_dry_run

_HOST = torch.device("cpu")
_SCALED = int(Flag.SCALED)
# A served model never closes a step: what is remembered of it is renewed at this size.
_MAX_SEEN = 65536


class Removal(enum.IntEnum):
    """The reason why a session is over; 0: it is not."""

    NO = 0
    DONE = 1
    #: It is that of the process which this process was forked from.
    FORKED = 2


class ModuleLevel(Level):
    """Reads the inputs and outputs of modules, gradients, and what modules store."""

    reads_captured_graphs = True

    def __init__(self, session: Session, nodes: Sequence[ModuleNode], has_excluded: bool) -> None:
        self.session = session
        self.stored = StoredTensors(nodes)
        self.has_excluded = has_excluded
        self.cursor = new_cursor()
        self.host = HostRing(session.rings.depths, when_full=self._make_room, cursor=self.cursor)
        self.seen: SeenTensors = make_seen()
        self.reader = make_reader(self.seen, self.host)
        # The number of the next record when the drain was handed what was read until then.
        self._submitted = 0
        self.recorder: HookRecorder = make_recorder(self.reader, self.cursor, session.lock)

    def _set_next_seq(self, value: int) -> None:
        self.cursor.seq = value

    # Their getters run no line of Python: each step asks for the number many times.
    next_seq = property(operator.attrgetter("cursor.seq"), _set_next_seq)
    reads_numbers = True

    def read(
        self, tensor: torch.Tensor, site: int, call: int, flags: int, any_dtype: bool = False
    ) -> int:
        """IS_BAD is only set for what was read on the host, and means nothing where the drain
        brings the records. A tensor that the kernel refuses (its memory was freed, say) passes
        unread, and its site with it from then on.
        """
        host, seq = self.host, self.cursor.seq
        session = self.session
        if site in session.faults.off_sites:
            self.seen.add(tensor, NO_SEQ)
            return UNREAD
        try:
            code = self.reader.read(
                tensor, host.next_slot(), site, call, session.step.index, seq, flags, any_dtype
            )
            if code == UNKNOWN_DEVICE:
                if streams_of(tensor.device) is None:
                    session.faults.unread_devices[tensor.device.type] = None
                    return UNREAD
                self.reader.add_device(tensor)
                return self.read(tensor, site, call, flags, any_dtype)
            if not code & IS_NEW or code < 0:
                return code
            if code & ELSEWHERE:
                if not self.read_elsewhere(tensor, code, site, call, flags):
                    return UNREAD
            else:
                self.cursor.slot += 1
        except Exception as error:
            self.on_unreadable(tensor, site, error)
            return UNREAD
        self.cursor.seq = seq + 1
        return code

    def read_elsewhere(
        self, tensor: torch.Tensor, code: int, site: int, call: int, flags: int
    ) -> bool:
        """The second half of read(), of a tensor that isn't on the CPU. False: it was refused."""
        if code & NEW_STREAM:
            self.recorder.read_waiting()  # on the stream where it was seen
        try:
            seq, step = self.cursor.seq, self.session.step.index
            identity = (seq, step, call, site, flags, *identity_of(code))
            ring = self.session.rings.ring_of(tensor.device)
            ring.observe(tensor, identity, not code & NEW_STREAM, self.observe_for(site))
            rows = ring.next_rows()
            if rows is not None:
                self.recorder.set_target(*rows)
        except Exception as error:
            self.on_unreadable(tensor, site, error)
            return False
        return True

    def let_wait(self, device_type: str) -> None:
        self.recorder.let_wait(device_type)

    def set_depth(self, depth: int) -> None:
        self.reader.set_depth(depth)

    def read_waiting(
        self, tensors: Sequence[torch.Tensor], identities: np.ndarray, changed: Sequence[int]
    ) -> None:
        """Reads what has waited, all of one device, on the current stream. ``identities``: a row
        for each. ``changed``: the numbers of those that were overwritten meanwhile, which have no
        record.
        """
        session = self.session
        session.leave_unread(changed)
        if not tensors:
            return
        try:
            session.rings.ring_of(tensors[0].device).observe_each(tensors, identities)
        except BaseException as error:
            session.leave_unread(identities[:, 0].tolist())
            if not isinstance(error, Exception):
                raise  # an interrupt is the user's
            self.recorder.let_wait(None)
            session.report_internal_error("small tensors together", error)

    def observe_for(self, site: int) -> Optional[Observe]:
        """The function that reads a tensor of this site in the place of its backend's observe();
        None: that.
        """
        return None

    def on_unreadable(self, tensor: torch.Tensor, site: int, error: Exception) -> None:
        """A tensor could not be read, and is remembered under the number that the next record will
        have.
        """
        self.seen.clear()
        self.seen.add(tensor, NO_SEQ)
        self.session.switch_off(site, error)

    def observe(
        self, tensor: torch.Tensor, site: int, call: int, flags: int
    ) -> tuple[int, Optional[bool]]:
        seq, step = self.cursor.seq, self.session.step.index
        if tensor.is_cpu:
            is_bad = self.host.observe(tensor, site, call, step, seq, flags)
            self.cursor.seq = seq + 1
            return seq, None if self.session.rings.is_deferred else is_bad
        ring = self.session.rings.ring_of(tensor.device)
        ring.observe(tensor, (seq, step, call, site, flags, *dtype_and_order(tensor)))
        self.cursor.seq = seq + 1
        return seq, None

    def saw(self, entry: entries.Seen, is_bad: Optional[bool]) -> None:
        if is_bad is None:
            self.session.step.journal.entries.append(entry)
        elif is_bad:
            record, store = self.host.last(), self.session.event_store
            with store.lock:
                store.judge(self.session.step, entry, {int(record["seq"]): record})

    def observe_list(
        self,
        batch: TensorBatch,
        flags: int = 0,
        kind: Callable[..., entries.Seen] = entries.Stored,
        *fields: Any,
    ) -> None:
        session, store = self.session, self.session.event_store
        device = _HOST if are_on_host(batch.tensors) else common_device(batch.tensors)
        if device is None:
            parts = _by_device(batch)
        else:
            all_of_it = (device, batch.tensors, batch.sites, batch.roles, batch.stored_count)
            parts = [all_of_it] if batch.tensors else []
        for device, part, numbers, part_roles, stored in parts:
            first = self.cursor.seq
            records = self.read_list(device, part, numbers, flags)
            if not (records or session.rings.is_deferred):
                continue
            made: list[entries.Seen] = []
            if stored:
                made.append(entries.Stored(first, part_roles[:stored], threading.get_ident()))
            if len(part_roles) > stored:
                made.append(kind(first + stored, part_roles[stored:], *fields))
            if session.rings.is_deferred:
                session.step.journal.entries += made
                continue
            with store.lock:
                self.collect()  # the history has to show when a stored tensor was last finite
                bad = {int(record["seq"]): record for record in records}
                for entry in made:
                    store.judge(session.step, entry, bad)

    def read_list(
        self,
        device: torch.device,
        tensors: Sequence[torch.Tensor],
        sites: Sequence[int],
        flags: int,
    ) -> list[np.void]:
        """Reads tensors of one device; the records that are non-finite, as far as they are here."""
        first, step = self.cursor.seq, self.session.step.index
        bad_records: list[np.void] = []
        if device == _HOST:  # torch makes a text for device.type each time
            for records in self.host.observe_list(tensors, sites, step, first, flags):
                bad_records.extend(records)
        else:
            self.session.rings.ring_of(device).observe_list(tensors, sites, step, first, flags)
        self.cursor.seq = first + len(tensors)
        return bad_records

    def read_stored(self, node: Optional[ModuleNode]) -> Iterator[ReadTensor]:
        """Reads them now on the CPU; on a device, where this is called later, takes the last
        readings, with those that are finite.
        """
        batch = self.stored.within(node)
        is_deferred = self.session.rings.is_deferred
        if is_deferred:
            records = self.session.event_store.archive.history.latest_of(set(batch.sites))
            given = {}
        else:
            with self.session.lock:
                self.collect()  # what the step has read of them already
                self._add_written(batch, node)
                records = self._read_now(batch.tensors, batch.sites)
            stored = enumerate(zip(batch.sites, batch.roles))
            params = ((site, batch.given(at)) for at, (site, role) in stored if role == "param")
            given = {s: weakref.ref(t) for s, t in params if not isinstance(t, Parameter)}
        roles = dict(zip(batch.sites, batch.roles))
        for record in records if is_deferred or not len(records) else records[nonfinite(records)]:
            site = int(record["site"])
            yield record.copy(), roles[site], given.get(site)

    def _add_written(self, batch: TensorBatch, node: Optional[ModuleNode]) -> None:
        """Adds the buffers of modules in training that are known to have been non-finite when the
        outermost call began, and finite in an earlier step.
        """
        held, history = self.session.passes.held, self.session.event_store.archive.history
        prefix = f"{node.path}." if node is not None and node.path else ""
        for holder, name, copied in held[-1].buffers if held else ():
            owner = self.stored.node_of(holder())
            if owner is None or not f"{owner.path}.".startswith(prefix):
                continue
            site = owner.site("buffer", name, 0)
            with unobserved(), no_grad():
                is_bad = can_hold_nonfinite(copied) and not copied.isfinite().all()
            if is_bad and site not in batch.sites and history.last_finite_step(site) is not None:
                batch.add(copied, site, "buffer")

    def _read_now(self, tensors: Sequence[torch.Tensor], sites: Sequence[int]) -> np.ndarray:
        """Reads tensors of the host; the records that are non-finite."""
        host = [i for i, tensor in enumerate(tensors) if tensor.is_cpu]
        part, numbers = [tensors[i] for i in host], [sites[i] for i in host]
        step = self.session.step.index
        chunks = self.host.observe_list(part, numbers, step, self.cursor.seq, 0)
        self.cursor.seq += len(part)
        return np.concatenate(chunks) if chunks else np.zeros(0, RECORD_DTYPE)

    def open_recorder(self) -> None:
        session, step = self.session, self.session.step
        if session.is_closed or not session.is_active or session.removed:
            return
        # It would leave wrapped tensors unread.
        is_elsewhere = session.tape is not None or is_transformed()
        if session.faults.off_sites or is_elsewhere:
            return
        self.recorder.open(
            step.index,
            step.calls.append,
            step.findings.all,
            step.journal.entries if session.rings.is_deferred else None,
            step.gradients,
            session.follows_gap,
            _SCALED if session.is_scaled else 0,
        )

    def read_number(self, number: torch.Tensor, site: int) -> int:
        return self.observe(number, site, 0, 0)[0]

    def read_norm(self, norm: torch.Tensor, site: int) -> None:
        seq, is_bad = self.observe(norm, site, 0, 0)
        self.saw(entries.GradientNorm(seq, self.session.is_scaled), is_bad)

    def read_loss(self, loss: torch.Tensor, site: int, flags: int, is_scaled: bool) -> None:
        """Reads it under this name too if it is known already: as an output of a module."""
        tensor_seq = self.seen.add(loss, self.cursor.seq)
        if tensor_seq >= 0:
            self.session.due(entries.LossKnown(tensor_seq))
        seq, is_bad = self.observe(loss, site, 0, flags)
        if tensor_seq < 0 and is_bad is not False:
            self.saw(entries.Loss(seq, is_scaled, threading.get_ident()), is_bad)

    def collect(self) -> None:  # with the event store's lock
        session = self.session
        if session.rings.is_deferred:
            session.drain.process()
        elif self.cursor.slot:
            session.event_store.archive.history.add(self.host.take())

    def submit(self, closes_step: bool) -> None:
        # The end of a step follows its close, as a rule without any reading between them.
        has_read, self._submitted = self.cursor.seq != self._submitted, self.cursor.seq
        if has_read:
            self.recorder.read_waiting()
        session, step = self.session, self.session.step
        journal, step.journal = step.journal, entries.Journal()
        if session.tape is not None:
            session.tape.take(step, journal, closes_step)
            return
        self.recorder.redirect(step.journal.entries)
        records = [self.host.take()] if self.cursor.slot else []
        early: list[np.ndarray] = []
        segments: list[tuple[DeviceRing, Segment]] = []
        if has_read:
            self.recorder.clear_target()
            early, segments = session.rings.cut()
        compared = self.recorder.compared
        session.drain.submit(
            StepPart(step, journal, records + early, segments, closes_step, compared)
        )

    def forget(self) -> None:
        self.seen.clear()
        self.host.take()

    def backward_ended(self) -> None:
        self.session.read_waiting()

    def _make_room(self) -> None:
        session = self.session
        if session.rings.is_deferred:
            session.submit()
            return
        with session.event_store.lock:
            self.collect()
            session.event_store.make_room(session.step)

    def pass_began(self, goes_on: bool) -> None:
        session = self.session
        session.passes.generator = torch.default_generator.get_state()
        if not goes_on:  # and the recorder is closed
            return
        if len(self.seen) > _MAX_SEEN:
            self.seen.clear()
        if len(session.step.journal.entries) > _MAX_SEEN:
            session.submit()
        if not session.rings.is_deferred:
            with session.event_store.lock:
                session.event_store.renew(session.step)
                session.event_store.make_room(session.step)
        self.recorder.close()


class Rings(SessionListener):
    """The rings of a session's devices, and how deep a step's records are."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.of: dict[torch.device, DeviceRing] = {}
        self.overflow = StatusReader(session)
        self.depths: Depths = Depths(session.config.depth)
        # After an event, steps up to this one are read whole whatever their number.
        self._whole_until = -1
        if session.config.stats_every > 1:
            session.event_store.listeners.append(self)
        # True from the first tensor that is not on the CPU on: what is read is judged when the
        # drain brings it.
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
                ring = DeviceRing(streams, backend_for(device), self.depths)
            self.of[device] = ring
            self.overflow.add(device, ring.backend)
            if not self.is_deferred:
                # The records that the ring of the host holds have been judged.
                session.collect()
                self.is_deferred = True
                session.recorder.redirect(session.step.journal.entries)
                if session.config.sync == "call":
                    self.settles_calls = True
                    session.recorder.settle()
            if ring.backend.reads_lists_in_one_launch and not self.settles_calls:
                session.level.let_wait(device.type)
        return ring

    def depth_at(self, step: int) -> int:
        """The depth to which this step is read."""
        is_whole = step % self._session.config.stats_every == 0 or step <= self._whole_until
        return self.depths.whole if is_whole else int(Depth.HEALTH)

    def counted(self, event: Event) -> None:
        self._read_whole()

    def warned(self, step: int, kind: str, text: str) -> None:
        self._read_whole()

    def _read_whole(self) -> None:
        self._whole_until = self._session.step.index + self._session.config.stats_every

    def set_depth(self, depth: int) -> None:
        """Sets the depth of what is read from now on."""
        if depth != self.depths.now:
            self.depths.now = depth
            self._session.level.set_depth(depth)

    def cut(self) -> tuple[list[np.ndarray], list[tuple[DeviceRing, Segment]]]:
        """Cuts off what was read until now: the records that are here, and those in flight."""
        records: list[np.ndarray] = []
        segments = []
        for ring in self.of.values():
            early, in_flight = ring.cut()
            records += early
            segments += [(ring, segment) for segment in in_flight]
        return records, segments


def _by_device(
    batch: TensorBatch,
) -> list[tuple[torch.device, Sequence[torch.Tensor], Sequence[int], Sequence[str], int]]:
    """The tensors, sites and roles of one device after the other, and how many modules store."""
    tensors, sites, roles = batch.tensors, batch.sites, batch.roles
    parts: list[tuple[torch.device, Sequence[torch.Tensor], Sequence[int], Sequence[str], int]] = []
    for device, chosen in grouped(range(len(tensors)), lambda i: tensors[i].device).items():
        part, numbers = [tensors[i] for i in chosen], [sites[i] for i in chosen]
        stored = sum(i < batch.stored_count for i in chosen)
        parts.append((device, part, numbers, [roles[i] for i in chosen], stored))
    return parts


class Session:
    """The state of one monitor: its steps, and what it reads. Every method expects ``lock`` to be
    held.
    """

    def __init__(
        self, config: Config, event_store: EventStore, make_level: Callable[[Session], Level]
    ) -> None:
        self.config = config
        self.lock = make_lock()
        self.event_store = event_store
        self.faults = Faults(self)
        self.drain = Drain(self.event_store, config.stop.max_lag, self.faults)
        self.rings: Rings = Rings(self)
        self.level = make_level(self)
        self.step = event_store.new_step(0, 0, self.level.read_stored)
        self.removed = Removal.NO
        self.is_active: bool = self.step.is_observed
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

    recorder = property(operator.attrgetter("level.recorder"))

    def _set_next_seq(self, value: int) -> None:
        self.level.next_seq = value

    #: Sequence numbers start at 0 when the monitor is installed and never repeat.
    next_seq = property(operator.attrgetter("level.next_seq"), _set_next_seq)

    # Results of the hooks

    def call_ended(self, call: Call, is_complete: bool, ended_by: str = "") -> None:
        """Notes that a call has ended, as Returned has it. Nothing has to be done while nothing was
        found.
        """
        returned = entries.Returned(call, is_complete, ended_by)
        if self.rings.is_deferred:
            self.step.journal.entries.append(returned)
        else:
            with self.event_store.lock:
                self.event_store.judge(self.step, returned)

    def note(self, function: Callable[..., Any], *args: Any) -> None:
        """``function(*args)`` is due when all that was read so far is judged."""
        self.due(entries.Note(function, *args))

    def due(self, *written: entries.Entry) -> None:
        """Notes entries that matter even where nothing that was read is non-finite."""
        if self.rings.is_deferred:
            self.level.gather()
            self.step.journal.add_due(*written)
            return
        with self.event_store.lock:
            self.level.collect()
            for entry in written:
                self.event_store.judge(self.step, entry)

    @property
    def is_open(self) -> bool:
        """A step is open, and is read."""
        return self.is_active and not self.is_closed

    @property
    def follows_gap(self) -> bool:
        """Steps before this step passed unread."""
        return self.config.every > 1 and self.step.index > 0

    def read_waiting(self) -> None:
        """A pass has ended: reads the small tensors that wait for each other."""
        self.recorder.read_waiting()
        if self.tape is not None:
            self.tape.read_waiting()

    def leave_unread(self, seqs: Sequence[int]) -> None:
        """Tensors with these numbers were noted, and have no record."""
        self.faults.unread_count += len(seqs)
        self.step.journal.unread += seqs

    # Records from the rings to the event store

    def collect(self) -> None:
        """Takes in what is on the host already, and waits for nothing."""
        with self.event_store.lock:
            self.level.collect()

    def flush(self) -> None:
        """Waits for the devices, and takes in everything."""
        if self.rings.is_deferred:
            self.submit()
            self.drain.wait()
        self.collect()
        self.level.flushed()

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

    def submit(self, closes_step: bool = False) -> None:
        """Hands what was read until now, and the journal, to the drain."""
        self.level.submit(closes_step)

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
        """Lets what is observed from now on be non-finite where one of these covers it. Takes the
        lock itself.
        """
        with self.lock:
            try:
                if not self.removed:
                    self.note(self.event_store.allow, allowances)
            except Exception as error:
                self.report_internal_error("allow_nonfinite()", error)

    def rest_recorder(self) -> None:
        """The step is not observed: its hooks are to take no time, but those of outermost calls."""
        is_module_level = self.config.level == "module" and self.tape is None
        if is_module_level and not self.is_closed and not self.step.is_observed:
            self.recorder.rest()

    # Steps

    def begin_pass(self) -> None:
        """A forward enters the observed modules from outside."""
        goes_on = not self.is_closed
        self.begin_step_if_closed()
        self.backwards.called(self.step.index)
        self.apply_pause()
        self.level.pass_began(goes_on)

    def end_pass(self) -> None:
        """A forward that no backward will follow has left the observed modules."""
        if self.rings.is_deferred and self.drain.is_idle:
            self.submit()

    def begin_step_if_closed(self) -> None:
        """The first forward or gradient after a step was closed opens the next step."""
        if not self.is_closed:
            return
        step = self.step
        self.due(entries.Moment.ENDED)
        if self.rings.is_deferred:
            self.submit()
        for handle in step.leaf_handles:
            handle.remove()
        self.level.seen.clear()
        is_applied = step.update.count > step.update.guarded_count or step.update.is_partial
        if is_applied and not step.update.is_elsewhere:
            self.event_store.archive.updated_steps.append(step.index)
        store, level = self.event_store, self.level
        self.step = store.new_step(step.index + 1, level.next_seq, level.read_stored)
        self.is_closed = False
        # Tensors on a device that a step held come out in one of the next three steps.
        first = self.step.index - 3 * self.rings.is_deferred
        self.passes.drop_before(first)
        self.backwards.derivatives.drop_before(first)
        self.is_active = self.step.is_observed
        if self.config.stats_every > 1:
            # Each replay of a captured graph decides for itself.
            self.rings.set_depth(
                self.rings.depth_at(self.step.index) if self.tape is None else Depth.HEALTH
            )
        if self.config.level == "op":
            level.step_began()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Sets the monitor aside within a ``with`` statement: it reads and counts nothing. Takes
        the lock itself.
        """
        was = self.removed
        try:
            with self.lock:
                self.removed = Removal.DONE
                self.recorder.close()
            yield
        finally:
            with self.lock:
                self.removed = was

    def let_go(self) -> None:
        """Lets go of calls and graphs, for which no stop will ask any more."""
        self.passes.drop_before(self.step.index + 1)
        self.backwards.derivatives.drop_before(self.step.index + 1)

    def begin_at(self, step: int) -> None:
        """The first step has this number. ConfigError: it is no step's number, or something was
        read.
        """
        step = plain(step)
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= MAX_STEP:
            raise ConfigError(f"step must be an int from 0 to {MAX_STEP}, got {step!r}")
        if self.next_seq:
            raise ConfigError(
                f"begin_at() was called too late, after {self.next_seq:,} tensors were read"
            )
        self.recorder.close()
        self.step = self.event_store.new_step(step, 0, self.level.read_stored)
        self.is_active = self.step.is_observed
        self.rings.set_depth(self.rings.depth_at(step))
        self.level.begin_at(step)

    def pause(self, is_paused: bool) -> None:
        """The passes that begin from now on are not read, or are again. At op level operators are
        not from now on, in a pass or not.
        """
        self.passes.are_paused = is_paused
        if self.config.level == "op":
            self.apply_pause()

    @property
    def reads_passes(self) -> bool:
        """True if a pass that begins now is read, in a step that is."""
        return not self.passes.are_paused and not is_dry_run()

    def apply_pause(self) -> None:
        """A pass begins, and is read or not."""
        is_wanted = self.step.is_observed and self.reads_passes
        if self.is_active and not is_wanted:
            # Findings that the pass would have decided stay as they are.
            self.due(entries.Moment.CLOSED)
        self.is_active = is_wanted
        if self.config.level == "op":
            self.level.set_active(is_wanted)

    def close_step(self) -> None:
        """Settles the step and has it written down. May be called again for the same step, after
        more records.
        """
        with unobserved():
            self.recorder.close()
            self.is_closed = True
            if self.is_active:
                if self.rings.overflow.devices:
                    self.rings.overflow.read()
                self.due(entries.Moment.CLOSED)
                if self.rings.is_deferred:
                    self.submit(closes_step=True)
                    if self.config.sync == "never":
                        self.drain.bound()
                    else:
                        self.drain.wait()
        if self.config.level == "op":
            self.level.step_closed()

    def end_part(self) -> None:
        """An optimizer has stepped, and another optimizer is going to, in the same step."""
        # Ranks that meet before an update do it before the next update too.
        self.step.update.has_met = False
        if self.is_active and self.rings.is_deferred:
            self.submit()
            if self.config.sync != "never":
                self.drain.wait()

    # Loss scaling

    def scaled_by(self, scaler: GradScaler) -> None:
        """The loss of this step was scaled by ``scaler``."""
        self.recorder.close()
        self.step.update.scaler = weakref.ref(scaler)
        self.level.scaled()

    @property
    def is_scaled(self) -> bool:
        """Gradients of this step carry a loss scale."""
        return self.step.update.scaler is not None or self.config.training.has_own_scale
