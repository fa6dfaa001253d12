"""The session: one installed monitor at work. Owns the rings and the step that is open, and tells
the ledger what the hooks saw: at once on the CPU, through the drain on any other device.

A step is open from its first forward (or gradient) until something closes it; the step index moves
on with the next forward or gradient after that, so that several optimizers that step one after the
other belong to one step.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Callable, Optional

import numpy as np
import torch

from ._calls import Call
from ._compat import GradScaler
from ._config import Config
from ._cursor import new_cursor
from ._device import streams_of
from ._device_ring import DeviceRing
from ._drain import Drain, Part
from ._errors import FastcheckError, FastcheckWarning
from ._journal import CallEnded, Journal, ListReading, Note, Reading, Recorded, entries_of
from ._ledger import Ledger
from ._overflow_status import StatusReader
from ._reader import (
    ELSEWHERE,
    IS_NEW,
    NEW_STREAM,
    NO_TOKEN,
    UNKNOWN_DEVICE,
    UNREAD,
    identity_of,
    make_reader,
)
from ._record import RECORD_DTYPE, Flag
from ._recorder import make_lock, make_recorder
from ._ring import HostRing
from ._scaling import ScalingLog
from ._seen import make_seen
from ._site import SiteTable
from .backends import backend_for

if TYPE_CHECKING:
    from ._graph_tape import Tape

__all__ = ["Session"]

# A served model never closes a step: what is remembered of it is renewed at this size.
_MAX_SEEN = 65536


class Session:
    """The state of one monitor. Every method expects ``lock`` to be held, deliver() excepted."""

    def __init__(self, config: Config, sites: SiteTable, rank: int, world_size: int = 1) -> None:
        self.config = config
        self.sites = sites
        self.lock = make_lock()
        self.ledger = Ledger(config, sites, rank, has_other_ranks=world_size > 1)
        self.drain = Drain(self.ledger, config.max_lag, self.trouble, self._last_words)
        self.cursor = new_cursor()
        self.host = HostRing(config.depth, when_full=self._make_room, cursor=self.cursor)
        self.rings: dict[torch.device, DeviceRing] = {}
        self.overflow = StatusReader(self)
        # From the first tensor that is not on the CPU on: what is read is judged when the drain
        # brings it.
        self.is_deferred = False
        self.settles_calls = False
        self.step = self.ledger.new_step(0)
        self.removed = False
        self.is_active = config.observes(0)
        self.is_closed = False
        # Set by the owner: passes that begin now are not to be read.
        self.is_paused = False
        # Set by the owner: monitor.step() was called, and from then on nothing else closes a step.
        self.is_explicit = False
        self.has_excluded = False
        self.seen = make_seen()
        self.reader = make_reader(self.seen, self.host)
        self.recorder = make_recorder(self.reader, self.cursor, self.lock)
        self.scaling = ScalingLog(config.history)
        self.deliver: Callable[[], None] = lambda: None
        # Of the owner too: what is to be done at a step boundary, and when the process ends.
        self.meet: Callable[[], None] = lambda: None
        self.last_words: Callable[[], None] = lambda: None
        # How many ranks stop together; 1: this one decides alone.
        self.world_size = world_size
        # The process knows its watchers weakly, and the user need not keep the Monitor: the hooks
        # on the model hold this session, and it holds the watcher.
        self.watcher: Optional[object] = None
        self.notes: dict[str, None] = {}
        # Sites that could not be read once; they are not tried again.
        self.off_sites: set[int] = set()
        self.unread_devices: dict[str, None] = {}
        # While a graph is captured: what the hooks see is written down for its replays.
        self.tape: Optional[Tape] = None

    @property
    def next_seq(self) -> int:
        """Sequence numbers start at 0 when the monitor is installed and never repeat."""
        return self.cursor.seq

    @next_seq.setter
    def next_seq(self, value: int) -> None:
        self.cursor.seq = value

    def open_recorder(self) -> None:
        """The step is open, and what the model stores was read: until something else is to be done
        the hooks may go their short way.
        """
        if not self.is_active or self.is_closed or self.removed or self.off_sites:
            return
        if self.tape is not None:
            return
        step = self.step
        self.recorder.open(
            step.index,
            step.calls.add,
            step.judge.findings,
            step.journal.entries if self.is_deferred else None,
            step.gradients,
            self.follows_gap,
            int(Flag.SCALED) if self.is_scaled else 0,
        )

    # Steps

    def begin_pass(self) -> None:
        """A forward enters the observed modules from outside."""
        self.begin_step_if_closed()
        self.obey_pause()
        if len(self.seen) > _MAX_SEEN:
            self.seen.clear()
        if len(self.step.journal.entries) > _MAX_SEEN:
            self._submit()
        if not self.is_deferred:
            with self.ledger.lock:
                self.ledger.renew(self.step)
        self.recorder.close()

    def end_pass(self) -> None:
        """A forward that no backward will follow has left the observed modules."""
        if self.is_deferred and not len(self.drain):
            self._submit()

    def begin_step_if_closed(self) -> None:
        """The first forward or gradient after a step was closed opens the next one."""
        if not self.is_closed:
            return
        step = self.step
        self.note(self.ledger.end, step)
        if self.is_deferred:
            self._submit()
        for handle in step.leaf_handles:
            handle.remove()
        self.seen.clear()
        self.step = self.ledger.new_step(step.index + 1)
        self.is_closed = False
        self.is_active = self.config.observes(self.step.index)

    def begin_at(self, step: int) -> None:
        """The first step has this number. Before anything is read."""
        self.step = self.ledger.new_step(step)
        self.is_active = self.config.observes(step)

    def pause(self, is_paused: bool) -> None:
        """The passes that begin from now on are not read, or are again."""
        self.is_paused = is_paused

    def obey_pause(self) -> None:
        """A pass begins, and is read or not."""
        is_wanted = self.config.observes(self.step.index) and not self.is_paused
        if self.is_active and not is_wanted:
            # What it would have decided stays as it is.
            self.note(self.ledger.close, self.step)
        self.is_active = is_wanted

    def close_step(self) -> None:
        """Settles the step and has it written down. May be called again for the same step, after
        more records.
        """
        self.recorder.close()
        self.is_closed = True
        if not self.is_active:
            return
        self.overflow.read()
        self.note(self.ledger.close, self.step)
        if self.is_deferred:
            self._submit(closes_step=True)
            if self.config.sync == "never":
                self.drain.bound()
            else:
                self.drain.wait()

    def update_began(self) -> None:
        """An optimizer steps, in this thread, until update_ended() or until it raises."""

    def update_ended(self) -> None:
        """The opposite of update_began()."""

    def unread(self) -> contextlib.AbstractContextManager[None]:
        """Within it, ops of this thread pass unread where they are read at all."""
        return contextlib.nullcontext()

    # What the hooks saw

    def read(
        self, tensor: torch.Tensor, site: int, call: int, flags: int, any_dtype: bool = False
    ) -> int:
        """Reads a tensor unless that was done before: UNREAD, or bits and a token (``_reader``).

        IS_BAD is only known of what was read on the host, and tells nothing where the drain brings
        the records. A tensor that the kernel refuses (its memory was freed, say) passes unread, and
        its site with it from then on.
        """
        host, seq = self.host, self.next_seq
        index = self.step.index
        if site in self.off_sites:
            self.seen.add(tensor, NO_TOKEN)
            return UNREAD
        try:
            code = self.reader.read(
                tensor, host.next_slot(), site, call, index, seq, flags, any_dtype
            )
            if code == UNKNOWN_DEVICE:
                if streams_of(tensor.device) is None:
                    self.unread_devices[tensor.device.type] = None
                    return UNREAD
                self.reader.know(tensor)
                return self.read(tensor, site, call, flags, any_dtype)
            if not code & IS_NEW or code < 0:
                return code
            if code & ELSEWHERE:
                if not self.read_elsewhere(tensor, code, site, call, flags):
                    return UNREAD
            else:
                host.used += 1
        except Exception as error:
            self.refused(tensor, site, error)
            return UNREAD
        self.next_seq = seq + 1
        return code

    def read_elsewhere(
        self, tensor: torch.Tensor, code: int, site: int, call: int, flags: int
    ) -> bool:
        """The second half of read(), of a tensor that isn't on the CPU. False: it was refused."""
        try:
            identity = (self.next_seq, self.step.index, call, site, flags, *identity_of(code))
            ring = self._ring(tensor.device)
            ring.observe(tensor, identity, not code & NEW_STREAM)
            ring.aim(self.recorder)
        except Exception as error:
            self.refused(tensor, site, error)
            return False
        return True

    def refused(self, tensor: torch.Tensor, site: int, error: Exception) -> None:
        """A tensor could not be read, and is remembered under the number that the next record will
        have.
        """
        self.seen.clear()
        self.seen.add(tensor, NO_TOKEN)
        self.switch_off(site, error)

    def observe(
        self, tensor: torch.Tensor, site: int, call: int, flags: int
    ) -> tuple[int, Optional[bool]]:
        """Reads a tensor: the sequence number of its record, and whether it holds anything
        non-finite; None when that is not known yet.
        """
        seq, step = self.next_seq, self.step.index
        if tensor.is_cpu:
            is_bad = self.host.observe(tensor, site, call, step, seq, flags)
            self.next_seq = seq + 1
            return seq, None if self.is_deferred else is_bad
        ring = self._ring(tensor.device)
        ring.observe(tensor, (seq, step, call, site, flags, *ring.backend.identity(tensor, False)))
        self.next_seq = seq + 1
        return seq, None

    def judge(
        self,
        is_bad: Optional[bool],
        seq: int,
        role: str,
        call: Optional[Call],
        method: Callable[..., None],
        *args: Any,
    ) -> None:
        """What was just read is judged by ``method(judge, finding, *args)`` if it is non-finite:
        now, or when its record arrives.
        """
        if is_bad is None:
            self.step.journal.entries.append(Reading(seq, role, call, method, args))
        elif is_bad:
            record = self.host.last()
            with self.ledger.lock:
                self.ledger.judge(self.step, Reading(seq, role, call, method, args), {seq: record})

    def found(self, recorded: Recorded) -> None:
        """What the recorder read last is non-finite."""
        record = self.host.last()
        with self.ledger.lock:
            for entry in entries_of(recorded):
                self.ledger.judge(self.step, entry, {int(record["seq"]): record})

    def observe_list(
        self,
        tensors: Sequence[torch.Tensor],
        sites: Sequence[int],
        roles: Sequence[str],
        flags: int,
        method: Callable[..., None],
        *args: Any,
    ) -> None:
        """observe() and judge() of many tensors, in one call for each device."""
        by_device: dict[torch.device, list[int]] = {}
        for index, tensor in enumerate(tensors):
            by_device.setdefault(tensor.device, []).append(index)
        for device, chosen in by_device.items():
            part = [tensors[i] for i in chosen]
            numbers = [sites[i] for i in chosen]
            entry = ListReading(self.next_seq, [roles[i] for i in chosen], method, args)
            first, step = self.next_seq, self.step.index
            found: list[np.void] = []
            if device.type == "cpu":
                for records in self.host.observe_list(part, numbers, step, first, flags):
                    found.extend(records)
            else:
                self._ring(device).observe_list(part, numbers, step, first, flags)
            self.next_seq = first + len(part)
            if self.is_deferred:
                self.step.journal.entries.append(entry)
            elif found:
                with self.ledger.lock:
                    bad = {int(record["seq"]): record for record in found}
                    self.ledger.judge(self.step, entry, bad)

    def read_now(self, tensors: Sequence[torch.Tensor], sites: Sequence[int]) -> np.ndarray:
        """Reads tensors of the host in the middle of a verdict; the records that are non-finite."""
        host = [i for i, tensor in enumerate(tensors) if tensor.is_cpu]
        part, numbers = [tensors[i] for i in host], [sites[i] for i in host]
        found = list(self.host.observe_list(part, numbers, self.step.index, self.next_seq, 0))
        self.next_seq += len(part)
        return np.concatenate(found) if found else np.zeros(0, RECORD_DTYPE)

    def call_ended(self, call: Call, is_complete: bool) -> None:
        """All outputs of the call were read; ``is_complete``: there were any, and all could be.
        Nobody has to be told while nothing was found.
        """
        if self.is_deferred:
            self.step.journal.entries.append(CallEnded(call, is_complete))
        else:
            with self.ledger.lock:
                self.ledger.judge(self.step, CallEnded(call, is_complete))

    def note(self, function: Callable[..., Any], *args: Any) -> None:
        """``function(*args)``, of the ledger, is due when all that was read until now is judged."""
        note = Note(function, *args)
        if self.is_deferred:
            self.step.journal.note(note)
            return
        with self.ledger.lock:
            self.collect()
            self.ledger.judge(self.step, note)

    @property
    def follows_gap(self) -> bool:
        """Steps before this one passed unread."""
        return self.config.every > 1 and self.step.index > 0

    # From the rings to the ledger

    def collect(self) -> None:
        """Takes in what is on the host already, and waits for nothing."""
        with self.ledger.lock:
            if self.is_deferred:
                self.drain.process()
            else:
                self.ledger.history.add(self.host.take())

    def flush(self) -> None:
        """Waits for the devices, and takes in everything."""
        if self.is_deferred:
            self._submit()
            self.drain.wait()
        self.collect()

    def settle_call(self) -> None:
        """The end of a hook, if ``settles_calls``: with sync="call" nothing is left open behind
        it.
        """
        self._submit()
        self.drain.wait()

    def settle_update(self) -> None:
        """An optimizer is about to step: with sync="step" it waits for the verdicts."""
        if self.is_deferred and self.config.sync != "never":
            self._submit()
            self.drain.wait()

    @property
    def rereads_stored(self) -> bool:
        """Whether each step begins with what the model stores: where a verdict can neither wait for
        the reading before the update, nor read in its middle.
        """
        return self.settles_calls

    def _submit(self, closes_step: bool = False) -> None:
        step = self.step
        journal, step.journal = step.journal, Journal()
        if self.tape is not None:
            self.tape.take(step, journal, closes_step)
            return
        self.recorder.redirect(step.journal.entries)
        self.recorder.unaim()
        records = [self.host.take()]
        segments = []
        for ring in self.rings.values():
            early, in_flight = ring.cut()
            records += early
            segments += [(ring, segment) for segment in in_flight]
        self.drain.submit(Part(step, journal, records, segments, closes_step))

    def _ring(self, device: torch.device) -> DeviceRing:
        ring = self.rings.get(device)
        if ring is None:
            streams = streams_of(device)
            if streams is None:
                raise RuntimeError(f"torch.{device.type} has no streams and events")
            with torch.inference_mode(False):
                ring = DeviceRing(streams, backend_for(device), self.config.depth)
            self.rings[device] = ring
            self.overflow.add(device, ring.backend)
            if not self.is_deferred:
                # What the ring of the host holds has been judged.
                self.collect()
                self.is_deferred = True
                self.recorder.redirect(self.step.journal.entries)
                if self.config.sync == "call":
                    self.settles_calls = True
                    self.recorder.settle()
        return ring

    def _make_room(self) -> None:
        if self.is_deferred:
            self._submit()
            return
        with self.ledger.lock:
            self.collect()
            if self.ledger.history.is_full:
                self.ledger.store(self.step)
                self.ledger.history.drop_oldest()

    def _last_words(self) -> None:
        """The process ends: no hook will run any more that could raise what is due."""
        if not self.removed:
            try:
                self.last_words()
            except FastcheckError as stop:
                print(f"{type(stop).__module__}.{type(stop).__name__}: {stop}", file=sys.stderr)

    # Trouble

    def switch_off(self, site: int, error: Exception) -> None:
        """A site can't be read: it is left out from now on, which is said once."""
        self.off_sites.add(site)
        self.recorder.close()
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

    def scaled_by(self, scaler: GradScaler) -> None:
        """The loss of this step was scaled by ``scaler``."""
        self.recorder.close()
        self.step.scaler = weakref.ref(scaler)

    @property
    def is_scaled(self) -> bool:
        """Gradients of this step carry a loss scale."""
        own = self.config.has_own_scaling and self.config.scaler != 1.0
        return self.step.scaler is not None or own
