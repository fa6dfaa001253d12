"""Connects the Watcher to a monitor: ``install(watch=)`` and ``monitor.watch``."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Callable, Optional, Union

import numpy as np

from fastcheck.errors import ConfigError, first_line, plain, warn, warn_of_fault
from fastcheck.log.step_table import StepRow
from fastcheck.log.writer import RecordLog
from fastcheck.monitor.session.event_store import SessionListener
from fastcheck.monitor.session.run_meta import BatchIds
from fastcheck.monitor.session.session import Session
from fastcheck.record.format import Depth
from fastcheck.verdict.step import Step
from fastcheck.watch.event import WatchEvent, check_callback, check_kind
from fastcheck.watch.options import Watch
from fastcheck.watch.rules import is_jump
from fastcheck.watch.signals import PART
from fastcheck.watch.watcher import Watcher

_SUMMARY_EVENTS = 10
# Steps are judged together, which takes a fraction of the time: so many, twice as many of fewer
# records than this, or those of so many seconds, or of so many records, of 192 bytes.
_TOGETHER = 4 * PART
_FEW_RECORDS = 1 << 13
_SECONDS = 1.0
_MOST_RECORDS = 1 << 16


def watch_options(watch: object, record: str) -> Optional[Watch]:
    """The options that ``install(watch=)`` was given; None: nothing is to be watched, or by default
    there are no numbers to watch.

    Raises:
        ConfigError: neither a bool nor a Watch, or ``record`` has no numbers for that.
    """
    watch = plain(watch)
    if watch is None or watch is False:
        return None
    if watch is True:
        return None if record == "health" else Watch()
    if isinstance(watch, Watch) and record == "health":
        raise ConfigError('there is nothing to watch with record="health", which only counts')
    if isinstance(watch, Watch):
        return watch
    raise ConfigError(f"watch must be True, False or a fastcheck.Watch(...), got {watch!r}")


def connected(watching: Optional[Watching]) -> Watching:
    """``watching``, or ConfigError where nothing is watched."""
    if watching is not None:
        return watching
    raise ConfigError(
        'this monitor does not watch: that takes watch=True, the default, and not record="health"'
    )


class Watching(SessionListener):
    """Finds what is unusual in the records of a monitor: ``monitor.watch``.

    Steps are judged when they are over, 64 of them (128 of fewer than 8,192 records), those of a
    second or those of 65,536 records together (with a callback or ``skip_above`` each by itself):
    on the CPU by the training thread, where the next step begins; elsewhere by the drain's thread,
    when the records have arrived. Warnings and callbacks run on the training thread at its next
    step boundary. All methods may be called from any thread; none waits for a device.
    """

    def __init__(self, session: Session, options: Watch, batches: BatchIds) -> None:
        self._session = weakref.ref(session)
        self._lock = session.event_store.lock
        is_whole = session.config.include is None and not session.config.exclude
        self._watcher = Watcher(
            options, session.sites, session.event_store.ranks.own, is_whole, batches.of
        )
        # True if some steps have counts alone.
        self._has_counts = session.config.stats_every > 1
        # Steps that are over and not judged yet, and when the last steps were.
        self._waiting: list[_Waiting] = []
        self._waiting_records = 0
        self._judged_at = time.monotonic()
        self._is_prompt = options.skip_above is not None
        self._callbacks: list[tuple[str, Callable[[WatchEvent], object]]] = []
        self._pending: deque[WatchEvent] = session.event_store.news
        self._is_off = False
        session.event_store.listeners.append(self)
        # A callback may hold the model, so this object is not held. With a callback no step waits.
        log = session.event_store.archive.log
        ended = weakref.finalize(
            session, _session_ended, self._waiting, self._pending, self._watcher, log
        )
        ended.atexit = False  # the stop handler finishes all then

    def on(self, kind: str, callback: Callable[[WatchEvent], object]) -> None:
        """Calls ``callback(event)`` at every event of this kind (docs/watch.md lists them), of
        ``"spike"`` (loss_spike, gradient_spike and explosion), or of ``"warning"``: of all that
        warn. It runs on the training thread, outside of all locks, and may raise: what it raises
        leaves the training loop there.

        Raises:
            ConfigError: there is no such kind, or ``callback`` can't be called with one argument.
        """
        check_callback(callback)
        self._callbacks.append((check_kind(kind), callback))
        self._is_prompt = True

    @property
    def events(self) -> tuple[WatchEvent, ...]:
        """The events of the run, oldest first; the youngest 4,096."""
        with self._lock:
            self._judge()
            return tuple(self._watcher.events)

    @property
    def warning_count(self) -> int:
        """The number of events that have warned."""
        with self._lock:
            self._judge()
            return self._watcher.warning_count

    def at_stop(self, tell_early: Callable[[], None]) -> Sequence[WatchEvent]:
        """The events of a run that stops now. Those of what ``tell_early()`` tells of don't warn:
        the stop does.
        """
        session = self._session()
        if session is None or self._is_off:
            return self.events
        with session.lock, self._lock:
            self._judge()
            step, log = session.step.index, session.event_store.archive.log
            try:
                self._take(self._watcher.add_facts(step))
                tell_early()
                _write(self._watcher.add_facts(step), log)
            except Exception as error:
                self._switch_off(error)
            return tuple(self._watcher.events)

    def lines(self) -> list[str]:
        """The events as text, for the summary: those that warn, or else the last events."""
        events = self.events
        shown = [event for event in events if event.is_warning] or events[-_SUMMARY_EVENTS:]
        lines = [str(event) for event in shown[:_SUMMARY_EVENTS]]
        left = len(events) - len(lines)
        return [*lines, f"and {left:,} more (monitor.watch.events)"] if left else lines

    def scalars(self) -> dict[str, float]:
        """Numbers for experiment trackers, by name: how many events there were, and how many of
        them warn. The caller holds the event store's lock.
        """
        self._judge()
        watcher = self._watcher
        return {"watch_events": watcher.count, "watch_warnings": watcher.warning_count}

    def norm_limit(self) -> Optional[float]:
        """The largest norm of all gradients that an update may have; None: any. Takes no lock."""
        return None if self._is_off else self._watcher.norm_limit

    def __repr__(self) -> str:
        with self._lock:
            self._judge()
        return f"<fastcheck watch: {self._watcher.count} events>"

    def step_ended(self, step: Step, rows: Sequence[StepRow], chunks: Sequence[np.ndarray]) -> None:
        """Takes in a step that is over, and judges the waiting steps if it is time."""
        if self._is_off:
            return
        # A step that is not read whole has nothing to compare, as one that is left out.
        is_whole = not self._has_counts or all((c["depth"] >= Depth.STATS).all() for c in chunks)
        whole = chunks if is_whole else ()
        self._waiting.append((rows, whole))
        self._waiting_records += sum(map(len, whole))
        is_late = time.monotonic() - self._judged_at >= _SECONDS
        factor = 2 if self._waiting_records < _FEW_RECORDS else 1
        are_many = len(self._waiting) >= factor * _TOGETHER or self._waiting_records > _MOST_RECORDS
        if self._is_prompt or is_late or are_many:
            self._judge()

    def run_ended(self) -> None:
        """Judges the steps that are left."""
        self._judge()

    def _judge(self) -> None:
        """Judges the steps that wait for it."""
        self._waiting_records, self._judged_at = 0, time.monotonic()
        if not self._waiting or self._is_off:
            return
        try:
            self._take(_judged(self._waiting, self._watcher))
        except Exception as error:
            self._switch_off(error)

    def setting_changed(self, name: str, before: Optional[float], after: float) -> None:
        """Takes in a changed number of the optimizer or of clipping."""
        # The rows of the steps have the learning rate.
        if not name.endswith(".lr") or before is None or is_jump(before, after):
            self._judge()  # it was not so in these
        self._watcher.setting(name, before, after)

    def noticed(self, step: int, name: str, value: float, about: str) -> None:
        """Takes in a fact of the training loop."""
        if not self._is_off:
            self._watcher.noticed(step, name, value, about)

    def replicas_differ(self, step: int, text: str) -> None:
        """Takes in what check_replicas() has found, and warned of: it explains a spike near it."""
        with self._lock:
            self._watcher.causes.note_fault(step)

    def last_batches(self, before: int, count: int) -> tuple[int, list[int]]:
        """The step of the last batch before the step before this step, and the checksums of so many
        up to it, as far as they are known.
        """
        with self._lock:
            self._judge()
            return self._watcher.last_batches(before - 1, count)

    def batches_are_one(self, step: int, count: int, ranks: str) -> None:
        """Takes in that these ranks have trained on the same batches."""
        with self._lock:
            self._watcher.noticed(step, "one_batch", count, ranks)

    def _take(self, events: Sequence[WatchEvent]) -> None:
        self._pending.extend(events)
        session = self._session()
        if session is None:
            return
        _write(events, session.event_store.archive.log)
        for event in events:
            if event.is_warning:
                for listener in session.event_store.listeners:
                    listener.warned(event.step, event.kind, event.text)

    def _switch_off(self, error: Exception) -> None:
        self._is_off = True
        session = self._session()
        if session is not None:
            text = f"the watch is switched off: {type(error).__name__}: {first_line(error)}"
            session.faults.notes[f"{text}. Everything else goes on."] = None

    def at_boundary(self) -> None:
        """Warns, and calls the callbacks: on the training thread, outside of all locks."""
        while self._pending:
            event = self._pending.popleft()
            if event.is_warning:
                warn(event.text, event.warning_class)
            for kind, callback in self._callbacks:
                if event.is_of(kind):
                    callback(event)


#: The rows and the records of a step that is over.
_Waiting = tuple[Sequence[StepRow], Sequence[np.ndarray]]


def _judged(waiting: list[_Waiting], watcher: Watcher) -> Sequence[WatchEvent]:
    """The events of the steps that wait, which wait no longer."""
    over, waiting[:] = list(waiting), []
    return watcher.add(*(((None, *rows[-1:])[-1], chunks) for rows, chunks in over))


def _write(events: Iterable[WatchEvent], log: Optional[RecordLog]) -> None:
    if log is not None:
        for event in events:
            log.append_line("watch", event.to_dict())


def _session_ended(
    waiting: list[_Waiting], pending: deque[WatchEvent], watcher: Watcher, log: Optional[RecordLog]
) -> None:
    """Warns of what is left when the session has been collected with its model."""
    with suppress(Exception):
        events = _judged(waiting, watcher) if waiting else ()
        _write(events, log)
        pending.extend(events)
    for event in pending:
        if event.is_warning:
            warn_of_fault(event.text, event.warning_class)


#: The types that ``install(watch=)`` takes.
WatchOption = Union[bool, Watch]
