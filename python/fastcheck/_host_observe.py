"""How the ring of the host has a CPU tensor read: by the compiled extension or, without it, by the
portable backend, which leaves all but the value fields of a record to its caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import numpy as np
import torch

from ._extension import extension, status
from ._record import RECORD_BYTES, RECORD_DTYPE, Identity, identify, nonfinite
from .backends import backend_for

__all__ = ["host_observers"]

_CPU = torch.device("cpu")


def host_observers() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """observe and observe_list, with the arguments that the extension's have."""
    if status.module is not None:
        return extension.observe, extension.observe_list
    return _observe, _observe_list


def _observe(
    tensor: torch.Tensor,
    slots: torch.Tensor,
    index: int,
    depth: int,
    site: int,
    call: int,
    step: int,
    seq: int,
    flags: int,
) -> bool:
    backend = backend_for(_CPU)
    backend.observe(tensor, slots.view(-1, RECORD_BYTES), index, depth)
    records = _records(slots, index, 1)
    identity = Identity(seq, step, call, site, flags, *backend.identity(tensor, False))
    identify(records, [identity], depth, backend.device_mode)
    return bool(nonfinite(records)[0])


def _observe_list(
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
    records = _records(slots, first, len(tensors))
    identities = [
        Identity(first_seq + i, step, 0, site, flags, *backend.identity(tensor, False))
        for i, (tensor, site) in enumerate(zip(tensors, sites))
    ]
    identify(records, identities, depth, backend.device_mode)
    return int(nonfinite(records).sum())


def _records(slots: torch.Tensor, first: int, count: int) -> np.ndarray:
    records: np.ndarray = slots.numpy().view(RECORD_DTYPE)[first : first + count]
    return records
