"""Launches the readings of operators on a device where the extension's ``DeviceLaunches`` can't: of
other backends, and the first of each stream and of each segment of a ring.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from types import FrameType
from typing import Any, Optional, Protocol

import torch

from fastcheck.backends.portable.traversal import dtype_and_order
from fastcheck.monitor.session.session import Session
from fastcheck.ring.device import DeviceRing
from fastcheck.utils.torch.streams import streams_of

_PACKAGES = ("torch", "fastcheck")

# A tensor to be read, and seq, step, call, site and flags of its record; or, if the last is True,
# the overflow status of its device.
Launch = tuple[torch.Tensor, int, int, int, int, int, bool]


def why_not(device: torch.device) -> str:
    """The reason why op level can't read a device without making the host wait; empty when it
    can.
    """
    if streams_of(device) is None:
        return f"torch.{device.type} has no streams and events"
    return ""


class Launching(Protocol):
    """The part of op level that the launcher uses."""

    session: Session
    #: The extension's DeviceLaunches.
    launches: Any

    def ring_for(self, tensor: torch.Tensor, site: int) -> Optional[DeviceRing]: ...


class Launcher:
    """Launches the readings of operators on devices. Called in the middle of an operator, on any
    thread. Has a weak reference to op level, and raises nothing into the operator.
    """

    def __init__(self, level: Launching) -> None:
        self._level = weakref.ref(level)

    def __call__(self, launches: Sequence[Launch]) -> None:
        """Has the tensors read, on the streams of their devices."""
        level = self._level()
        if level is None:
            return
        session = level.session
        with session.lock:
            for tensor, seq, step, call, site, flags, is_status in launches:
                try:
                    ring = level.ring_for(tensor, site)
                    if ring is None:
                        continue
                    if is_status:
                        session.rings.overflow.read_after_op(
                            ring, tensor.device, (seq, step, call, site)
                        )
                    else:
                        identity = dtype_and_order(tensor)
                        ring.observe(tensor, (seq, step, call, site, flags, *identity))
                        self._open(level, ring)
                except Exception as error:
                    session.faults.off_sites.add(site)
                    level.launches.clear_rows()
                    session.report_internal_error(
                        f"one operator's tensors on {tensor.device.type}", error
                    )

    def _open(self, level: Launching, ring: DeviceRing) -> None:
        """Lets what is read next on this stream need no call of Python, as long as there are rows
        and no site is left out.
        """
        direct, rows = ring.backend.direct_observe, ring.next_rows()
        if direct is not None and rows is not None and not level.session.faults.off_sites:
            level.launches.set_rows(direct, rows.slots, rows.identities, rows.cursor)


def where() -> str:
    """The line where Python is, outside of torch and of fastcheck: ``train.py:12 in forward``;
    empty where it is nowhere else.
    """
    frame: Optional[FrameType] = sys._getframe()
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).split(".", 1)[0]
        if package not in _PACKAGES and not package.startswith("_pytest"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
