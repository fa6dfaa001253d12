"""The drain: a thread that takes device records to the event store, in order.

Parts of the journal wait here until the copies of their records are done. Nothing in it makes a
device's work wait, and nothing makes the training thread wait but wait() and bound().
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections import deque
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Callable, Optional, Protocol

import numpy as np
import torch

from fastcheck.errors import first_line, warn_of_fault
from fastcheck.log.history import joined
from fastcheck.log.unobserved import lost_to_meta
from fastcheck.record.event import Event
from fastcheck.record.format import VALUE_BYTES, Verdict
from fastcheck.ring.device import DeviceRing
from fastcheck.ring.segments import Segment
from fastcheck.utils.torch.lost_device import is_lost
from fastcheck.verdict.entries import Journal
from fastcheck.verdict.step import Step

from .event_store import EventStore

if TYPE_CHECKING:
    from fastcheck.calls.recorder import HookRecorder


class DeviceRings(Protocol):
    of: dict[torch.device, DeviceRing]


class Observing(Protocol):
    """The part of a session that is used here."""

    lock: AbstractContextManager[Any]
    event_store: EventStore
    step: Step
    is_active: bool

    @property
    def rings(self) -> DeviceRings: ...

    @property
    def recorder(self) -> HookRecorder: ...

    def submit(self) -> None: ...

    def collect(self) -> None: ...


class Faults:
    """The errors of one session, which it does not keep alive, and what can't be read."""

    def __init__(self, session: Observing) -> None:
        self._session = weakref.ref(session)
        #: Notes for the summary: what is no longer observed, and why.
        self.notes: dict[str, None] = {}
        #: The first of those of errors of fastcheck's own; empty: there was none.
        self.first = ""
        #: Sites that could not be read once; they are not tried again.
        self.off_sites: set[int] = set()
        #: Tensors that were overwritten before their turn to be read came.
        self.unread_count = 0
        #: Kinds of devices that no backend reads.
        self.unread_devices: dict[str, None] = {}
        # The error of the device, from the first call on that failed.
        self.loss: Optional[str] = None
        self._is_settled = False

    def report(self, where: str, error: Exception) -> None:
        """Warns once that fastcheck itself failed at ``where``, which the caller has switched off.
        That a device is lost is noted for settle(). Any thread, with any lock.
        """
        session = self._session()
        if session is None:
            return
        if is_lost(error):
            if self.loss is None:
                self.loss = first_line(error)
            return
        note = f"fastcheck no longer observes {where}: {type(error).__name__}: {error}"
        if note not in self.notes:
            self.notes[note] = None
            self.first = self.first or note
            warn_of_fault(f"{note}. Training is not affected.")

    def look(self) -> None:
        """Looks, at exit, whether a device is lost of which nothing was in flight."""
        session = self._session()
        if session is None:
            return
        for ring in list(session.rings.of.values()):
            try:
                ring.check()
            except Exception as error:
                self.report("a device", error)
        self.settle()

    def settle(self) -> None:
        """Once a device was found lost: judges what is left of its records, and writes the log. Not
        with the event store's lock alone: the session's is taken first.
        """
        session = self._session()
        if session is None or self.loss is None or self._is_settled:
            return
        with session.lock:
            if self._is_settled:
                return
            self._is_settled = True
            session.is_active = False
            session.recorder.close()
            with suppress(Exception):  # what the device has left may be anything
                session.submit()
                session.collect()
            store = session.event_store
            with store.lock:
                store.end_run(session.step)
                if store.archive.log is not None:
                    store.archive.log.add_meta(**lost_to_meta(self.loss, session.step.index))
                first = _first(store, session.step.index)
        where = "no tensor that was read before it had a NaN or an infinity"
        if first is not None:
            where = (
                "the first tensor before it that was not finite: "
                f"{first.site} in step {first.step:,}"
            )
        warn_of_fault(
            f"a device was lost in step {session.step.index:,}: {self.loss}. A kernel that ran "
            "earlier has failed, most likely one of the training's own; CUDA reports it at the "
            f"call that comes next. fastcheck observes nothing more; {where}"
        )


def _first(store: EventStore, step: int) -> Optional[Event]:
    """The event where the numbers of the last steps went wrong first."""
    events = [event for event in store.events if event.step >= step - 2]
    begun = [event for event in events if event.verdict in (Verdict.ORIGIN, Verdict.ARRIVED)]
    return min(begun or events, key=lambda event: int(event.record["seq"]), default=None)


# The time between two looks of the thread whether a copy is done, only while one is under way. It
# doubles with each look, up to the longest: a look takes Python's lock from the training thread.
_POLL_SECONDS = 0.001
_LONGEST_POLL = 0.008


