"""Launches the readings of operators on a device, and notes their Python lines."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import CodeType, FrameType
from typing import Any, Optional, Protocol

import torch

from fastcheck.backends.portable.traversal import dtype_and_order
from fastcheck.monitor.session.overflow_status import StatusReader
from fastcheck.ring.device import DeviceRing
from fastcheck.utils.torch.streams import streams_of

__all__ = ["Launch", "Launcher", "LineNumbers", "where", "why_not"]

_PACKAGES = ("torch", "fastcheck")
_MAX_LINES = 65536

# A tensor to be read, and seq, step, call, site and flags of its record; or, if the last is True,
# the overflow status of its device.
Launch = tuple[torch.Tensor, int, int, int, int, int, bool]
Line = tuple[CodeType, int]


def why_not(device: torch.device) -> str:
    """Why op level can't read a device without making the host wait; empty when it can."""
    if streams_of(device) is None:
        return f"torch.{device.type} has no streams and events"
    return ""


class Launching(Protocol):
    """The part of the session that the launcher uses."""

    lock: AbstractContextManager[Any]
    off_sites: set[int]
    overflow: StatusReader

    def ring_for(self, tensor: torch.Tensor, site: int) -> Optional[DeviceRing]: ...

    def report_internal_error(self, where: str, error: Exception) -> None: ...


class Launcher:
    """Called by the observer in the middle of an operator, on any thread. It has a weak reference
    to the session, and raises nothing into the operator.
    """

    def __init__(self, session: Launching) -> None:
        self._session = weakref.ref(session)
        #: Of the open step; its judge keeps them.
        self.lines = LineNumbers()

    def __call__(self, launches: Sequence[Launch]) -> None:
        """Has the tensors read, on the streams of their devices."""
        session = self._session()
        if session is None:
            return
        with session.lock:
            self.lines.add([row[1] for row in launches])
            for tensor, seq, step, call, site, flags, is_status in launches:
                try:
                    ring = session.ring_for(tensor, site)
                    if ring is None:
                        continue
                    if is_status:
                        session.overflow.read_after_op(ring, tensor.device, (seq, step, call, site))
                    else:
                        identity = dtype_and_order(tensor)
                        ring.observe(tensor, (seq, step, call, site, flags, *identity))
                except Exception as error:
                    session.off_sites.add(site)
                    session.report_internal_error(
                        f"one operator's tensors on {tensor.device.type}", error
                    )


class LineNumbers:
    """The Python line at which each record was requested. Kept for every record of a step: the
    culprit's is known when its record arrives, and only that one is formatted.
    """

    def __init__(self) -> None:
        self._of: dict[int, Line] = {}

    def add(self, seqs: Sequence[int]) -> None:
        """These records are requested at the current Python line."""
        line = _line()
        if line is not None:
            if len(self._of) > _MAX_LINES:
                self._of.clear()
            for seq in seqs:
                self._of[seq] = line

    def of(self, seq: int) -> str:
        """``train.py:12 in forward``; empty where it is not known."""
        return _spelt(self._of.get(seq))


def where() -> str:
    """Where Python is, outside of torch and of fastcheck."""
    return _spelt(_line())


def _spelt(line: Optional[Line]) -> str:
    if line is None:
        return ""
    code, number = line
    return f"{code.co_filename}:{number} in {code.co_name}"


def _line() -> Optional[Line]:
    frame: Optional[FrameType] = sys._getframe()
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).split(".", 1)[0]
        if package not in _PACKAGES and not package.startswith("_pytest"):
            return frame.f_code, frame.f_lineno
        frame = frame.f_back
    return None
