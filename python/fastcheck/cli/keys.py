"""Reads single keys from a terminal, without waiting for the end of a line."""

from __future__ import annotations

import os
import select
import sys
import time
from types import TracebackType
from typing import Any, Optional

__all__ = ["Keyboard"]

# What follows ESC [ or ESC O (ECMA-48; xterm's control sequences).
_SEQUENCES = {
    "A": "up",
    "B": "down",
    "H": "home",
    "1~": "home",
    "5~": "pageup",
    "6~": "pagedown",
}
_CONTROLS = {"\r": "enter", "\n": "enter", "\x7f": "backspace", "\x08": "backspace"}


class Keyboard:
    """Within a ``with`` statement the terminal of standard input hands over each key at once, and
    shows none. Where standard input is no terminal (or this system has no termios), there are no
    keys.
    """

    def __init__(self) -> None:
        self._descriptor: Optional[int] = None
        self._before: Optional[list[Any]] = None

    def __enter__(self) -> Keyboard:
        try:
            import termios
            import tty
        except ImportError:  # not a POSIX system
            return self
        try:
            if sys.stdin is None or not sys.stdin.isatty():
                return self
            descriptor = sys.stdin.fileno()
            self._before = termios.tcgetattr(descriptor)
            # DRAIN: keys that were pressed before stay.
            tty.setcbreak(descriptor, termios.TCSADRAIN)
            self._descriptor = descriptor
        except (OSError, ValueError, termios.error):
            self._before = None
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        if self._before is None or self._descriptor is None:
            return
        import termios

        termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._before)
        self._before = self._descriptor = None

    @property
    def has_keys(self) -> bool:
        """Whether keys are read."""
        return self._descriptor is not None

    def wait(self, seconds: float) -> list[str]:
        """The keys that are pressed within this time, as soon as there are some: characters, and
        ``up``, ``down``, ``pageup``, ``pagedown``, ``home``, ``enter``, ``backspace``, ``escape``.
        """
        if self._descriptor is None:
            time.sleep(seconds)
            return []
        ready, _, _ = select.select([self._descriptor], [], [], seconds)
        if not ready:
            return []
        data = os.read(self._descriptor, 1024)
        if not data:  # the terminal is gone
            self._before = self._descriptor = None
            return ["q"]
        return parse_keys(data.decode(errors="ignore"))


def parse_keys(text: str) -> list[str]:
    """The keys that a terminal sends as ``text``; those without a name are left out."""
    keys: list[str] = []
    at = 0
    while at < len(text):
        one = text[at]
        at += 1
        if one == "\x1b" and text[at : at + 1] in ("[", "O"):
            end = at + 1
            while end < len(text) and not "@" <= text[end] <= "~":
                end += 1
            keys.append(_SEQUENCES.get(text[at + 1 : end + 1], ""))
            at = end + 1
        elif one == "\x1b":
            keys.append("escape")
        else:
            keys.append(_CONTROLS.get(one, one if one.isprintable() else ""))
    return [key for key in keys if key]
