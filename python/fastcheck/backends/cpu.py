"""The backend of CPU tensors: the compiled extension's kernels."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from fastcheck.extension import extension
from fastcheck.record.format import VALUE_BYTES, DeviceMode

from .backend import Backend

__all__ = ["cpu_backend"]


def cpu_backend() -> Backend:
    """The backend of the compiled extension, which has to be there."""
    return Backend(
        name="cpu",
        determinism="bitwise",
        device_mode=DeviceMode.IEEE,
        observe=_observe,
        observe_list=_observe_list,
        found_nonfinite=extension.found_nonfinite,
        observe_list_logical=functools.partial(_observe_list, logical=True),
    )


def _observe(tensor: torch.Tensor, slots: torch.Tensor, index: int, depth: int) -> None:
    slots[index, :VALUE_BYTES] = extension.record(tensor, depth)[:VALUE_BYTES]


def _observe_list(
    tensors: Sequence[torch.Tensor],
    slots: torch.Tensor,
    first: int,
    depth: int,
    logical: bool = False,
) -> None:
    rows = extension.record_list(tensors, depth, logical)
    slots[first : first + len(tensors), :VALUE_BYTES] = rows[:, :VALUE_BYTES]
