"""Streams, events and pinned memory of one device, through the interface that CUDA, XPU and every
PrivateUse1 device have in common.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Optional

import torch

__all__ = ["DeviceStreams", "stream_handle", "streams_of"]

_NEEDED = ("Stream", "Event", "current_stream", "stream")


class DeviceStreams:
    """Streams are used through the device's own module (``torch.cuda``, ``torch.npu``): old
    releases of torch have no generic ones.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = getattr(torch, device.type)
        self._ask = _asker(device)
        self._known: dict[Any, Any] = {}

    def current(self) -> Any:
        """The stream on which the caller's work on this device is put."""
        if self._ask is None:
            return self._module.current_stream(self.device)
        # A tenth of the time of asking the module; but an event of some devices takes their own
        # class of streams only.
        key = self._ask(self.device.index)
        stream = self._known.get(key)
        if stream is None:
            stream = self._known[key] = self._module.current_stream(self.device)
        return stream

    def is_capturing(self) -> bool:
        """Whether what is put on the current stream becomes part of a graph; true where nothing
        tells.
        """
        ask = getattr(self._module, "is_current_stream_capturing", None)
        return True if ask is None else bool(ask())

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


def _asker(device: torch.device) -> Optional[Callable[[int], torch.Stream]]:
    """What tells the current stream in C; None where torch (2.6 has it) or the device lacks it."""
    ask: Optional[Callable[[int], torch.Stream]] = getattr(torch._C, "_accelerator_getStream", None)
    if ask is None or device.index is None or device.type != torch._C._get_accelerator().type:
        return None
    return ask


def stream_handle(stream: Any) -> int:
    """The device runtime's own handle of a stream, as kernels are launched on it; 0 where nothing
    tells it. On torch_npu asking may wait for the host's queue of launches, never for the device.
    """
    try:
        return int(stream.native_handle)
    except (AttributeError, RuntimeError, NotImplementedError):
        # torch has it from 2.12 on, and torch_mlu doesn't override what that asks.
        names = ("cuda_stream", "npu_stream", "mlu_stream", "sycl_queue")
        return next((int(getattr(stream, name)) for name in names if hasattr(stream, name)), 0)


@functools.cache
def streams_of(device: torch.device) -> Optional[DeviceStreams]:
    """None for a device without streams and events: what is not asynchronous there can't be read
    without making the host wait.
    """
    module: Any = getattr(torch, device.type, None)
    if module is None or not all(hasattr(module, name) for name in _NEEDED):
        return None
    return DeviceStreams(device)
