"""Passes each step and each stop of one session to its sinks."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Optional, Protocol

import numpy as np

from fastcheck.errors import printable, warn
from fastcheck.log.step_table import StepRow
from fastcheck.monitor.session.listener import Listener
from fastcheck.monitor.session.session import Session
from fastcheck.report.error import OverflowDetected
from fastcheck.report.stop_report import StopReport
from fastcheck.verdict.step import Step

from .scalars import StepFacts, step_scalars
from .sink import ScalarSink
from .writer import Entry, SinkWriter

_SITE = "fastcheck/least_headroom"


class Watched(Protocol):
    """What is needed of monitor.watch."""

    def scalars(self) -> Mapping[str, float]: ...


class SinkConnection(Listener):
    """From install() to remove(). The thread that ended the step (on a device the drain's) computes
    what it passes on; the rest is computed and written by the writer's thread.
    """

    def __init__(
        self, session: Session, sinks: Sequence[ScalarSink], watched: Optional[Watched] = None
    ) -> None:
        self._session = session
        self._watched = watched
        self._skipped = 0
        # The least headroom of the run, whose site was written last.
        self._least = np.inf
        reference = weakref.ref(session)
        self._writer = SinkWriter(sinks, lambda sink, error: _switch_off(reference, sink, error))
        session.event_store.listeners.append(self)

    def step_ended(self, step: Step, rows: Sequence[StepRow], chunks: Sequence[np.ndarray]) -> None:
        """The step's numbers are passed to the writer."""
        if not any(map(len, chunks)):  # a step that every= leaves out
            return
        session, event_store = self._session, self._session.event_store
        nothing = StepRow(event_store.rank, step.index, None, False, None, None, None)
        row = rows[-1] if rows else nothing
        self._skipped += row.overflow
        facts = StepFacts(
            row=row,
            chunks=chunks,
            skipped=self._skipped,
            events=event_store.policy.counter.total,
            findings=sum(event_store.verdict_tally.values()) + len(step.findings.all),
            lag=max(0, session.step.index - step.index),
            waits=session.drain.wait_count,
            lost=sum(ring.lost_count for ring in session.rings.values()),
            watched={} if self._watched is None else self._watched.scalars(),
        )
        self._writer.put(lambda: self._entry(facts))

    def _entry(self, facts: StepFacts) -> Entry:
        scalars, site = step_scalars(facts)
        bits, texts = scalars.get("fastcheck/headroom_bits", np.inf), {}
        if site is not None and bits < self._least:
            self._least = bits
            texts[_SITE] = f"{printable(str(self._session.sites[site]))}: {bits:.1f} bits"
        return Entry(facts.row.step, scalars, texts)

    def stopping(self, report: StopReport) -> None:
        """The report is an alert of each sink."""

        def entry() -> Entry:
            site, text = printable(str(report.culprit.site)), str(OverflowDetected(report))
            return Entry(report.step, alert=(f"fastcheck: {site}, step {report.step:,}", text))

        self._writer.put(entry, may_drop=False)

    def close(self) -> None:
        """The monitor is removed: all is written. To be called outside the session's lock."""
        session = self._session
        if not self._writer.close():
            _note(session, "the sinks are slow: what is left is written in the background")
        if self._writer.dropped:
            _note(session, f"{self._writer.dropped:,} steps were not written: the sinks are slow")


def _switch_off(reference: weakref.ref[Session], sink: ScalarSink, error: Exception) -> None:
    name = getattr(sink, "name", type(sink).__name__)
    text = f"fastcheck no longer writes to the sink {name}: {type(error).__name__}: {error}"
    _note(reference(), f"{text}. Training is not affected.")


def _note(session: Optional[Session], text: str) -> None:
    if session is not None:
        session.notes[text] = None
    warn(text)
