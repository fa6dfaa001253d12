"""Passes each step and each stop of one session to its sinks, in a thread that writes."""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Callable, Optional

import numpy as np

from fastcheck.errors import printable, warn
from fastcheck.log.step_table import StepRow
from fastcheck.monitor.session.event_store import SessionListener
from fastcheck.monitor.session.session import Session
from fastcheck.record.format import DTYPES, Depth, DeviceMode, nonfinite
from fastcheck.record.statistics import LARGEST_FINITE
from fastcheck.report.error import OverflowDetected
from fastcheck.report.stop_report import StopReport
from fastcheck.verdict.step import Step

from .sink import ScalarSink

# Steps that may wait to be written; steps that find no room are left out.
_MOST = 1024
# The time for which the end of a run waits for what is still to be written.
_CLOSE_SECONDS = 10.0


@dataclass(frozen=True)
class Entry:
    """The numbers and texts of one step that are to be written; ``alert``: the method of a sink
    that takes it, a title and a text.
    """

    step: int
    scalars: dict[str, float] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    alert: Optional[tuple[str, str, str]] = None


class _Targets:
    """The sinks that work. ``on_failure(sink, error)`` is called once for each sink that fails,
    which gets nothing from then on.
    """

    def __init__(
        self, sinks: Sequence[ScalarSink], on_failure: Callable[[ScalarSink, Exception], None]
    ) -> None:
        self.sinks = list(sinks)
        self._on_failure = on_failure

    def attempt(self, sink: ScalarSink, method: Callable[..., Any], *args: Any) -> None:
        """Calls the method, by which something reaches the sink."""
        try:
            method(*args)
        except Exception as error:
            self.sinks.remove(sink)
            with contextlib.suppress(Exception):  # a warning may be an error here
                self._on_failure(sink, error)

    def write(self, make: Callable[[], Entry]) -> None:
        """Writes what ``make()`` returns to each."""
        made: list[Entry] = []  # by the first sink's attempt: an error in it is one of all sinks
        for sink in list(self.sinks):
            self.attempt(sink, _write_to, sink, make, made)


class SinkWriter:
    """Writes to sinks, in a thread of its own. ``on_failure``: as of _Targets."""

    def __init__(
        self, sinks: Sequence[ScalarSink], on_failure: Callable[[ScalarSink, Exception], None]
    ) -> None:
        self._targets = _Targets(sinks, on_failure)
        self._queue: queue.SimpleQueue[Optional[Callable[[], Entry]]] = queue.SimpleQueue()
        self._thread: Optional[threading.Thread] = None
        self._is_closed = False
        #: Steps that were left out because the queue was full.
        self.dropped = 0
        weakref.finalize(self, self._queue.put, None)

    def put(self, make: Callable[[], Entry], may_drop: bool = True) -> None:
        """``make()`` is called and what it returns is written, on the thread; after close() at
        once, for a report at the end of the process.
        """
        if self._is_closed:
            self._targets.write(make)
            return
        if may_drop and self._queue.qsize() >= _MOST:
            self.dropped += 1
            return
        if self._thread is None:
            given = (self._queue, self._targets)
            thread = threading.Thread(target=_run, args=given, name="fastcheck-sinks", daemon=True)
            for sink in list(self._targets.sinks):  # a process may be allowed no more threads
                if not thread.is_alive():
                    self._targets.attempt(sink, thread.start)
            if not thread.is_alive():
                return
            self._thread = thread
            _live.add(self)
        self._queue.put(make)

    def close(self, seconds: float = _CLOSE_SECONDS) -> bool:
        """Waits at most ``seconds`` until everything is written. False if something is left."""
        self._is_closed = True
        thread, self._thread = self._thread, None
        if thread is None or thread is threading.current_thread():
            return True
        self._queue.put(None)
        thread.join(seconds)
        return not thread.is_alive()


_live: weakref.WeakSet[SinkWriter] = weakref.WeakSet()


def _run(waiting: queue.SimpleQueue[Optional[Callable[[], Entry]]], targets: _Targets) -> None:
    """The thread. It does not hold the writer, which a deleted model takes along."""
    while True:
        make = waiting.get()
        if make is None:
            break
        targets.write(make)
        del make  # it holds the session while the thread waits
    for sink in list(targets.sinks):
        targets.attempt(sink, getattr(sink, "close", lambda: None))


def _write_to(sink: Any, make: Callable[[], Entry], made: list[Entry]) -> None:
    if not made:
        made.append(make())
    entry = made[0]
    if entry.scalars:
        sink.log(entry.scalars, entry.step)
    if hasattr(sink, "text"):
        for name, text in entry.texts.items():
            sink.text(name, text, entry.step)
    if entry.alert is not None:
        method, *texts = entry.alert
        getattr(sink, method, lambda *_: None)(*texts, entry.step)


@atexit.register
def _close_all() -> None:
    for writer in list(_live):
        writer.close()


_BYTES = np.array([dtype.components * dtype.component_bytes for dtype in DTYPES], np.int64)


