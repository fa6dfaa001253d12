"""Operators on a device, kept until their records arrive and they can be judged."""

from __future__ import annotations

from typing import Any, Callable, Protocol

import numpy as np

from fastcheck.extension import extension
from fastcheck.monitor.session.drain import Part
from fastcheck.monitor.session.overflow_status import StatusReader
from fastcheck.record.format import overflowed
from fastcheck.ring.device import DeviceRing
from fastcheck.ring.segment import Segment
from fastcheck.verdict.entries import Journal, Note, Records, Task
from fastcheck.verdict.incident import Incident
from fastcheck.verdict.step import Step

from .sites import OpSites


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
