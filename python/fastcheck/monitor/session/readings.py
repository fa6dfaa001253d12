"""SessionReadings: reads a monitor's tensors into its rings, and passes the records to the event
store: at once on the CPU, through the drain on any other device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
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
from fastcheck.ring.cursor import new_cursor
from fastcheck.ring.device import DeviceRing
from fastcheck.ring.host import HostRing
from fastcheck.ring.reader import (
    ELSEWHERE,
    IS_NEW,
    NEW_STREAM,
    NO_TOKEN,
    UNKNOWN_DEVICE,
    UNREAD,
    identity_of,
    make_reader,
)
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

# What is held may come out long after its step; of older ones no update is known.
_UPDATED_STEPS = 1024


class SessionReadings:
    """The state of one monitor, and what it reads. Every method expects ``lock`` to be held."""

    def __init__(
        self,
        config: Config,
        event_store: EventStore,
        nodes: Sequence[ModuleNode],
        world_size: int,
        has_excluded: bool,
    ) -> None:
        self.config = config
        self.sites = event_store.sites
        self.lock = make_lock()
        self.event_store = event_store
        self._stored = StoredTensors(nodes)
        self.faults = Faults(self)
        self.drain = Drain(self.event_store, config.stop.max_lag, self.faults)
        self.cursor = new_cursor()
        self.host = HostRing(config.depth, when_full=self._make_room, cursor=self.cursor)
        self.rings: dict[torch.device, DeviceRing] = {}
        self.overflow = StatusReader(self)
        # From the first tensor that is not on the CPU on: what is read is judged when the drain
        # brings it.
        self.is_deferred = False
        self.settles_calls = False
        self.step = self.new_step(0)
        self.removed = self.is_forked = False
        self.is_active: bool = config.observes(0)
        self.is_closed = False
        # Passes that begin now are not read (pause()).
        self.is_paused = False
        # monitor.step() was called: nothing else closes a step any more.
        self.is_explicit = False
        #: The last steps of which it is known that their update was applied.
        self.updated_steps: deque[int] = deque(maxlen=_UPDATED_STEPS)
        self.has_excluded = has_excluded
        self.seen: SeenTensors = make_seen()
        self.reader = make_reader(self.seen, self.host)
        self.recorder: HookRecorder = make_recorder(self.reader, self.cursor, self.lock)
        # How many ranks stop together; 1: this one decides alone.
        self.world_size = world_size
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
                self.reader.add_device(tensor)
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
            ring = self._ring(tensor.device)
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
        ring.observe(tensor, (seq, step, call, site, flags, *dtype_and_order(tensor)))
        self.next_seq = seq + 1
        return seq, None

    def saw(self, entry: Seen, is_bad: Optional[bool]) -> None:
        """What was just read is judged if it is non-finite: now, or when its record arrives."""
        if is_bad is None:
            self.step.journal.entries.append(entry)
        elif is_bad:
            record = self.host.last()
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
        by_device: dict[torch.device, list[int]] = {}
        for index, tensor in enumerate(tensors):
            by_device.setdefault(tensor.device, []).append(index)
        for device, chosen in by_device.items():
            part = [tensors[i] for i in chosen]
            numbers = [sites[i] for i in chosen]
            entry = kind(self.next_seq, [roles[i] for i in chosen], *fields)
            found = self.read_list(device, part, numbers, flags)
            if self.is_deferred:
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
            for records in self.host.observe_list(tensors, sites, step, first, flags):
                found.extend(records)
        else:
            self._ring(device).observe_list(tensors, sites, step, first, flags)
        self.next_seq = first + len(tensors)
        return found

    def read_stored(self, node: ModuleNode) -> Iterator[tuple[np.void, str]]:
        """In the middle of a verdict: the records that are non-finite, and the roles, of what a
        module and its submodules store. Read now on the CPU; on a device, where this is called
        later, by the last reading.
        """
        batch = self._stored.within(node)
        if self.is_deferred:
            records = self.event_store.history.latest_of(set(batch.sites))
        else:
            with self.lock:
                records = self._read_now(batch.tensors, batch.sites)
        roles = dict(zip(batch.sites, batch.roles))
        for record in records[nonfinite(records)]:
            yield record.copy(), roles[int(record["site"])]

    def _read_now(self, tensors: Sequence[torch.Tensor], sites: Sequence[int]) -> np.ndarray:
        """Reads tensors of the host; the records that are non-finite."""
        host = [i for i, tensor in enumerate(tensors) if tensor.is_cpu]
        part, numbers = [tensors[i] for i in host], [sites[i] for i in host]
        found = list(self.host.observe_list(part, numbers, self.step.index, self.next_seq, 0))
        self.next_seq += len(part)
        return np.concatenate(found) if found else np.zeros(0, RECORD_DTYPE)

    def call_ended(self, call: Call, is_complete: bool, ended_by: str = "") -> None:
        """As Returned has it. Nothing has to be done while nothing was found."""
        returned = Returned(call, is_complete, ended_by)
        if self.is_deferred:
            self.step.journal.entries.append(returned)
        else:
            with self.event_store.lock:
                self.event_store.judge(self.step, returned)

    def note(self, function: Callable[..., Any], *args: Any) -> None:
        """``function(*args)`` of the event store is due when all that was read so far is judged."""
        self.due(Note(function, *args))

    def due(self, entry: Entry) -> None:
        """An entry that matters even where nothing that was read is non-finite."""
        if self.is_deferred:
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
            if self.is_deferred:
                self.drain.process()
            else:
                self.event_store.history.add(self.host.take())

    def flush(self) -> None:
        """Waits for the devices, and takes in everything."""
        if self.is_deferred:
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
        if self.is_deferred and self.config.sync != "never":
            self.submit()
            self.drain.wait()

    @property
    def rereads_stored(self) -> bool:
        """Whether each step begins with what the model stores: where a verdict can neither wait for
        the reading before the update, nor read in its middle.
        """
        return self.settles_calls

    def submit(self, closes_step: bool = False) -> None:
        step = self.step
        journal, step.journal = step.journal, Journal()
        if self.tape is not None:
            self.tape.take(step, journal, closes_step)
            return
        self.recorder.redirect(step.journal.entries)
        self.recorder.clear_target()
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
            self.submit()
            return
        with self.event_store.lock:
            self.collect()
            if self.event_store.history.is_full:
                self.event_store.store(self.step)
                self.event_store.history.drop_oldest()

    # Trouble

    def switch_off(self, site: int, error: Exception) -> None:
        """A site can't be read: it is left out from now on, with one warning."""
        self.off_sites.add(site)
        self.recorder.close()
        self.report_internal_error(str(self.sites[site]), error)

    def report_internal_error(self, where: str, error: Exception) -> None:
        """Warns once that fastcheck itself failed at ``where``, which the caller has switched
        off.
        """
        self.faults.report(where, error)
        self.faults.settle()
