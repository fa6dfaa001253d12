"""OpReadings: passes records and incidents of the C++ observer to the event store: at once on the
CPU, through the drain on a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, Optional, Protocol

import numpy as np
import torch

from fastcheck.calls.module_calls import ModuleNode
from fastcheck.extension import extension
from fastcheck.monitor.session.drain import Part
from fastcheck.monitor.session.overflow_status import ROLE as STATUS_ROLE
from fastcheck.monitor.session.overflow_status import StatusReader
from fastcheck.monitor.session.session import Session
from fastcheck.record.format import RECORD_DTYPE, overflowed
from fastcheck.record.naming import OUTSIDE
from fastcheck.record.site import Site, SiteTable
from fastcheck.ring.device import DeviceRing
from fastcheck.ring.segment import Segment
from fastcheck.utils.torch.own_operators import unobserved
from fastcheck.verdict.entries import Entry, Journal, Note, Operator, Records, Task
from fastcheck.verdict.incident import Incident
from fastcheck.verdict.step import Step

from .launch import why_not


class LineNumbers(Protocol):
    """The extension's: where Python was when the records of a step were requested."""

    def of(self, seq: int) -> str:
        """``train.py:12 in forward``; empty where it is not known."""
        ...


class OpPart(Part):
    """A part whose records carry the observer's numbers of their sites."""

    def __init__(
        self,
        sites: OpSites,
        step: Step,
        journal: Journal,
        records: list[np.ndarray],
        segments: list[tuple[DeviceRing, Segment]],
        closes_step: bool,
        overflow: StatusReader,
        lines: LineNumbers,
    ) -> None:
        super().__init__(step, journal, records, segments, closes_step)
        self._sites = sites
        self._overflow = overflow
        self._lines = lines

    def take(self) -> np.ndarray:
        records = super().take()
        is_status = self._sites.are_status(records)
        self._sites.translate(records)
        return self._without_status(records, is_status) if is_status.any() else records

    def _without_status(self, records: np.ndarray, is_status: np.ndarray) -> np.ndarray:
        """Without the status words behind operators that report nothing new."""
        bad = records["seq"][overflowed(records) & ~is_status]
        hits = self._overflow.arrived(records[is_status], bad)
        for hit in reversed(hits):
            line = self._lines.of(int(hit.record["seq"]))
            note = Note(self._overflow.tell, self.step, hit, line)
            self.journal.entries.insert(0, note)
            self.journal.due.insert(0, note)
        kept = np.isin(records["seq"], [int(hit.record["seq"]) for hit in hits])
        return records[~is_status | kept]


class DeferredOps(Task):
    """Operators that ran one after the other, and whose records arrive with this part at the
    latest. Settled in healthy parts too, because the observer waits for their records.
    """

    __slots__ = ("_judge", "_lines", "_stop", "_waiting")

    def __init__(
        self,
        judge: Callable[[list[Incident], Records], None],
        waiting: Any,
        stop: int,
        lines: LineNumbers,
    ) -> None:
        self._judge = judge
        self._waiting = waiting
        self._stop = stop
        self._lines = lines

    def run(self, bad: Records) -> None:
        found = extension.op_observer().settle(self._waiting, list(bad), self._stop)
        if found:
            self._judge([self._incident(raw) for raw in found], bad)

    def _incident(self, raw: Any) -> Incident:
        incident = Incident(raw)
        if not incident.line:
            seqs = (incident.forward_seq, *(seq for seq, _ in incident.made))
            incident.line = next(filter(None, map(self._lines.of, seqs)), "")
        return incident


_INPUT = 0
_STATUS = 2
_DIRECTIONS = ("forward", "backward", "optimizer")
_ROLES = {
    ("forward", 0): "input",
    ("forward", 1): "output",
    ("backward", 0): "grad_output",
    ("backward", 1): "grad_input",
    ("optimizer", 0): "input",
    ("optimizer", 1): "output",
}


class OpSites:
    """The observer's numbers, mapped to those of the site table."""

    def __init__(self, sites: SiteTable, nodes: Sequence[ModuleNode]) -> None:
        self._sites = sites
        self._nodes = nodes
        self._ops = extension.op_observer()
        self._numbers = np.zeros(0, np.int32)
        self._is_status = np.zeros(0, np.bool_)

    def add(self, first: int, rows: Sequence[tuple[int, int, int, int, int, int]]) -> None:
        """``rows``: the observer's sites from number ``first`` on."""
        numbers = [self._sites.intern(self._site(*row)) for row in rows]
        self._numbers = np.concatenate([self._numbers[:first], np.array(numbers, np.int32)])
        is_status = np.array([row[4] == _STATUS for row in rows], np.bool_)
        self._is_status = np.concatenate([self._is_status[:first], is_status])

    def are_status(self, records: np.ndarray) -> np.ndarray:
        """Which of these are words of a device's, read behind an op. Before translate()."""
        numbers = records["site"]
        found = numbers >= 0
        found[found] = self._is_status[numbers[found]]
        return found

    def translate(self, records: np.ndarray) -> None:
        """Puts the table's numbers into the records. Those of named readings came as ~number."""
        numbers = records["site"]
        is_named = numbers < 0
        numbers[is_named] = ~numbers[is_named]
        numbers[~is_named] = self._numbers[numbers[~is_named]]

    def _site(
        self, module: int, op: int, forward_op: int, direction: int, role: int, index: int
    ) -> Site:
        node = self._nodes[module] if module >= 0 else None
        path, kind = ("", OUTSIDE) if node is None else (node.path, node.type_name)
        where = _DIRECTIONS[direction]
        spelt = STATUS_ROLE if role == _STATUS else _ROLES[where, role]
        name = self._ops.op_name(op)
        label = spelt
        if role == _STATUS:
            label = "overflow status"
        elif role == _INPUT:
            label = self._ops.argument_name(op, index)
        elif index:
            label = f"{spelt}[{index}]"
        if where == "backward" and forward_op >= 0:
            # The op of the forward pass names the place; the op that ran is in the label.
            label = f"{label if role == _STATUS else f'{spelt}[{index}]'} ({name})"
            name = self._ops.op_name(forward_op)
        return Site(path, kind, where, spelt, index, label, name)


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

    def judge_now(self) -> bool:
        """In the middle of a forward or backward. Whether anything is due, and may be done here."""
        if self.lock._is_owned():
            return False  # an op of fastcheck itself: nothing may be raised in the middle of a hook
        with self.lock:
            if not self.removed:
                self.collect()
        return bool(self.event_store.due)

    @property
    def has_incidents(self) -> bool:
        """Whether anything non-finite was met since the last collect()."""
        return bool(self._ops.has_incidents())
