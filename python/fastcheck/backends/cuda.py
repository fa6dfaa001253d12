"""The CUDA kernels of the compiled extension, where it was built with them and they can run.

Nothing here waits for the device. Records equal the CPU's bit for bit (``docs/determinism.md``).
"""

from __future__ import annotations

import functools
from typing import Any, Optional

import torch

from .._extension import status
from .._record import DeviceMode
from . import portable
from .entry import Backend

__all__ = ["entry", "problem"]


def problem(index: Optional[int] = None) -> Optional[str]:
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
    said: str = status.module.cuda_problem(device)
    return f"the kernels can't run: {said}" if said else None


def entry(module: Any) -> Backend:
    """The table's entry for what ``module``'s kernels read."""
    return Backend(
        name="cuda",
        is_immediate=False,
        determinism="bitwise",
        device_mode=DeviceMode.IEEE,
        has_host_flag=False,
        observe=module.cuda_observe,
        observe_list=module.cuda_observe_list,
        found_nonfinite=module.cuda_found_nonfinite,
        identity=portable.identity,
        is_capturable=True,
        observe_list_logical=functools.partial(module.cuda_observe_list, logical=True),
    )
