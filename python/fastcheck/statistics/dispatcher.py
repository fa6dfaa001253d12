"""``torch.ops.fastcheck.*`` for all devices but the CPU, also in traced and compiled code."""

from __future__ import annotations

from typing import Any

import torch

from fastcheck.backends.complete_records import record, record_list
from fastcheck.backends.table import backend_for
from fastcheck.extension import status
from fastcheck.record.format import RECORD_BYTES, offset_of
from fastcheck.utils.torch.readable import check, check_list

_library: Any = None


def register() -> None:
    """Registers the implementations once; the extension has the schemas and the CPU and meta
    kernels.
    """
    global _library
    if status.module is None or _library is not None:
        return
    make: Any = torch.library.Library  # untyped
    _library = make("fastcheck", "IMPL")
    for name, kernel in (
        ("stats", _stats),
        ("stats_list", _stats_list),
        ("checksum", _checksum),
        ("found_nonfinite", _found_nonfinite),
        ("observe_", _observe),
    ):
        _library.impl(name, kernel, "CompositeExplicitAutograd")


def _stats(x: torch.Tensor, depth: int = 3, logical: bool = False) -> torch.Tensor:
    _check_depth(depth)
    check(x)
    return record(x, depth, logical)


def _stats_list(xs: list[torch.Tensor], depth: int = 3, logical: bool = False) -> torch.Tensor:
    _check_depth(depth)
    check_list(xs)
    return record_list(xs, depth, logical)


def _checksum(x: torch.Tensor, logical: bool = False) -> torch.Tensor:
    return _cells(_stats(x, 3, logical), torch.int64, "checksum").clone()


def _found_nonfinite(xs: list[torch.Tensor]) -> torch.Tensor:
    check_list(xs)
    device = xs[0].device if xs else torch.device("cpu")
    return backend_for(device).found_nonfinite(xs)


def _observe(
    x: torch.Tensor,
    slots: torch.Tensor,
    index: int,
    depth: int,
    site: int,
    call: int,
    step: int,
    seq: int,
    flags: int,
) -> None:
    _check_slots(x, slots, index)
    row = _stats(x, depth)
    for name, dtype, value in (
        ("seq", torch.int64, seq),
        ("step", torch.int64, step),
        ("call", torch.int32, call),
        ("site", torch.int32, site),
    ):
        _cells(row, dtype, name).fill_(value)
    _cells(row, torch.int32, "flags").bitwise_or_(flags)
    slots.view(-1, RECORD_BYTES)[index].copy_(row)


def _cells(row: torch.Tensor, dtype: torch.dtype, field: str) -> torch.Tensor:
    """0-dim: a field of a record, in its place."""
    return row.view(dtype)[offset_of(field) // dtype.itemsize]


def _check_depth(depth: int) -> None:
    if not 1 <= depth <= 3:
        raise ValueError(f"expected depth 1 (health), 2 (stats) or 3 (full), got {depth}")


def _check_slots(x: torch.Tensor, slots: torch.Tensor, index: int) -> None:
    if slots.dtype != torch.uint8 or slots.device != x.device or not slots.is_contiguous():
        raise ValueError(
            f"expected slots in a contiguous uint8 tensor on {x.device}, "
            f"got {slots.dtype} on {slots.device}"
        )
    capacity = slots.numel() // RECORD_BYTES
    if not 0 <= index < capacity:
        raise IndexError(f"expected slots within a ring of {capacity}, got {index}")
