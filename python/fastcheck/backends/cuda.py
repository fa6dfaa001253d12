"""The CUDA kernels of the compiled extension, where it was built with them and they can run.

Nothing here waits for the device. Records equal the CPU's bit for bit (``docs/determinism.md``).
"""

from __future__ import annotations

import functools
from typing import Any, Optional

import torch

from fastcheck.extension import status
from fastcheck.record.format import DeviceMode

from .backend import Backend, BlackBox

__all__ = ["cuda_backend", "cuda_problem"]


def cuda_problem(index: Optional[int] = None) -> Optional[str]:
    """Why tensors of this CUDA device are read by the portable backend; None where the kernels read
    them. The device (the current one by default) gets a context if it has none yet.
    """
    if status.module is None:
        return "there is no compiled extension"
    if not (status.accelerator or "").startswith("cuda"):
        return "the extension was built without the CUDA kernels"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    device = torch.cuda.current_device() if index is None else index
    reason: str = status.module.cuda_problem(device)
    return f"the kernels can't run: {reason}" if reason else None


def cuda_backend(module: Any) -> Backend:
    """The backend of the CUDA kernels of ``module``, the compiled extension."""
    return Backend(
        name="cuda",
        determinism="bitwise",
        device_mode=DeviceMode.IEEE,
        observe=module.cuda_observe,
        observe_list=module.cuda_observe_list,
        found_nonfinite=module.cuda_found_nonfinite,
        exponents=module.cuda_exponents,
        is_capturable=True,
        black_box=BlackBox(begin=module.cuda_begin_stretch, contents=module.cuda_box),
        exchange_capture_mode=module.cuda_exchange_capture_mode,
        observe_list_logical=functools.partial(module.cuda_observe_list, logical=True),
    )
