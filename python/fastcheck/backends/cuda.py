"""The CUDA kernels, where they were built and can run.

Nothing here waits for the device. Records equal the CPU's bit for bit (``docs/determinism.md``).
"""

from __future__ import annotations

import functools
from typing import Any, Optional

import torch

from fastcheck.extension import status as extension_status
from fastcheck.kernels import kernels
from fastcheck.kernels import status as kernel_status
from fastcheck.record.format import DeviceMode

from . import cuda_launches
from .backend import Backend, BlackBox

__all__ = ["cuda_backend", "cuda_problem"]


def cuda_problem(index: Optional[int] = None) -> Optional[str]:
    """Why tensors of this CUDA device are read by the portable backend; None where the kernels read
    them. The device (the current one by default) gets a context if it has none yet.
    """
    module = kernels()
    if module is None:
        return "there are no compiled kernels"
    if not (kernel_status.accelerator or "").startswith("cuda"):
        return "the extension was built without the CUDA kernels"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    device = torch.cuda.current_device() if index is None else index
    if extension_status.module is not None:
        reason: str = extension_status.module.cuda_problem(device)
    else:
        reason = cuda_launches.problem(module, device)
    return f"the kernels can't run: {reason}" if reason else None


def cuda_backend() -> Backend:
    """The backend of the CUDA kernels, which are there. The compiled extension launches them, or
    Python where there is none for this torch.
    """
    if extension_status.module is not None:
        return backend_of(extension_status.module)
    return backend_of(cuda_launches.Launches(kernels(), torch.cuda))


def backend_of(launches: Any) -> Backend:
    """The backend of an object with the ``cuda_`` functions of the extension. Python's launches
    have no black box, and no function for C++.
    """
    box = getattr(launches, "cuda_box", None)
    direct = getattr(launches, "cuda_direct_observe", None)
    return Backend(
        name="cuda",
        determinism="bitwise",
        device_mode=DeviceMode.IEEE,
        observe=launches.cuda_observe,
        observe_list=launches.cuda_observe_list,
        found_nonfinite=launches.cuda_found_nonfinite,
        exponents=launches.cuda_exponents,
        observe_and_count=launches.cuda_observe_and_count,
        is_capturable=True,
        black_box=None
        if box is None
        else BlackBox(begin=launches.cuda_begin_stretch, contents=box),
        exchange_capture_mode=launches.cuda_exchange_capture_mode,
        direct_observe=None if direct is None else direct(),
        observe_list_logical=functools.partial(launches.cuda_observe_list, logical=True),
    )
