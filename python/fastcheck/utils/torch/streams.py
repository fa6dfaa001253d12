"""Streams, events and pinned memory of a device, by the interface of CUDA, XPU and PrivateUse1."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Optional

import torch

from fastcheck.extension import status

# cudaStreamCaptureModeRelaxed
_RELAXED = 2

_NEEDED = ("Stream", "Event", "current_stream", "stream", "device")


class DeviceStreams:
    """Streams are used through the device's own module (``torch.cuda``, ``torch.npu``): old
    releases of torch have no generic streams.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = getattr(torch, device.type)
        self._current_handle = _current_stream_function(device)
        self._known: dict[Any, Any] = {}
        #: The backend's function of this name; None where a query of an event ends no capture.
        self.exchange_capture_mode: Optional[Callable[[int], int]] = None

    def current(self) -> Any:
        if self._current_handle is None:
            return self._module.current_stream(self.device)
        # A tenth of the module's time; but events of some devices take only their own class of
        # streams.
        key = self._current_handle(self.device.index)
        if key not in self._known:
            self._known[key] = self._module.current_stream(self.device)
        return self._known[key]

    def here(self) -> contextlib.AbstractContextManager[Any]:
        """Makes this device the current device within a ``with`` statement. torch does not do so
        for questions about events, and a call of CUDA's runtime makes a context on the device that
        is current: in a thread that has chosen none, on device 0.
        """
        return self._module.device(self.device)

    def is_capturing(self) -> bool:
        """True if work on the current stream is captured into a graph; True where the device has no
        such query.
        """
        query = getattr(self._module, "is_current_stream_capturing", None)
        if query is None:
            return True
        with self.here():
            return bool(query())

    def is_done(self, event: Any) -> bool:
        """True if the device has passed an event. Does not wait, and ends no capture of a graph
        that another thread has under way.
        """
        exchange = self.exchange_capture_mode
        with self.here():
            before = -1 if exchange is None else exchange(_RELAXED)
            try:
                return bool(event.query())
            finally:
                if exchange is not None and before >= 0:
                    exchange(before)

    def wait_for(self, event: Any) -> None:
        """Returns when the device has passed an event."""
        with self.here():
            event.synchronize()

    def new_stream(self) -> Any:
        return self._module.Stream(device=self.device)

    def new_event(self) -> Any:
        return self._module.Event()

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Makes ``stream`` the current stream within a ``with`` statement."""
        return self._module.stream(stream)

    def copy_rows(self, stream: Any, source: torch.Tensor, to: torch.Tensor, count: int) -> None:
        """Puts a copy of the first rows on ``stream``. Does not wait."""
        if status.module is not None and isinstance(stream, torch.Stream):
            place = stream.stream_id, stream.device_index, stream.device_type
            status.module.copy_rows(source, to, count, *place)
            return
        with self.on(stream):
            to[:count].copy_(source[:count], non_blocking=True)

    def pinned(self, rows: int, row_bytes: int) -> torch.Tensor:
        """A uint8 tensor of zeros on the host, to which the device can copy asynchronously."""
        rows_on_host = torch.zeros(rows, row_bytes, dtype=torch.uint8, device="cpu")
        # The argument is deprecated, and its absence means the accelerator, since torch 2.8.
        return rows_on_host.pin_memory(
            **({} if hasattr(torch, "accelerator") else {"device": self.device.type})
        )

    def empty(self, rows: int, row_bytes: int) -> torch.Tensor:
        """A uint8 tensor on the device, whose contents are not set."""
        return torch.empty(rows, row_bytes, dtype=torch.uint8, device=self.device)


def _current_stream_function(device: torch.device) -> Optional[Callable[[int], torch.Stream]]:
    """torch's C function for the current stream; None where torch (since 2.6) or the device lacks
    it.
    """
    query: Optional[Callable[[int], torch.Stream]] = getattr(
        torch._C, "_accelerator_getStream", None
    )
    if query is None or device.index is None or device.type != torch._C._get_accelerator().type:
        return None
    return query


def stream_handle(stream: Any) -> int:
    """The device runtime's handle of a stream, for launching kernels; 0 where torch has none. On
    torch_npu the call may wait for the host's queue of launches, never for the device.
    """
    try:
        return int(stream.native_handle)
    except (AttributeError, RuntimeError, NotImplementedError):
        # torch has it from 2.12 on, and torch_mlu doesn't override what that calls.
        names = ("cuda_stream", "npu_stream", "mlu_stream", "sycl_queue")
        return next((int(getattr(stream, name)) for name in names if hasattr(stream, name)), 0)


@functools.cache
def streams_of(device: torch.device) -> Optional[DeviceStreams]:
    """The streams of a device; None for a device without streams and events, which can't be read
    without making the host wait.
    """
    module: Any = getattr(torch, device.type, None)
    if module is None or not all(hasattr(module, name) for name in _NEEDED):
        return None
    return DeviceStreams(device)
