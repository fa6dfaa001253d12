"""What reads tensors on each kind of device: the table of backends."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Callable, Optional

import torch

from .._extension import extension, status
from .._record import DeviceMode
from . import cuda, mlu, npu, portable, triton
from .entry import Backend

__all__ = ["Backend", "backend_for"]


def _cpu_observe(tensor: torch.Tensor, slots: torch.Tensor, index: int, depth: int) -> None:
    row = extension.record(tensor, depth)
    slots[index, : portable.VALUE_BYTES] = row[: portable.VALUE_BYTES]


def _cpu_observe_list(
    tensors: Sequence[torch.Tensor],
    slots: torch.Tensor,
    first: int,
    depth: int,
    logical: bool = False,
) -> None:
    rows = extension.record_list(tensors, depth, logical)
    slots[first : first + len(tensors), : portable.VALUE_BYTES] = rows[:, : portable.VALUE_BYTES]


#: Devices whose arithmetic is known to have infinities and NaN as IEEE 754 has them.
_IEEE = frozenset({"cpu", "cuda", "xpu", "mps"})


def _portable(device_type: str) -> Backend:
    return Backend(
        name="portable",
        is_immediate=device_type == "cpu",
        determinism="sums",
        device_mode=DeviceMode.IEEE if device_type in _IEEE else DeviceMode.UNKNOWN,
        has_host_flag=False,
        observe=portable.observe,
        observe_list=portable.observe_list,
        found_nonfinite=portable.found_nonfinite,
        identity=portable.identity,
        observe_list_logical=portable.observe_list_logical,
    )


@functools.cache
def _of_type(device_type: str, index: Optional[int] = None) -> Backend:
    if triton.problem(device_type) is None:
        return triton.entry(device_type)
    if device_type == "cpu" and status.module is not None:
        return Backend(
            name="cpu",
            is_immediate=True,
            determinism="bitwise",
            device_mode=DeviceMode.IEEE,
            has_host_flag=False,
            observe=_cpu_observe,
            observe_list=_cpu_observe_list,
            found_nonfinite=extension.found_nonfinite,
            identity=portable.identity,
            observe_list_logical=functools.partial(_cpu_observe_list, logical=True),
        )
    if device_type == "cuda" and cuda.problem(index) is None:
        return cuda.entry(status.module)
    return _portable(device_type)


#: Types of device of which more is to be said than which kernels read them.
_COMPLETED: dict[str, Callable[[Backend, torch.device], Backend]] = {
    "mlu": mlu.completed,
    "npu": npu.completed,
}


@functools.cache
def _completed(device: torch.device, kernels: Backend) -> Backend:
    return _COMPLETED[device.type](kernels, device)


def backend_for(device: torch.device) -> Backend:
    """The backend that reads tensors on ``device``."""
    # Kernels may run on one GPU and not on another; asking another one would wake it.
    kernels = _of_type(device.type, device.index if device.type == "cuda" else None)
    return _completed(device, kernels) if device.type in _COMPLETED else kernels
