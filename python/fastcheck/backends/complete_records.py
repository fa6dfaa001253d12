"""Writes complete records (value fields, identity, flags), on a device or in host slots."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Callable, Optional

import numpy as np
import torch

from fastcheck.backends.portable.constants import stream_key, upload
from fastcheck.backends.portable.traversal import dtype_and_order
from fastcheck.extension import extension, status
from fastcheck.record.format import (
    RECORD_BYTES,
    RECORD_DTYPE,
    RECORD_VERSION,
    Identity,
    identify,
    nonfinite,
    offset_of,
)

from .backend import Observe
from .table import backend_for

_CPU = torch.device("cpu")
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
    identities = tuple(dtype_and_order(tensor, logical) for tensor in tensors)
    mode = int(backend.device_mode)
    rows = _identified(device, stream_key(device), depth, mode, identities).clone()
    if len(tensors) == 1 and not logical:
        backend.observe(tensors[0], rows, 0, depth)
    else:
        backend.observe_list(tensors, rows, 0, depth, logical=logical)
    has_nonfinite = rows.view(torch.int64)[:, 1:4].any(1)
    rows.view(torch.int32)[:, _FLAGS].copy_(has_nonfinite)  # Flag.NONFINITE is 1
    return rows


@functools.lru_cache(maxsize=256)
def _identified(
    device: torch.device,
    stream: int,
    depth: int,
    device_mode: int,
    identities: tuple[tuple[int, int], ...],
) -> torch.Tensor:
    """Records without value fields: identity, depth and mode."""
    records = np.zeros(len(identities), RECORD_DTYPE)
    records["version"] = RECORD_VERSION
    records["dtype"] = [dtype for dtype, _ in identities]
    records["order"] = [order for _, order in identities]
    records["depth"] = depth
    records["device_mode"] = device_mode
    return upload(torch.from_numpy(records.view(np.uint8).reshape(-1, RECORD_BYTES)), device)


def host_observers() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """observe and observe_list, which write complete records of CPU tensors to host slots.

    Both have the arguments of the extension's functions of these names, and return how many records
    are non-finite (observe: whether). Without the extension the backend of the CPU writes the value
    fields, and NumPy the rest.
    """
    if status.module is not None:
        return extension.observe, extension.observe_list
    return observe_on_host, _observe_list_on_host


def observe_on_host(
    tensor: torch.Tensor,
    slots: torch.Tensor,
    index: int,
    depth: int,
    *identity: int,
    observe: Optional[Observe] = None,
) -> bool:
    """Writes a complete record of a CPU tensor to ``slots``, uint8 (n * 192,), by the backend's
    function or by ``observe``. ``identity``: site, call, step, seq and flags. Whether it is
    non-finite.
    """
    site, call, step, seq, flags = identity
    backend = backend_for(_CPU)
    (observe or backend.observe)(tensor, slots.view(-1, RECORD_BYTES), index, depth)
    records = _host_records(slots, index, 1)
    whole = Identity(seq, step, call, site, flags, *dtype_and_order(tensor), depth)
    identify(records, [whole], backend.device_mode)
    return bool(nonfinite(records)[0])


def _observe_list_on_host(
    tensors: Sequence[torch.Tensor],
    slots: torch.Tensor,
    first: int,
    depth: int,
    sites: Sequence[int],
    step: int,
    first_seq: int,
    flags: int,
) -> int:
    backend = backend_for(_CPU)
    backend.observe_list(tensors, slots.view(-1, RECORD_BYTES), first, depth)
    records = _host_records(slots, first, len(tensors))
    identities = [
        Identity(first_seq + i, step, 0, site, flags, *dtype_and_order(tensor), depth)
        for i, (tensor, site) in enumerate(zip(tensors, sites))
    ]
    identify(records, identities, backend.device_mode)
    return int(nonfinite(records).sum())


def _host_records(slots: torch.Tensor, first: int, count: int) -> np.ndarray:
    return slots.numpy().view(RECORD_DTYPE)[first : first + count]
