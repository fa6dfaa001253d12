"""The table of backends: which backend reads the tensors of a device, and counts their
exponents.
"""

from __future__ import annotations

import functools
from typing import Callable, Optional

import torch

from fastcheck.kernels import kernels
from fastcheck.record.format import Depth
from fastcheck.utils.torch.streams import DeviceStreams, streams_of

from . import cuda, npu
from .backend import Backend
from .cpu import cpu_backend
from .portable import backend as portable
from .portable.exponents import count_exponents
from .triton import backend as triton


@functools.cache
def _of_type(device_type: str, index: Optional[int] = None) -> Backend:
    if triton.triton_problem(device_type) is None:
        return triton.triton_backend(device_type)
    module = kernels()
    if device_type == "cpu" and module is not None:
        return cpu_backend(module)
    if device_type == "cuda" and cuda.cuda_problem(index) is None:
        return cuda.cuda_backend()
    return portable.portable_backend(device_type)


#: Types of device whose overflow mode or overflow status depends on the device.
_COMPLETED: dict[str, Callable[[Backend, torch.device], Backend]] = {
    "mlu": npu.mlu_backend,
    "npu": npu.npu_backend,
}


@functools.cache
def _completed(device: torch.device, kernels: Backend) -> Backend:
    return _COMPLETED[device.type](kernels, device)


def backend_for(device: torch.device) -> Backend:
    """The backend that reads tensors on ``device``."""
    # Kernels may run on one GPU and not on another; a query of another GPU would start it.
    kernels = _of_type(device.type, device.index if device.type == "cuda" else None)
    return _completed(device, kernels) if device.type in _COMPLETED else kernels


def prepare(device: torch.device) -> None:
    """Loads what reads the tensors of a device, before the first is read. CUDA loads the code of a
    kernel at its first launch, and that may wait for the device: of our kernels, and of those by
    which torch fills the buffers of a launch. For install(), which may wait.
    """
    backend_for(device)
    if device.type == "cuda":
        for dtype in (torch.int32, torch.float32):
            torch.zeros(1, dtype=dtype, device=device)


def guarded_streams(device: torch.device) -> Optional[DeviceStreams]:
    """The streams of a device, whose ``is_done`` ends no capture of a graph; None where it has no
    streams and events.
    """
    streams = streams_of(device)
    if streams is not None:
        streams.exchange_capture_mode = backend_for(device).exchange_capture_mode
    return streams


def exponent_words(tensor: torch.Tensor, logical: bool = False) -> torch.Tensor:
    """int64 (328,) on the tensor's device (``docs/record-format.md``, section 10). The tensor is
    readable, of a floating-point or complex dtype. Without synchronisation, outside of autograd.
    """
    count = backend_for(tensor.device).exponents or count_exponents
    return count(tensor, logical)


def observe_and_count(tensor: torch.Tensor, slots: torch.Tensor, index: int) -> torch.Tensor:
    """Writes ``slots[index]`` as ``Backend.observe`` at full depth, and returns the tensor's
    ``exponent_words``: in one pass over its memory where the backend has that.
    """
    backend = backend_for(tensor.device)
    if backend.observe_and_count is not None:
        return backend.observe_and_count(tensor, slots, index)
    backend.observe(tensor, slots, index, Depth.FULL)
    return exponent_words(tensor)
