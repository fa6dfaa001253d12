"""ProxyThread: answers other ranks while this rank is not at a step boundary."""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import weakref
from typing import Protocol


class Watched(Protocol):
    """Whose poll() the thread calls."""

    def poll(self) -> float:
        """Never raises, never waits long; returns the seconds until the next call."""
        ...


class ProxyThread:
    """Runs ``watched.poll()`` from its own thread until stop(), or until ``watched`` is gone: it is
    held weakly.
    """

    def __init__(self, watched: Watched, first_seconds: float) -> None:
        # A SimpleQueue, whose put() the garbage collector may call in the middle of anything.
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_run,
            args=(weakref.ref(watched), first_seconds, self._wake),
            name="fastcheck-proxy",
            daemon=True,
        )
        weakref.finalize(watched, self._wake.put, False)
        _live.add(self)
        self._thread.start()

    def wake(self) -> None:
        """Calls poll() now."""
        self._wake.put(True)

    def stop(self) -> None:
        """poll() is not called again. Does not wait for a call that is under way."""
        self._wake.put(False)

    def join(self, timeout_seconds: float) -> None:
        """Waits for the end of the thread."""
        self._thread.join(timeout_seconds)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()


_live: weakref.WeakSet[ProxyThread] = weakref.WeakSet()


def _run(watched: weakref.ref[Watched], wait: float, wake: queue.SimpleQueue[bool]) -> None:
    while True:
        with contextlib.suppress(queue.Empty):
            if not wake.get(timeout=wait):
                return
        # Held only while it polls, so that it can go with its model.
        one = watched()
        if one is None:
            return
        wait = one.poll()
        del one


@atexit.register
def _end_all() -> None:
    """A thread that comes back from C++ while the interpreter goes down would abort the process."""
    for thread in list(_live):
        thread.stop()
        thread.join(2.0)