def step_scalars(
    row: StepRow, chunks: Sequence[np.ndarray], counts: Mapping[str, float]
) -> tuple[dict[str, float], Optional[int]]:
    """The scalars by name, and the number of the site with the least headroom. ``chunks``: the
    records of the step; ``counts``: numbers of the run until then.
    """
    bits, site = np.inf, None
    tensors, read, bad = 0, 0, 0
    for records in chunks:
        tensors += len(records)
        read += int((records["numel"] * _BYTES[records["dtype"]]).sum())
        bad += int(nonfinite(records).sum())
        left = _headroom(records)
        least = int(np.argmin(left))
        if left[least] < bits:
            bits, site = float(left[least]), int(records["site"][least])
    values = {
        "loss": row.loss,
        "loss_scale": row.scale,
        "learning_rate": row.learning_rate,
        "gradient_norm": row.gradient_norm,
        "nonfinite_tensors": bad,
        "headroom_bits": bits if site is not None else None,
        "tensors_read": tensors,
        "gigabytes_read": read / 1e9,
        **counts,
    }
    scalars = {f"fastcheck/{name}": float(v) for name, v in values.items() if v is not None}
    return scalars, site


def _headroom(records: np.ndarray) -> np.ndarray:
    """The headroom of each tensor: how many times it could be doubled before it overflows; inf: not
    known. A tensor that holds the largest number itself is left out as a mask, unless its device
    saturates.
    """
    largest = LARGEST_FINITE[records["dtype"]]
    with np.errstate(all="ignore"):  # of integers min and max are other types' bits
        low, high = np.abs(records["min"]), np.abs(records["max"])
        reached = np.maximum(low, high)
        known = (records["depth"] >= Depth.STATS) & (reached > 0) & (reached <= largest)
        saturates = records["device_mode"] == int(DeviceMode.SATURATING)
        known &= (reached < largest) | saturates
        return np.where(known, np.log2(largest / reached), np.inf)


_SITE = "fastcheck/least_headroom"


class SinkConnection(SessionListener):
    """Connects a session with its sinks, from install() to remove(). The thread that ended the step
    (on a device the drain's) computes what it passes on; the rest is computed and written by the
    writer's thread. ``watched``: the numbers of monitor.watch.
    """

    def __init__(
        self,
        session: Session,
        sinks: Sequence[ScalarSink],
        watched: Callable[[], Mapping[str, float]] = dict,
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
        nothing = StepRow(event_store.ranks.own, step.index, None, False, None, None, None)
        row = rows[-1] if rows else nothing
        self._skipped += row.overflow
        counts = {
            "skipped_steps": self._skipped,
            "events": event_store.counter.total,
            "findings": sum(event_store.archive.verdicts.values()) + len(step.findings.all),
            # The number of steps by which training was ahead when the records arrived.
            "lag_steps": max(0, session.step.index - step.index),
            "host_waits": session.drain.wait_count,
            "tensors_lost": sum(ring.lost_count for ring in session.rings.of.values()),
            **self._watched(),
        }
        self._writer.put(lambda: self._entry(row, chunks, counts))

    def _entry(
        self, row: StepRow, chunks: Sequence[np.ndarray], counts: Mapping[str, float]
    ) -> Entry:
        scalars, site = step_scalars(row, chunks, counts)
        bits, texts = scalars.get("fastcheck/headroom_bits", np.inf), {}
        if site is not None and bits < self._least:
            self._least = bits
            texts[_SITE] = f"{printable(str(self._session.sites[site]))}: {bits:.1f} bits"
        return Entry(row.step, scalars, texts)

    def stopping(self, report: StopReport) -> None:
        """The report is an alert of each sink."""

        def entry() -> Entry:
            site, text = printable(str(report.culprit.site)), str(OverflowDetected(report))
            title = f"fastcheck: {site}, step {report.step:,}"
            return Entry(report.step, alert=("alert", title, text))

        self._writer.put(entry, may_drop=False)

    def warned(self, step: int, kind: str, text: str) -> None:
        """The text is a warning of each sink that takes them."""
        entry = Entry(step, alert=("warning", f"fastcheck: {kind}, step {step:,}", text))
        self._writer.put(lambda: entry, may_drop=False)

    def replicas_differ(self, step: int, text: str) -> None:
        """The text is a warning too."""
        self.warned(step, "replicas differ", text)

    def close(self) -> None:
        """The monitor is removed: all is written. To be called outside the session's lock."""
        session = self._session
        if not self._writer.close():
            _note(session, "the sinks are slow: the rest is written while the process runs")
        if self._writer.dropped:
            _note(session, f"{self._writer.dropped:,} steps were not written: the sinks are slow")


def _switch_off(reference: weakref.ref[Session], sink: ScalarSink, error: Exception) -> None:
    name = getattr(sink, "name", type(sink).__name__)
    text = f"fastcheck no longer writes to the sink {name}: {type(error).__name__}: {error}"
    _note(reference(), f"{text}. Training is not affected.")


def _note(session: Optional[Session], text: str) -> None:
    if session is not None:
        session.faults.notes[text] = None
    warn(text)
