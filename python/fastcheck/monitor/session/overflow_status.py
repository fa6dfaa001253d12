"""The overflow status word of devices that saturate: its readings and its text in the summary.

The word belongs to the whole device and names no tensor. It goes through the ring like any tensor,
so that nothing waits for it.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, NamedTuple, Optional, Protocol

import numpy as np
import torch

from fastcheck.backends.backend import Backend, OverflowStatus
from fastcheck.backends.portable.traversal import dtype_and_order
from fastcheck.record.format import DeviceMode
from fastcheck.record.site import Site, SiteTable, module_name
from fastcheck.ring.device import DeviceRing
from fastcheck.verdict.findings import Finding
from fastcheck.verdict.step import Step

from .config import Config
from .drain import Observing

ROLE = "overflow_status"

_NOTHING = np.zeros(0, np.int64)


class StatusOwner(Observing, Protocol):
    """The part of the session that the reader of status words needs."""

    config: Config

    @property
    def sites(self) -> SiteTable: ...

    @property
    def level(self) -> Any: ...

    def note(self, function: Callable[..., Any], *args: Any) -> None: ...

    def report_internal_error(self, where: str, error: Exception) -> None: ...


class Hit(NamedTuple):
    """The word was newly set in ``record``. ``since``: the reading before that record."""

    device: _Device
    record: np.void
    since: Optional[np.void]


class _Device:
    """A saturating device, and the readings of its status word so far."""

    def __init__(self, device: torch.device, status: OverflowStatus) -> None:
        self.device = device
        self.status = status
        # Its word is read behind operators, too.
        self.follows_ops = False
        # The last reading that arrived, and whether the word was set.
        self.last: Optional[np.void] = None
        self.is_set = False
        self.reading_count = 0
        self.hit_count = 0
        # The reading that found it set, if nothing has cleared it since.
        self.set_by: Optional[np.void] = None
        self.is_off = False

    def take(self, words: np.ndarray, is_cleared: bool) -> list[Hit]:
        """Readings have arrived, in order. ``is_cleared``: after each, as long as we read."""
        is_set = words["zero_count"] == 0
        was_set = np.zeros_like(is_set)
        if not is_cleared:
            was_set[0], was_set[1:] = self.is_set, is_set[:-1]
        at = np.flatnonzero(is_set & ~was_set)
        hits = [Hit(self, words[i].copy(), words[i - 1].copy() if i else self.last) for i in at]
        self.reading_count += len(words)
        self.hit_count += len(hits)
        self.last, self.is_set = words[-1].copy(), bool(is_set[-1])
        if not self.is_set:
            self.set_by = None
        elif hits:
            self.set_by = hits[-1].record
        return hits


class StatusReader:
    """Reads the overflow status of a session's devices. Expects the session's lock, and where
    records are judged the ledger's.
    """

    def __init__(self, session: StatusOwner) -> None:
        self._session = session
        self._resets = session.config.training.reset_overflow_status
        self.devices: dict[torch.device, _Device] = {}
        self._modes: dict[torch.device, DeviceMode] = {}
        # Behind operators: the last tensor that showed an overflow.
        self._last_bad = -1

    def add(self, device: torch.device, backend: Backend) -> None:
        """A device's first tensor is about to be read."""
        self._modes[device] = backend.device_mode
        if backend.overflow_status is None:
            return
        entry = self.devices[device] = _Device(device, backend.overflow_status)
        if self._resets:
            # The status that was set before does not come from this run.
            try:
                entry.status.clear(device)
            except Exception as error:
                self._give_up(entry, error)

    def read(self) -> None:
        """Starts to read, at a step boundary, what has overflowed since the boundary before."""
        session = self._session
        for entry in self.devices.values():
            observe = functools.partial(
                session.level.observe, site=self._site(entry), call=0, flags=0
            )
            observed = self._read(entry, observe)
            if observed is not None:
                session.note(self._judge, entry, session.step, observed[0])

    def _read(self, entry: _Device, observe: Callable[[torch.Tensor], Any]) -> Optional[Any]:
        """Observes the word, on the current stream; what that returned."""
        if entry.is_off:
            return None
        try:
            ring = self._session.rings.of.get(entry.device)
            lost = 0 if ring is None else ring.lost_count
            result = observe(entry.status.read(entry.device))
            # An overflow that found no slot is still to be learnt from the next reading.
            if self._resets and (ring is None or ring.lost_count == lost):
                entry.status.clear(entry.device)
        except Exception as error:
            self._give_up(entry, error)
            return None
        return result

    def _judge(self, entry: _Device, step: Step, seq: int) -> None:
        record = self._session.event_store.archive.history.find(seq)
        if record is None:
            return
        for hit in entry.take(np.array([record]), self._resets):
            explained = self._is_explained(hit) if entry.follows_ops else step.findings.all
            if not explained:
                self.tell(step, hit)

    # Behind operators

    def follow_ops(self, device: torch.device) -> bool:
        """Lets read_after_op() be called for this device from now on; False: there is nothing to
        read.
        """
        entry = self.devices.get(device)
        if entry is None:
            return False
        entry.follows_ops = True
        return True

    def read_after_op(self, ring: DeviceRing, device: torch.device, identity: Any) -> None:
        """Reads the status behind what an operator has made on this device. ``identity``: seq,
        step, call, site.
        """

        def observe(word: torch.Tensor) -> None:
            ring.observe(word, (*identity, 0, *dtype_and_order(word)))

        self._read(self.devices[device], observe)

    def arrived(self, words: np.ndarray, bad: np.ndarray) -> list[Hit]:
        """Readings behind operators, and the numbers of the tensors in between that show an
        overflow, in order: the hits that none of these explains.
        """
        hits: list[Hit] = []
        sites = self._session.sites
        index = np.array([sites[site].index for site in words["site"]])
        for entry in self.devices.values():
            mine = words[index == entry.device.index]
            if len(mine):
                hits += entry.take(mine, self._resets)
        hits = [hit for hit in hits if not self._is_explained(hit, bad)]
        if len(bad):
            self._last_bad = max(self._last_bad, int(bad[-1]))
        return hits

    def _is_explained(self, hit: Hit, bad: np.ndarray = _NOTHING) -> bool:
        """True if a tensor that was read shows the overflow, which names it better than the
        word."""
        first, stop = -1 if hit.since is None else int(hit.since["seq"]), int(hit.record["seq"])
        return first < self._last_bad < stop or bool(((first < bad) & (bad < stop)).any())

    def tell(self, step: Step, hit: Hit, line: str = "") -> None:
        """Something has overflowed, and nothing that was read shows it."""
        finding = Finding(hit.record, ROLE)
        finding.uses.line = line
        interval = self._interval(hit.since, hit.record)
        step.findings.add_overflow(finding, f"process overflow on {hit.device.device} {interval}")

    # Texts

    def remarks(self) -> list[str]:
        """The summary's remarks on the devices' arithmetic; none for IEEE 754."""
        return [
            self._saturating(device)
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

    def _give_up(self, entry: _Device, error: Exception) -> None:
        entry.is_off = True
        self._session.report_internal_error(f"the overflow status of {entry.device}", error)

    def _interval(self, since: Optional[np.void], until: np.void) -> str:
        end, step = self._moment(until), int(until["step"])
        if since is None:
            return f"{'before' if self._is_boundary(until) else 'until'} {end}"
        begin = self._moment(since)
        if self._is_boundary(since) and self._is_boundary(until):
            if begin == end:
                return f"between two updates of step {step}"
            return f"between the boundaries of step {int(since['step'])} and step {step}"
        if not self._is_boundary(since) and int(since["step"]) != step:
            begin += f" of step {int(since['step'])}"
        return f"between {begin} and {end}"

    def _is_boundary(self, word: np.void) -> bool:
        return self._session.sites[int(word["site"])].op is None

    def _moment(self, word: np.void) -> str:
        """The work that had just been done when the word was read."""
        site = self._session.sites[int(word["site"])]
        if site.op is None:
            return f"the boundary of step {int(word['step']):,}"
        backward = "the backward of " if site.direction == "backward" else ""
        return f"{backward}{site.op} #{int(word['call'])} in {module_name(site)}"

    def _saturating(self, device: torch.device) -> str:
        entry = self.devices.get(device)
        said = (
            f"{device} saturates: an overflow leaves the largest finite number there, counted in "
            "outputs and gradients, and a NaN leaves 0, which no value shows"
        )
        if entry is None:
            return f"{said}; its overflow status can't be read: an overflow may be missed"
        if entry.is_off or not entry.reading_count:
            return f"{said}; its overflow status was not read: an overflow may be missed"
        kind = "readings behind operators and at step" if entry.follows_ops else "step"
        times = f"at {entry.hit_count:,} of {entry.reading_count:,} {kind} boundaries"
        if self._resets:
            return f"{said}; its overflow status had been set {times}"
        if entry.set_by is None:
            return f"{said}; its overflow status had newly been set {times}"
        since = self._moment(entry.set_by)
        if not self._is_boundary(entry.set_by):
            since += f" of step {int(entry.set_by['step']):,}"
        what, when = (
            ("operators", "after each") if entry.follows_ops else ("steps", "at each boundary")
        )
        return (
            f"{said}; its overflow status has been set since {since}, and shows nothing of later "
            f"{what} until it is cleared (Training(reset_overflow_status=True) does, {when})"
        )
