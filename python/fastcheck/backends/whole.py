"""Whole records on the device of the tensors they are of: value fields, identity and flags."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch

from .._record import RECORD_BYTES, RECORD_DTYPE, RECORD_VERSION, offset_of
from . import backend_for
from .portable_constants import stream_key, upload

__all__ = ["record", "record_list"]

_FLAGS = offset_of("flags") // 4  # 32-bit cell of the flags


def record(tensor: torch.Tensor, depth: int, logical: bool) -> torch.Tensor:
    """uint8 (192,) on the tensor's device, step and site zero. No synchronisation."""
    return record_list([tensor], depth, logical)[0]


def record_list(tensors: Sequence[torch.Tensor], depth: int, logical: bool) -> torch.Tensor:
    """uint8 (n, 192), all tensors on one device. No synchronisation."""
    if not tensors:
        return torch.empty((0, RECORD_BYTES), dtype=torch.uint8, device="cpu")
    device = tensors[0].device
    backend = backend_for(device)
    identities = tuple(backend.identity(tensor, logical) for tensor in tensors)
    mode = int(backend.device_mode)
    rows = _identified(device, stream_key(device), depth, mode, identities).clone()
    if logical:
        backend.observe_list_logical(tensors, rows, 0, depth)
    elif len(tensors) == 1:
        backend.observe(tensors[0], rows, 0, depth)
    else:
        backend.observe_list(tensors, rows, 0, depth)
    nonfinite = rows.view(torch.int64)[:, 1:4].any(1)
    rows.view(torch.int32)[:, _FLAGS].copy_(nonfinite)  # Flag.NONFINITE is 1
    return rows


@functools.lru_cache(maxsize=256)
def _identified(
    device: torch.device,
    stream: int,
    depth: int,
    device_mode: int,
    identities: tuple[tuple[int, int], ...],
) -> torch.Tensor:
    """Records that say nothing yet but what they are of."""
    records = np.zeros(len(identities), RECORD_DTYPE)
    records["version"] = RECORD_VERSION
    records["dtype"] = [dtype for dtype, _ in identities]
    records["order"] = [order for _, order in identities]
    records["depth"] = depth
    records["device_mode"] = device_mode
    return upload(torch.from_numpy(records.view(np.uint8).reshape(-1, RECORD_BYTES)), device)