@dataclass(eq=False)
class StepPart:
    """A stretch of one step's journal, and its records: here already, or in flight."""

    step: Step
    journal: Journal
    _records: list[np.ndarray]
    _segments: list[tuple[DeviceRing, Segment]]
    closes_step: bool
    # Told of each site whose tensor was read twice, and whether its records are the same.
    _compared: Optional[Callable[[int, bool], None]] = None
    #: The error that a device reported in the place of records.
    failure: Optional[Exception] = None
    _lost: set[int] = field(default_factory=set)  # segments, by id()

    @property
    def can_wait(self) -> bool:
        """True if it may be judged with the next part: no record comes with it, and nothing that
        was found in its step is open. Each waking takes Python's lock from the training thread.
        """
        return not (self._records or self._segments or self.step.findings.all)

    @property
    def is_ready(self) -> bool:
        return all(self._has_come(segment, lambda s: s.is_ready) for _, segment in self._segments)

    def wait(self) -> None:
        for _, segment in self._segments:
            self._has_come(segment, Segment.wait)

    def _has_come(self, segment: Segment, look: Callable[[Segment], Optional[bool]]) -> bool:
        """The result of ``look``; True for a copy that will never come, because its device is
        lost.
        """
        if id(segment) in self._lost:
            return True
        try:
            return bool(look(segment))
        except Exception as error:
            self.failure = error
            self._lost.add(id(segment))
            return True

    def take(self) -> np.ndarray:
        """All records, in the order of their sequence numbers."""
        parts = list(self._records)
        for ring, segment in self._segments:
            is_lost = id(segment) in self._lost
            parts.append(ring.rescue(segment) if is_lost else ring.take(segment))
        parts = [part for part in parts if len(part)]
        if not parts:
            return joined(parts)
        records = parts[0] if len(parts) == 1 else joined(parts)
        return self._each_once(records) if (records["flags"] & AGAIN).any() else in_order(records)

    def _each_once(self, records: np.ndarray) -> np.ndarray:
        """The records without those of second readings, which are compared with the first
        readings.
        """
        is_again = (records["flags"] & AGAIN) != 0
        firsts, seconds = in_order(records[~is_again]), records[is_again]
        places = np.searchsorted(firsts["seq"], seconds["seq"])
        for second, place in zip(seconds, places):
            first = firsts[place] if place < len(firsts) else second
            are_same = first["seq"] == second["seq"] and first is not second
            are_same = are_same and first.tobytes()[:VALUE_BYTES] == second.tobytes()[:VALUE_BYTES]
            if self._compared is not None:
                self._compared(int(second["site"]), bool(are_same))
        return firsts


#: A bit in the flags of an identity (csrc/torch/read/waiting.h): the tensor has a record already.
AGAIN = np.uint32(1 << 31)


def in_order(records: np.ndarray) -> np.ndarray:
    """The records, in the order of their sequence numbers."""
    numbers = records["seq"]
    if (numbers[1:] > numbers[:-1]).all():
        return records
    return records[np.argsort(numbers, kind="stable")]


@dataclass(eq=False)
class Drain:
    """The parts that wait, oldest first."""

    _event_store: EventStore
    _max_lag: Optional[int]
    _faults: Faults

    def __post_init__(self) -> None:
        # The number of times that the training thread had to wait because it was max_lag steps
        # ahead.
        self.wait_count = 0
        self._parts: deque[StepPart] = deque()
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread: Optional[threading.Thread] = None
        weakref.finalize(self, self._wake.put, False)

    @property
    def is_idle(self) -> bool:
        """True if no part is here but such as wait for the next."""
        return all(part.can_wait for part in list(self._parts))

    def submit(self, part: StepPart) -> None:
        """Takes over a part; it is judged when all before it are, and its records are here."""
        self._parts.append(part)
        if self._thread is None:
            arguments = (weakref.ref(self), self._wake)
            self._thread = threading.Thread(
                target=_run, args=arguments, name="fastcheck-drain", daemon=True
            )
            self._thread.start()
        if not part.can_wait:
            self._wake.put(True)

    def process(self) -> int:
        """Judges what has arrived, without waiting for the rest. How many parts are left."""
        with self._event_store.lock:
            while self._parts and self._parts[0].is_ready:
                part = self._parts.popleft()
                if part.failure is not None:
                    self._faults.report("what a device recorded", part.failure)
                try:
                    self._event_store.replay(part.step, part.journal, part.take())
                except Exception as error:
                    self._faults.report("what a device recorded", error)
        self._faults.settle()
        return len(self._parts)

    def wait(self) -> None:
        """Waits for the devices, and judges everything."""
        while self.process():
            with contextlib.suppress(IndexError):  # the thread was quicker
                self._parts[0].wait()

    def bound(self) -> None:
        """Holds the host back when it is more than ``max_lag`` steps ahead of the devices."""
        if self._max_lag is None:
            return
        while self._closed_steps() > self._max_lag and self.process():
            if self._closed_steps() <= self._max_lag:
                break
            self.wait_count += 1
            with contextlib.suppress(IndexError):
                self._parts[0].wait()

    def _closed_steps(self) -> int:
        return len({part.step for part in list(self._parts) if part.closes_step})

    def finish(self, seconds: float) -> None:
        """Waits at exit up to ``seconds`` for pending copies, and judges the records that have
        arrived.
        """
        deadline = time.monotonic() + seconds
        while self.process() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)


def _run(drain_ref: weakref.ref[Drain], wake: queue.SimpleQueue[bool]) -> None:
    """The thread: holds the drain only while it works, so that a deleted model takes it along."""
    while wake.get():
        pause = _POLL_SECONDS
        while True:
            drain = drain_ref()
            if drain is None or not drain.process():
                break
            del drain
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL)
        drain = None
