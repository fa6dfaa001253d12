"""The public functions stats(), checksum(), found_nonfinite() and exponents(); crc32(); the
checksums of a list; and ``torch.ops.fastcheck.*`` for all devices but the CPU, also in traced and
compiled code.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Union, overload

import torch

from fastcheck.backends import complete_records
from fastcheck.backends.table import backend_for, exponent_words
from fastcheck.errors import UnsupportedTensorError, choice
from fastcheck.extension import extension, status
from fastcheck.record.exponents import Exponents
from fastcheck.record.format import DEPTHS, ORDERS, RECORD_BYTES, Order, offset_of
from fastcheck.utils.torch.readable import (
    check,
    check_devices,
    check_list,
    not_a_tensor,
    without_bytes,
)

from .stats import Stats, StatsList

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
    return complete_records.record(x, depth, logical)


def _stats_list(xs: list[torch.Tensor], depth: int = 3, logical: bool = False) -> torch.Tensor:
    _check_depth(depth)
    check_list(xs)
    return complete_records.record_list(xs, depth, logical)


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
    """A field of a record, as a 0-dim view."""
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


_IS_COMPILED = status.module is not None
register()

#: The bytes of a tensor that are copied for zlib at a time.
_CRC_CHUNK_BYTES = 16 * 1024 * 1024


@overload
def stats(x: torch.Tensor, *, record: str = ..., order: str = ...) -> Stats: ...
@overload
def stats(x: Sequence[torch.Tensor], *, record: str = ..., order: str = ...) -> StatsList: ...
def stats(
    x: Union[torch.Tensor, Sequence[torch.Tensor]], *, record: str = "full", order: str = "storage"
) -> Union[Stats, StatsList]:
    """Counts, extremes, sums and checksum of a tensor, computed where the tensor lies.

    On the CPU every field has the same bits on every machine. Elsewhere too, but for the three sums
    on devices without a kernel, which are within 1e-6 of ``abs_sum`` (``sum_sq``: of itself).

    Args:
        x: a tensor of any shape, strides and supported dtype (float64/32/16, bfloat16,
            float8_e4m3fn, float8_e5m2, complex64/128, integers, bool), or a list or tuple of them:
            one call for all, all on one device. Any device: where no kernel is compiled for it,
            torch's own operations read the tensor there (``docs/backends.md``).
        record: what is computed, as for :func:`fastcheck.install`: ``"health"`` (counts alone),
            ``"stats"`` (also extremes and sums) or ``"full"`` (also the checksum).
        order: ``"storage"`` reads a dense tensor as it lies in memory, at full speed;
            ``"logical"`` always row by row, for comparing tensors of different strides.

    Returns:
        :class:`Stats`, or for a list a :class:`StatsList`, on the tensor's device. Computing does
        not synchronise; reading a field does. A list of sizes not seen before, or a dtype's first
        tensor on a device, copies a few constants there.

    Raises:
        UnsupportedTensorError: x can't be read; the message has what was expected and a hint.
        ConfigError: an unknown ``record`` or ``order``.
    """
    depth = int(DEPTHS[choice("record", record, DEPTHS)])
    logical = ORDERS[choice("order", order, ORDERS)] == Order.LOGICAL
    if isinstance(x, torch.Tensor):
        if not (_IS_COMPILED and x.is_cpu):
            check(x)
            return Stats(complete_records.record(x, depth, logical))
        try:
            return Stats(extension.record(x, depth, logical))
        except TypeError as error:
            raise UnsupportedTensorError(str(error)) from None
    if not isinstance(x, (list, tuple)):
        raise not_a_tensor(x, "a torch.Tensor or a list of them")
    if not _is_compiled_for(x[0] if x else None):
        check_list(x)
        return StatsList(complete_records.record_list(x, depth, logical))
    try:
        return StatsList(extension.record_list(x, depth, logical))
    except TypeError as error:
        check_devices(x)
        raise UnsupportedTensorError(str(error)) from None


def _is_compiled_for(x: object) -> bool:
    """True if the compiled extension handles ``x``: reads it, or raises for it."""
    return _IS_COMPILED and not (isinstance(x, torch.Tensor) and not x.is_cpu)


def checksum(x: torch.Tensor, *, order: str = "storage") -> int:
    """The 64-bit checksum of a tensor's bytes, sensitive to their order. Synchronises.

    Equal on every backend. ``order`` and errors as in :func:`stats`. For the checksum left on the
    device: ``stats(x)``. Specified in ``docs/record-format.md``.
    """
    if not isinstance(x, torch.Tensor):
        raise not_a_tensor(x)
    logical = ORDERS[choice("order", order, ORDERS)] == Order.LOGICAL
    check(x)
    return int(checksums([x], logical)) & 0xFFFFFFFFFFFFFFFF


def checksums(tensors: Sequence[torch.Tensor], logical: bool) -> torch.Tensor:
    """The checksums of readable tensors of one device, int64 (n,) there. Does not synchronise. The
    CPU's kernels compute nothing else.
    """
    backend = backend_for(tensors[0].device)
    if backend.checksums is not None:
        return backend.checksums(tensors, logical)
    records = complete_records.record_list(tensors, 3, logical)
    return records.view(torch.int64)[:, offset_of("checksum") // 8]


def crc32(x: torch.Tensor) -> int:
    """``zlib.crc32`` of the tensor's row-major bytes, by zlib itself, in chunks.

    For comparing with files and tools that hold CRC-32 (msprobe's md5 mode). Synchronises: a device
    tensor is copied to the host, 16 MiB at a time.

    Raises:
        UnsupportedTensorError: x is not a dense tensor with memory.
    """
    if not isinstance(x, torch.Tensor):
        raise not_a_tensor(x)
    problem = without_bytes(x)
    if problem is not None:
        raise UnsupportedTensorError(f"expected a dense tensor with memory, got {problem}")
    crc = 0
    for chunk in row_major_chunks(x.detach()):
        crc = zlib.crc32(chunk.numpy().data, crc)
    return crc


def row_major_chunks(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """Flat uint8 CPU tensors that follow each other in row-major order."""
    if x.numel() == 0:
        return
    if x.numel() * x.element_size() <= _CRC_CHUNK_BYTES:
        host = x.cpu().resolve_conj().resolve_neg().contiguous()
        # Not view(-1): a single element counts as contiguous whatever its stride.
        yield host.as_strided((host.numel(),), (1,)).view(torch.uint8)
        return
    rows = _CRC_CHUNK_BYTES * x.shape[0] // (x.numel() * x.element_size())
    for part in torch.split(x, rows) if rows > 0 else x.unbind(0):
        yield from row_major_chunks(part)


def found_nonfinite(tensors: Union[torch.Tensor, Iterable[torch.Tensor]]) -> torch.Tensor:
    """1.0 where any of the tensors holds a NaN or an infinity, else 0.0.

    A 0-dim float32 tensor on the tensors' device, as GradScaler's ``found_inf``: for optimizers and
    collectives. Does not synchronise. Errors as in :func:`stats`.
    """
    items = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    if not isinstance(items, Iterable):
        raise not_a_tensor(items, "tensors")
    listed = list(items)
    if not _is_compiled_for(listed[0] if listed else None):
        check_list(listed)
        device = listed[0].device if listed else torch.device("cpu")
        return backend_for(device).found_nonfinite(listed)
    try:
        return extension.found_nonfinite(listed)
    except TypeError as error:
        check_devices(listed)
        raise UnsupportedTensorError(str(error)) from None


def exponents(x: torch.Tensor, *, order: str = "storage") -> Exponents:
    """Counts the elements of a tensor in each binade, read where the tensor lies: which share of
    them a narrower format would lose, at any scale.

    The same counts on every device. Where a kernel is compiled for the device it reads the tensor
    once; elsewhere torch's own operations do.

    Args:
        x: a tensor of any shape and strides, of a floating-point or complex dtype (float64/32/16,
            bfloat16, float8_e4m3fn, float8_e5m2, complex64/128).
        order: as of :func:`stats`; it decides which elements are a block.

    Returns:
        :class:`Exponents`: NumPy arrays, and the shares that formats lose. Synchronises with the
        tensor's device: 2,624 bytes are copied to the host.

    Raises:
        UnsupportedTensorError: x can't be read, or has an integer dtype or bool.
        ConfigError: an unknown order.
    """
    logical = ORDERS[choice("order", order, ORDERS)] == Order.LOGICAL
    if not isinstance(x, torch.Tensor):
        raise not_a_tensor(x)
    if not (x.is_floating_point() or x.is_complex()):
        raise UnsupportedTensorError(
            f"expected a floating-point or complex dtype, got {x.dtype}: integers have no exponents"
        )
    check(x)
    return Exponents(exponent_words(x, logical).cpu().numpy())
