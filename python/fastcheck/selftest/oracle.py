"""Reference records of small CPU tensors, in NumPy.

``fastcheck selftest`` compares a backend with it if there is no compiled extension, and otherwise
the extension itself. Written from ``docs/record-format.md``, on purpose without a line in common
with the kernels and the portable backend. The three sums are added up in float64, not in the
canonical order: they are within 1e-6 of ``abs_sum`` (``sum_sq``: of itself) of any backend's.
"""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

import numpy as np
import torch

from fastcheck.record.format import (
    DTYPES,
    RECORD_DTYPE,
    VALUE_BYTES,
    Depth,
    DTypeInfo,
    Order,
    offset_of,
)

__all__ = ["SUMS", "OracleFormat", "describe", "differences", "format_of", "oracle", "row_of"]

SUMS = ("sum", "abs_sum", "sum_sq")
_COUNTS_END = 64  # bytes of the counts
_STATS_END = 104  # and of the extremes and sums
_TOLERANCE = 1e-6


class OracleFormat(NamedTuple):
    """A binary floating-point format."""

    exponent_bits: int
    mantissa_bits: int
    has_inf: bool

    @property
    def sign(self) -> int:
        return 1 << (self.exponent_bits + self.mantissa_bits)

    @property
    def first_nonfinite(self) -> int:
        return self.sign - (1 << self.mantissa_bits) if self.has_inf else self.sign - 1


_FORMATS = {
    "float64": OracleFormat(11, 52, True),
    "float32": OracleFormat(8, 23, True),
    "float16": OracleFormat(5, 10, True),
    "bfloat16": OracleFormat(8, 7, True),
    "float8_e5m2": OracleFormat(5, 2, True),
    "float8_e4m3fn": OracleFormat(4, 3, False),
    "complex64": OracleFormat(8, 23, True),
    "complex128": OracleFormat(11, 52, True),
}


def row_of(tensor: torch.Tensor) -> DTypeInfo:
    """The dtype's row of the table."""
    name = str(tensor.dtype).replace("torch.", "")
    return next(row for row in DTYPES if row.name == name)


def format_of(row: DTypeInfo) -> OracleFormat | None:
    """The format of a dtype's components; None for integers and bool."""
    return _FORMATS.get(row.name)


def oracle(tensor: torch.Tensor, depth: Depth = Depth.FULL, logical: bool = False) -> np.void:
    """The value fields of a CPU tensor's Record, its dtype, order and depth; the rest is zero."""
    row = row_of(tensor)
    in_storage_order = _is_dense(tensor) and not logical
    data = _traversal(tensor, in_storage_order)
    record = np.zeros(1, RECORD_DTYPE)
    record["numel"], record["dtype"], record["depth"] = tensor.numel(), row.code, int(depth)
    record["order"] = int(Order.STORAGE if in_storage_order else Order.LOGICAL)
    layout = format_of(row)
    values = _integers(record, data, row) if layout is None else _floats(record, data, row, layout)
    with np.errstate(over="ignore", invalid="ignore"):
        record["sum"] = values.sum()
        record["abs_sum"] = np.abs(values).sum()
        record["sum_sq"] = np.square(values).sum()
    record["checksum"] = _checksum(data, row.component_bytes)
    end = {Depth.HEALTH: _COUNTS_END, Depth.STATS: _STATS_END, Depth.FULL: VALUE_BYTES}[depth]
    record.view(np.uint8)[end:VALUE_BYTES] = 0
    whole: np.void = record[0]
    return whole


