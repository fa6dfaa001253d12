"""What is to be said of devices whose values don't show every overflow: the status word of those
that saturate, read at step boundaries, and the sentences of the summary.

The word is the whole device's, whoever set it, and names no tensor. It goes through the ring like
any tensor, so that nothing waits for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional

import torch

from ._finding import Finding
from ._record import DeviceMode
from ._site import Site
from .backends import Backend
from .backends.entry import OverflowStatus

if TYPE_CHECKING:
    from ._session import Session
    from ._step import Step

__all__ = ["StatusReader"]

ROLE = "overflow_status"


class _Device:
    """One saturating device, and what its status word has said until now."""

    def __init__(self, device: torch.device, status: OverflowStatus) -> None:
        self.device = device
        self.status = status
        # Of the last reading that arrived: whether the word was set, and of which step it was.
        self.is_set = False
        self.last_step: Optional[int] = None
        self.reading_count = 0
        self.hit_count = 0
        # The step at whose boundary it was found set, and since when nothing has cleared it.
        self.set_since: Optional[int] = None
        self.is_off = False


class StatusReader:
    """Reads the overflow status of a session's devices. Expects the session's lock, and where
    records are judged the ledger's.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._resets = session.config.reset_overflow_status
        self._devices: dict[torch.device, _Device] = {}
        self._modes: dict[torch.device, DeviceMode] = {}

    def add(self, device: torch.device, backend: Backend) -> None:
        """A device's first tensor is about to be read."""
        self._modes[device] = backend.device_mode
        if backend.overflow_status is None:
            return
        entry = self._devices[device] = _Device(device, backend.overflow_status)
        if self._resets:
            # What was set before says nothing of this run.
            try:
                entry.status.clear(device)
            except Exception as error:
                self._give_up(entry, error)

    def read(self) -> None:
        """At a step boundary: starts to read what has overflowed since the one before."""
        session = self._session
        for entry in self._devices.values():
            if entry.is_off:
                continue
            try:
                word = entry.status.read(entry.device)
                ring = session.rings[entry.device]
                lost = ring.lost_count
                seq, _ = session.observe(word, self._site(entry), 0, 0)
                # What found no slot is still to be learnt from the next reading.
                if self._resets and ring.lost_count == lost:
                    entry.status.clear(entry.device)
            except Exception as error:
                self._give_up(entry, error)
                continue
            session.note(self._judge, entry, session.step, seq)

    def remarks(self) -> list[str]:
        """What a summary has to say of the devices' arithmetic: nothing of one like IEEE 754's."""
        return [
            _saturating(str(device), self._devices.get(device), self._resets)
            if mode is DeviceMode.SATURATING
            else f"what {device} does to a result that does not fit its format is not known: NaN "
            "and Inf are found by their bits, and if it saturates there are none to find"
            for device, mode in self._modes.items()
            if mode is not DeviceMode.IEEE
        ]

    def _site(self, entry: _Device) -> int:
        # Behind the update, whose own overflows belong to the step too.
        site = Site("", str(entry.device), "optimizer", ROLE, 0, "overflow status")
        return self._session.sites.intern(site)

    def _judge(self, entry: _Device, step: Step, seq: int) -> None:
        record = self._session.ledger.history.find(seq)
        if record is None:
            return
        was_set, since = entry.is_set and not self._resets, entry.last_step
        entry.is_set = not record["zero_count"]
        entry.last_step = step.index
        entry.reading_count += 1
        if not entry.is_set:
            entry.set_since = None
        elif not was_set:
            entry.set_since = step.index
            entry.hit_count += 1
            # A tensor that shows the overflow says more of it than the word could.
            if not step.judge.findings:
                reason = f"process overflow on {entry.device} {_interval(since, step.index)}"
                step.judge.process_overflow(Finding(record, ROLE), reason)

    def _give_up(self, entry: _Device, error: Exception) -> None:
        entry.is_off = True
        self._session.trouble(f"the overflow status of {entry.device}", error)


def _interval(since: Optional[int], step: int) -> str:
    if since is None:
        return f"before the boundary of step {step}"
    if since == step:
        return f"between two updates of step {step}"
    return f"between the boundaries of step {since} and step {step}"


def _saturating(name: str, entry: Optional[_Device], resets: bool) -> str:
    said = (
        f"{name} saturates: an overflow leaves the largest finite number there, counted in outputs "
        "and gradients, and a NaN leaves 0, which no value shows"
    )
    if entry is None:
        return f"{said}; its overflow status can't be asked: this is no proof that all was well"
    if entry.is_off or not entry.reading_count:
        return f"{said}; its overflow status was not read: this is no proof that all was well"
    times = f"at {entry.hit_count:,} of {entry.reading_count:,} step boundaries"
    if resets:
        return f"{said}; its overflow status had been set {times}"
    if entry.set_since is not None:
        return (
            f"{said}; its overflow status has been set since the boundary of step "
            f"{entry.set_since:,}, and tells nothing of later steps until it is cleared "
            "(reset_overflow_status=True does, at each boundary)"
        )
    return f"{said}; its overflow status had newly been set {times}"
