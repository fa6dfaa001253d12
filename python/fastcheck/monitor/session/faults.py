"""Faults: what becomes of errors inside fastcheck, and of a device that is lost.

A kernel that fails (an assert on the device, an access out of bounds) takes the device from the
process, and with it all records that were not copied. CUDA reports it at the next call, which may
be one of fastcheck's. What the device's black box holds is judged then, and the log is written.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any, Optional, Protocol

import torch

from fastcheck.errors import first_line, warn_of_fault
from fastcheck.log.lost_device import lost_to_meta
from fastcheck.record.event import Event
from fastcheck.record.format import Verdict
from fastcheck.utils.torch.lost_device import is_lost

if TYPE_CHECKING:
    from fastcheck.calls.recorder import HookRecorder
    from fastcheck.ring.device import DeviceRing
    from fastcheck.verdict.step import Step

    from .event_store import EventStore


class Observing(Protocol):
    """The part of a session that is used here."""

    lock: AbstractContextManager[Any]
    event_store: EventStore
    recorder: HookRecorder
    notes: dict[str, None]
    rings: dict[torch.device, DeviceRing]
    step: Step
    is_active: bool

    def submit(self) -> None: ...

    def collect(self) -> None: ...


class Faults:
    """The errors of one session, which it does not keep alive."""

    def __init__(self, session: Observing) -> None:
        self._session = weakref.ref(session)
        # What the device reported, from the first call on that failed.
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
        if note not in session.notes:
            session.notes[note] = None
            warn_of_fault(f"{note}. Training is not affected.")

    def look(self) -> None:
        """At exit: whether a device is lost, of which nothing was in flight."""
        session = self._session()
        if session is None:
            return
        for ring in list(session.rings.values()):
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
                if store.log is not None:
                    store.log.add_meta(**lost_to_meta(self.loss, session.step.index))
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
    """Where the numbers of the last steps went wrong first."""
    found = [event for event in store.events if event.step >= step - 2]
    begun = [event for event in found if event.verdict in (Verdict.ORIGIN, Verdict.ARRIVED)]
    return min(begun or found, key=lambda event: int(event.record["seq"]), default=None)
