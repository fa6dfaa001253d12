"""Streams, events and pinned memory of one device, through the interface that CUDA, XPU and every
PrivateUse1 device have in common.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Optional

import torch

__all__ = ["DeviceStreams", "streams_of"]

_NEEDED = ("Stream", "Event", "current_stream", "stream")


class DeviceStreams:
    """Streams are used through the device's own module (``torch.cuda``, ``torch.npu``): old
    releases of torch have no generic ones.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = getattr(torch, device.type)

    def current(self) -> Any:
        """The stream on which the caller's work on this device is put."""
        return self._module.current_stream(self.device)

    def new_stream(self) -> Any:
        return self._module.Stream(device=self.device)

    def new_event(self) -> Any:
        return self._module.Event()

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Makes ``stream`` the current one within a ``with`` statement."""
        context: contextlib.AbstractContextManager[Any] = self._module.stream(stream)
        return context

    def pinned(self, rows: int, row_bytes: int) -> torch.Tensor:
        """A uint8 tensor of zeros on the host, to which the device can copy asynchronously."""
        rows_on_host = torch.zeros(rows, row_bytes, dtype=torch.uint8, device="cpu")
        return rows_on_host.pin_memory(**self._pin_arguments())

    def empty(self, rows: int, row_bytes: int) -> torch.Tensor:
        """A uint8 tensor on the device, of any contents."""
        return torch.empty(rows, row_bytes, dtype=torch.uint8, device=self.device)

    def _pin_arguments(self) -> dict[str, Any]:
        # The argument is deprecated, and its absence means the accelerator, since torch 2.8.
        return {} if hasattr(torch, "accelerator") else {"device": self.device.type}


@functools.cache
def streams_of(device: torch.device) -> Optional[DeviceStreams]:
    """None for a device without streams and events: what is not asynchronous there can't be read
    without making the host wait.
    """
    module: Any = getattr(torch, device.type, None)
    if module is None or not all(hasattr(module, name) for name in _NEEDED):
        return None
    return DeviceStreams(device)
