"""The thread that now and then looks whether its rank has to be stood in for (what it does then:
_ranks).
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import weakref
from typing import Protocol

__all__ = ["StandIn"]


class Watched(Protocol):
    """Whose look() the thread calls."""

    def look(self) -> float:
        """Never raises, never waits long; returns the seconds until the next look."""
        ...


class StandIn:
    """Runs ``watched.look()`` from its own thread until stop(), or until ``watched`` is gone: it is
    held weakly.
    """

    def __init__(self, watched: Watched, first_seconds: float) -> None:
        # A SimpleQueue, whose put() the garbage collector may call in the middle of anything.
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_run,
            args=(weakref.ref(watched), first_seconds, self._wake),
            name="fastcheck-stand-in",
            daemon=True,
        )
        weakref.finalize(watched, self._wake.put, False)
        _live.add(self)
        self._thread.start()

    def wake(self) -> None:
        """The next look is now."""
        self._wake.put(True)

    def stop(self) -> None:
        """There is no further look. Doesn't wait for one that is under way."""
        self._wake.put(False)

    def join(self, timeout_seconds: float) -> None:
        """Waits for the end of the thread."""
        self._thread.join(timeout_seconds)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()


_live: weakref.WeakSet[StandIn] = weakref.WeakSet()


def _run(watched: weakref.ref[Watched], wait: float, wake: queue.SimpleQueue[bool]) -> None:
    while True:
        with contextlib.suppress(queue.Empty):
            if not wake.get(timeout=wait):
                return
        # Held only while it looks, so that it can go with its model.
        one = watched()
        if one is None:
            return
        wait = one.look()
        del one


@atexit.register
def _end_all() -> None:
    """A thread that comes back from C++ while the interpreter goes down would abort the process."""
    for stand_in in list(_live):
        stand_in.stop()
        stand_in.join(2.0)
