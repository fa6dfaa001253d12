"""TouchedFile and SignalFlag: how a running program receives a request, by a file or a signal."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from types import FrameType
from typing import Any, Optional

from fastcheck.errors import ConfigError, explain

__all__ = ["SignalFlag", "TouchedFile"]

# How often the file is looked at, at most.
_SECONDS = 1.0


class TouchedFile:
    """A file whose time of modification changes, or that appears. It is left where it is, so that
    several processes can look at one.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._time = _modified(path)
        self._next = time.monotonic() + _SECONDS

    def take(self) -> bool:
        """Whether it was touched since the last call that looked; one ``stat`` in a second."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + _SECONDS
        before, self._time = self._time, _modified(self._path)
        return self._time is not None and self._time != before


def _modified(path: str) -> Optional[int]:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return None


class SignalFlag:
    """Set by a signal, whose former handler is called too, and put back by close().

    Raises ConfigError outside of the main thread, and for a signal that no program can handle.
    """

    def __init__(self, number: signal.Signals) -> None:
        self._number = number
        self._is_set = self._is_closed = False
        former = signal.getsignal(number)
        self._former: Any = former
        try:
            if former is None:
                raise ValueError(
                    "its handler was not installed by Python and could not be restored"
                )
            signal.signal(number, self._handle)
        except (OSError, ValueError) as error:
            raise ConfigError(
                explain(
                    f"signal={number.name} can't be handled",
                    expected="install() in the main thread of the main interpreter, and a signal "
                    "that a Python program may handle",
                    got=str(error),
                    hint="OnRequest(file=...) works in every thread",
                )
            ) from None

    def _handle(self, number: int, frame: Optional[FrameType]) -> None:
        self._is_set = not self._is_closed
        if callable(self._former):
            self._former(number, frame)

    def take(self) -> bool:
        """Whether the signal came since the last call."""
        was, self._is_set = self._is_set, False
        return was

    def close(self) -> None:
        """Puts the former handler back, unless another one was installed since (it may call this
        one), or another thread calls: then the signal does what it did before. Idempotent.
        """
        if self._is_closed:
            return
        self._is_closed = True
        while isinstance(owner := getattr(self._former, "__self__", None), SignalFlag):
            if not owner._is_closed:
                break
            self._former = owner._former
        # A bound method is another object each time, and equal.
        if signal.getsignal(self._number) == self._handle:
            with contextlib.suppress(ValueError):  # not the main thread
                signal.signal(self._number, self._former)
