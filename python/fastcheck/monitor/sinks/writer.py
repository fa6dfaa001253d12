"""SinkWriter: a queue and a thread that writes to the sinks; training does not wait for them."""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Callable, Optional

from .sink import ScalarSink

# Steps that may wait to be written; the ones that find no room are left out.
_MOST = 1024
# How long the end of a run waits for what is still to be written.
_CLOSE_SECONDS = 10.0


@dataclass(frozen=True)
class Entry:
    """What is to be written of one step; ``alert``: a title and a text."""

    step: int
    scalars: dict[str, float] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    alert: Optional[tuple[str, str]] = None


class SinkWriter:
    """``on_failure(sink, error)`` is called once for each sink that fails, which gets nothing from
    then on.
    """

    def __init__(
        self, sinks: Sequence[ScalarSink], on_failure: Callable[[ScalarSink, Exception], None]
    ) -> None:
        self._sinks = list(sinks)
        self._on_failure = on_failure
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
            _write(make, self._sinks, self._on_failure)
            return
        if may_drop and self._queue.qsize() >= _MOST:
            self.dropped += 1
            return
        if self._thread is None:
            self._thread = threading.Thread(
                target=_run,
                args=(self._queue, self._sinks, self._on_failure),
                name="fastcheck-sinks",
                daemon=True,
            )
            self._thread.start()
            _live.add(self)
        self._queue.put(make)

    def close(self, seconds: float = _CLOSE_SECONDS) -> bool:
        """Waits until all is written, not longer than ``seconds``. False: some of it is not yet."""
        self._is_closed = True
        thread, self._thread = self._thread, None
        if thread is None or thread is threading.current_thread():
            return True
        self._queue.put(None)
        thread.join(seconds)
        return not thread.is_alive()


_live: weakref.WeakSet[SinkWriter] = weakref.WeakSet()


def _run(
    waiting: queue.SimpleQueue[Optional[Callable[[], Entry]]],
    sinks: list[ScalarSink],
    on_failure: Callable[[ScalarSink, Exception], None],
) -> None:
    """The thread. It does not hold the writer, which a deleted model takes along."""
    while True:
        make = waiting.get()
        if make is None:
            break
        _write(make, sinks, on_failure)
        del make  # it holds the session while the thread waits
    for sink in list(sinks):
        _attempt(sinks, sink, on_failure, getattr(sink, "close", lambda: None))


def _write(
    make: Callable[[], Entry],
    sinks: list[ScalarSink],
    on_failure: Callable[[ScalarSink, Exception], None],
) -> None:
    made: list[Entry] = []  # by the first sink's attempt: an error in it is one of all sinks
    for sink in list(sinks):
        _attempt(sinks, sink, on_failure, _write_to, sink, make, made)


def _write_to(sink: Any, make: Callable[[], Entry], made: list[Entry]) -> None:
    if not made:
        made.append(make())
    entry = made[0]
    if entry.scalars:
        sink.log(entry.scalars, entry.step)
    if hasattr(sink, "text"):
        for name, text in entry.texts.items():
            sink.text(name, text, entry.step)
    if entry.alert is not None and hasattr(sink, "alert"):
        sink.alert(*entry.alert, entry.step)


def _attempt(
    sinks: list[ScalarSink],
    sink: ScalarSink,
    on_failure: Callable[[ScalarSink, Exception], None],
    method: Callable[..., Any],
    *args: Any,
) -> None:
    try:
        method(*args)
    except Exception as error:
        sinks.remove(sink)
        with contextlib.suppress(Exception):  # a warning may be an error here
            on_failure(sink, error)


@atexit.register
def _close_all() -> None:
    for writer in list(_live):
        writer.close()
