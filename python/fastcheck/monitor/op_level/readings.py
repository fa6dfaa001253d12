"""OpReadings: passes records and incidents of the C++ observer to the event store: at once on the
CPU, through the drain on a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import numpy as np
import torch

from fastcheck.monitor.session.session import Session
from fastcheck.record.format import RECORD_DTYPE, overflowed
from fastcheck.ring.device import DeviceRing
from fastcheck.utils.torch.own_operators import unobserved
from fastcheck.verdict.entries import Entry, Journal, Operator, Records
from fastcheck.verdict.incident import Incident
from fastcheck.verdict.step import Step

from .deferred import DeferredOps, OpPart
from .launch import why_not
from .sites import OpSites

# A token for what was not read; no finding has it.
_UNREAD = 2**62


class OpReadings(Session):
    """The part of OpSession that takes what the observer has seen."""

    _ops: Any  # the extension's OpObserver
    _sites: Optional[OpSites]
    _rows: list[np.ndarray]
    launches: Any  # the extension's DeviceLaunches

    @property
    def is_running(self) -> bool:
        """Whether the observer runs for this session."""
        raise NotImplementedError

    def _take(self) -> tuple[np.ndarray, list[Incident], Optional[Any]]:
        """The observer's records since the last time, its incidents, and the operators that wait
        for records of a device.
        """
        assert self._sites is not None
        rows, incidents, sites, first, waiting = self._ops.take()
        if sites:
            self._sites.add(first, sites)
        records: np.ndarray = np.frombuffer(rows, RECORD_DTYPE)
        return records, [Incident(raw) for raw in incidents], waiting

    def collect(self) -> None:
        if self._sites is None or not self.is_running:
            return
        if self.is_deferred:
            with unobserved():
                self.drain.process()
            return
        with self.event_store.lock:
            records, incidents, waiting = self._take()
            self._sites.translate(records)
            self.event_store.history.add(records)
            if waiting is not None:
                # Left to a device that can't be read: of the others all is known.
                found = self._ops.settle(waiting, [], self.next_seq)
                incidents += [Incident(raw) for raw in found]
            if incidents:
                bad = {int(record["seq"]): record.copy() for record in records[overflowed(records)]}
                self._judge_incidents(self.step, self.is_scaled, incidents, bad)

    def _judge_incidents(
        self, step: Step, is_scaled: bool, incidents: Sequence[Incident], bad: Records
    ) -> None:
        known = dict(bad)
        is_filtered = self.has_excluded or self.config.is_filtered
        for incident in incidents:
            # Its records may have come with an earlier batch, by another thread's hook.
            for seq in incident.bad_seqs:
                if seq not in known and (record := self.event_store.history.find(seq)) is not None:
                    known[seq] = record
            self.event_store.judge(step, Operator(incident, is_scaled, is_filtered), known)

    # On a device

    def ring_for(self, tensor: torch.Tensor, site: int) -> Optional[DeviceRing]:
        """The ring of its device; None if it passes unread."""
        device = tensor.device
        if not self.is_running or site in self.off_sites:
            return None
        if self.tape is not None:
            self.notes["what a graph captures passes unread at op level"] = None
            return None
        if device not in self.rings:
            problem = why_not(device)
            if problem:
                self.notes[f"op level does not read {device}: {problem}"] = None
                self._ops.leave_out(tensor)
                return None
            self._ring(device)
            if self.overflow.follow_ops(device):
                self._ops.watch_status(str(device))
        return self._ring(device)

    def _gather(self) -> None:
        """What the observer has seen until now becomes an entry of the journal."""
        if self._sites is None or not self.is_running:
            return
        stop = self.next_seq
        records, _, waiting = self._take()
        if len(records):
            self._rows.append(records)
        if waiting is not None:
            step, is_scaled = self.step, self.is_scaled

            def judge(incidents: list[Incident], bad: Records) -> None:
                self._judge_incidents(step, is_scaled, incidents, bad)

            step.journal.add_due(DeferredOps(judge, waiting, stop, self.launches.lines()))

    def due(self, entry: Entry) -> None:
        if self.is_deferred:
            self._gather()
        super().due(entry)

    def submit(self, closes_step: bool = False) -> None:
        if self._sites is None or self.tape is not None:  # after the capture
            return
        with unobserved():
            self._gather()
            step = self.step
            journal, step.journal = step.journal, Journal()
            self.recorder.redirect(step.journal.entries)
            self.recorder.clear_target()
            self.launches.clear_rows()
            records, self._rows = self._rows, []
            segments = []
            for ring in self.rings.values():
                early, in_flight = ring.cut()
                records += early
                segments += [(ring, segment) for segment in in_flight]
        overflow, lines = self.overflow, self.launches.lines()
        self.drain.submit(
            OpPart(self._sites, step, journal, records, segments, closes_step, overflow, lines)
        )

    def judge_now(self) -> None:
        """In the middle of a forward or backward: what is due is done here."""
        if self.lock._is_owned():
            return  # an op of fastcheck itself: nothing may be raised in the middle of a hook
        with self.lock:
            if not self.removed:
                self.collect()
        if self.event_store.due:
            self.deliver()

    @property
    def has_incidents(self) -> bool:
        """Whether anything non-finite was met since the last collect()."""
        return bool(self._ops.has_incidents())