# ---- the elements, in order ---------------------------------------------------------------------


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlap, in whatever permutation."""
    expected = 1
    dims = [(stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size != 1]
    for stride, size in sorted(dims):
        if stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True


def _traversal(tensor: torch.Tensor, in_storage_order: bool) -> bytes:
    if tensor.numel() == 0:
        return b""
    row = tensor.element_size()
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
    if in_storage_order:
        start = tensor.storage_offset() * row
        flat: bytes = storage[start : start + tensor.numel() * row].tobytes()
        return flat
    index = np.full((), tensor.storage_offset(), np.int64)
    for size, stride in zip(tensor.shape, tensor.stride()):
        index = index[..., None] + np.arange(size, dtype=np.int64) * stride
    picked: bytes = storage[
        index.reshape(-1)[:, None] * row + np.arange(row, dtype=np.int64)
    ].tobytes()
    return picked


# ---- what the elements are ----------------------------------------------------------------------


def _floats(record: np.ndarray, data: bytes, row: DTypeInfo, layout: OracleFormat) -> np.ndarray:
    """Counts and extremes into ``record``; the values, those that are not finite as 0."""
    bits = np.frombuffer(data, f"<u{row.component_bytes}").astype(np.uint64)
    magnitude = bits & np.uint64(layout.sign - 1)
    minus = bits >= np.uint64(layout.sign)
    finite = magnitude < np.uint64(layout.first_nonfinite)
    infinite = (magnitude == np.uint64(layout.first_nonfinite)) & layout.has_inf
    normal = magnitude >= np.uint64(1 << layout.mantissa_bits)
    record["nan_count"] = (~finite & ~infinite).sum()
    record["posinf_count"] = (infinite & ~minus).sum()
    record["neginf_count"] = (infinite & minus).sum()
    record["zero_count"] = (magnitude == 0).sum()
    record["subnormal_count"] = (~normal & (magnitude != 0)).sum()
    record["negative_count"] = (finite & minus & (magnitude != 0)).sum()
    record["saturated_count"] = (magnitude == np.uint64(layout.first_nonfinite - 1)).sum()
    values = np.where(finite, _decode(magnitude, layout), 0.0) * np.where(minus, -1.0, 1.0)
    seen = values[finite] + 0.0  # a zero of either sign as +0.0
    record["min"] = seen.min() if seen.size else math.inf
    record["max"] = seen.max() if seen.size else -math.inf
    return values


def _decode(magnitude: np.ndarray, layout: OracleFormat) -> np.ndarray:
    if layout.mantissa_bits == 52:
        return magnitude.view(np.float64)
    exponent = (magnitude >> np.uint64(layout.mantissa_bits)).astype(np.int64)
    mantissa = (magnitude & np.uint64((1 << layout.mantissa_bits) - 1)).astype(np.float64)
    bias = (1 << (layout.exponent_bits - 1)) - 1
    whole = mantissa + np.where(exponent > 0, float(1 << layout.mantissa_bits), 0.0)
    scaled: np.ndarray = np.ldexp(whole, np.maximum(exponent, 1) - bias - layout.mantissa_bits)
    return scaled


def _integers(record: np.ndarray, data: bytes, row: DTypeInfo) -> np.ndarray:
    signed = row.kind == "i8"
    bits = np.frombuffer(data, f"<{'i' if signed else 'u'}{row.component_bytes}")
    if row.name == "bool":
        bits = (bits != 0).astype(np.uint8)
    else:
        limits = np.iinfo(bits.dtype)
        at_limit = (bits == limits.max) | ((bits == limits.min) & signed)
        record["saturated_count"] = at_limit.sum()
    record["zero_count"] = (bits == 0).sum()
    record["negative_count"] = (bits < 0).sum()
    wide = np.iinfo(row.kind)
    low = int(bits.min()) if bits.size else wide.max
    high = int(bits.max()) if bits.size else wide.min
    code = "<q" if signed else "<Q"
    record["min"] = np.frombuffer(struct.pack(code, low), "<f8")  # copied as they are, bit by bit
    record["max"] = np.frombuffer(struct.pack(code, high), "<f8")
    return bits.astype(np.float64)


# ---- checksum (docs/record-format.md) -----------------------------------------------------------

# start, place low, place high, multiplier, rotation of each half
_HALVES = (
    (0x243F6A88, 0x9E3779B1, 0x85EBCA77, 0xCC9E2D51, 13),
    (0x13198A2E, 0xC2B2AE3D, 0x27D4EB2F, 0x9E3779B9, 19),
)
_RUN_ROWS = 16
_LOW = 0xFFFFFFFF


def _checksum(data: bytes, component_bytes: int) -> int:
    width = 16 * component_bytes
    words = np.frombuffer(data + bytes(-len(data) % 4), "<u4")
    runs = -(-words.size // (width * _RUN_ROWS))
    padded = np.zeros(runs * _RUN_ROWS * width, np.uint32)
    padded[: words.size] = words
    present = (np.arange(padded.size) < words.size).reshape(runs, _RUN_ROWS, width)
    rows = padded.reshape(runs, _RUN_ROWS, width)
    chain = np.arange(runs * width, dtype=np.uint64).reshape(runs, width)
    states = []
    for start, low, high, multiplier, rotation in _HALVES:
        h = (
            np.uint32(start)
            + chain.astype(np.uint32) * np.uint32(low)
            + (chain >> np.uint64(32)).astype(np.uint32) * np.uint32(high)
        )
        for i in range(_RUN_ROWS):
            rotated = (h << np.uint32(rotation)) | (h >> np.uint32(32 - rotation))
            h = np.where(present[:, i], rotated * np.uint32(multiplier) + rows[:, i], h)
        states.append(h)
    a, b = states
    a = (a ^ (b >> np.uint32(15))) * np.uint32(0x85EBCA6B)
    b = (b ^ (a >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    a = (a ^ (b >> np.uint32(16))) * np.uint32(0x27D4EB2F)
    b = (b ^ (a >> np.uint32(14))) * np.uint32(0x9E3779B1)
    a = a ^ (b >> np.uint32(15))
    began = present[:, 0]
    totals = [int(half[began].sum(dtype=np.uint64)) & _LOW for half in (a, b)]
    ends = [_length_term(len(data), *half[:3]) for half in _HALVES]
    low_half, high_half = ((total + end) & _LOW for total, end in zip(totals, ends))
    return high_half << 32 | low_half


def _length_term(length: int, start: int, low: int, high: int) -> int:
    h = start ^ (((length & _LOW) * high + (length >> 32) * low + 1) & _LOW)
    h = ((h ^ h >> 16) * 0x85EBCA6B) & _LOW
    h = ((h ^ h >> 13) * 0xC2B2AE35) & _LOW
    return h ^ h >> 16


# ---- comparing ----------------------------------------------------------------------------------


def differences(got: np.void, want: np.void, exact_sums: bool) -> list[str]:
    """The value fields that differ, as ``name: got ..., expected ...``.

    ``exact_sums``: the sums too are compared byte for byte, else within 1e-6.
    """
    found = []
    for name in RECORD_DTYPE.names or ():
        offset = offset_of(name)
        if offset >= VALUE_BYTES and name not in ("dtype", "order", "depth"):
            continue
        if got[name].tobytes() == want[name].tobytes():
            continue
        if name in SUMS and not exact_sums and _is_close(name, got, want):
            continue
        found.append(f"{name}: got {describe(got, name)}, expected {describe(want, name)}")
    return found


def describe(record: np.void, name: str) -> str:
    """A field as a person reads it, in the type that the record's dtype gives it."""
    if name in ("min", "max"):
        kind = DTYPES[int(record["dtype"])].kind
        return repr(np.frombuffer(record[name].tobytes(), f"<{kind}")[0].item())
    return f"{int(record[name]):016x}" if name == "checksum" else repr(record[name].item())


def _is_close(name: str, got: np.void, want: np.void) -> bool:
    value, wanted = float(got[name]), float(want[name])
    if value == wanted:
        return True
    if name == "sum_sq":
        return abs(value - wanted) <= _TOLERANCE * wanted
    abs_sum = float(want["abs_sum"])
    # Where sums overflow, one order of adding up makes an infinity of what another makes a NaN of.
    return math.isinf(abs_sum) or abs(value - wanted) <= _TOLERANCE * abs_sum
