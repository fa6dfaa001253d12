"""The Record v1 of a tensor, computed slowly from docs/record-format.md alone.

Nothing here is shared with the kernels or with ``python/fastcheck``: only NumPy, and torch for
finding a tensor's bytes. Section numbers in the comments are those of docs/record-format.md.

    record(tensor)                    -> 192 bytes
    record_of_bytes(raw, "float32")   -> 192 bytes
    fields(record)                    -> dict of Python numbers
"""

from __future__ import annotations

import ctypes
import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fakes.exact_fma import fma32, fma64
from support.records.reference_checksum import checksum

Array = np.ndarray[Any, np.dtype[Any]]

RECORD_BYTES = 192
VALUE_BYTES = 112  # two Records are equal when these bytes are
TILE = 4096
LANES = 64
RUNS = 4
RUN_ROWS = 16

HEALTH, STATS, FULL = 1, 2, 3
DEPTHS = {"health": HEALTH, "stats": STATS, "full": FULL}
ORDERS = {"storage": 0, "logical": 1}
FLAG_NONFINITE = 1
CANONICAL_NAN = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000000))[0]


# --- section 2: dtypes ---------------------------------------------------------------------------


@dataclass(frozen=True)
class DType:
    """One row of the dtype table. A complex dtype is described by its component."""

    name: str
    code: int
    itemsize: int  # bytes of one component
    kind: str  # "float", "int", "uint", "bool"
    exponent_bits: int = 0
    mantissa_bits: int = 0
    has_inf: bool = True
    components: int = 1


TABLE = [
    DType("float64", 0, 8, "float", 11, 52),
    DType("float32", 1, 4, "float", 8, 23),
    DType("float16", 2, 2, "float", 5, 10),
    DType("bfloat16", 3, 2, "float", 8, 7),
    DType("float8_e4m3fn", 4, 1, "float", 4, 3, has_inf=False),
    DType("float8_e5m2", 5, 1, "float", 5, 2),
    DType("complex64", 6, 4, "float", 8, 23, components=2),
    DType("complex128", 7, 8, "float", 11, 52, components=2),
    DType("int8", 8, 1, "int"),
    DType("int16", 9, 2, "int"),
    DType("int32", 10, 4, "int"),
    DType("int64", 11, 8, "int"),
    DType("uint8", 12, 1, "uint"),
    DType("uint16", 13, 2, "uint"),
    DType("uint32", 14, 4, "uint"),
    DType("uint64", 15, 8, "uint"),
    DType("bool", 16, 1, "bool"),
]
DTYPES = {row.name: row for row in TABLE}
FLOAT_NAMES = [row.name for row in TABLE if row.kind == "float"]
INT_NAMES = [row.name for row in TABLE if row.kind in ("int", "uint")]


def torch_dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


def dtype_of(tensor: torch.Tensor) -> DType:
    return DTYPES[str(tensor.dtype).removeprefix("torch.")]


def bit_patterns(raw: bytes, dtype: DType) -> Array:
    """The components as unsigned integers of their own width, in the order of the bytes."""
    return np.frombuffer(raw, dtype=f"<u{dtype.itemsize}")


def finite_max_bits(dtype: DType) -> int:
    """Bit pattern of the largest finite magnitude of a float format."""
    all_ones = (1 << (dtype.exponent_bits + dtype.mantissa_bits)) - 1
    # Inf and NaN take the highest exponent; float8_e4m3fn gives up only one code, for NaN.
    return all_ones - (1 << dtype.mantissa_bits) if dtype.has_inf else all_ones - 1


def decode(bits: Array, dtype: DType) -> Array:
    """The exact values: float32 for floats up to 32 bits, float64 for float64, or integers.

    Non-finite patterns of the small formats come out as the formula has it: callers mask them.
    """
    out: Array
    if dtype.kind == "bool":
        out = (bits != 0).astype(np.uint8)
        return out
    if dtype.kind == "uint":
        return bits
    if dtype.kind == "int":
        return bits.view(f"<i{dtype.itemsize}")
    if dtype.itemsize == 8:
        return bits.view("<f8")
    if dtype.itemsize == 4:
        return bits.view("<f4")
    mantissa = (bits & ((1 << dtype.mantissa_bits) - 1)).astype(np.float64)
    biased = (bits >> dtype.mantissa_bits).astype(np.int32) & ((1 << dtype.exponent_bits) - 1)
    negative = (bits >> (dtype.exponent_bits + dtype.mantissa_bits)) & 1
    bias = (1 << (dtype.exponent_bits - 1)) - 1
    fraction = np.where(biased > 0, 1.0, 0.0) + mantissa / (1 << dtype.mantissa_bits)
    magnitude = np.ldexp(fraction, np.maximum(biased, 1) - bias)  # exact in float64
    with np.errstate(over="ignore"):  # bfloat16's non-finite codes
        out = np.where(negative == 1, -magnitude, magnitude).astype(np.float32)
    return out


# --- section 3: traversal ------------------------------------------------------------------------


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one gapless block of memory, each byte once, in any permutation."""
    if tensor.numel() < 2:
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def traversal(tensor: torch.Tensor, order: str) -> tuple[bytes, str]:
    """The bytes in traversal order, and the name of the order that was used."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if order == "storage" and not is_dense(tensor):
        order = "logical"
    size = tensor.element_size()
    if tensor.numel() == 0:
        return b"", order
    if order == "storage":
        return ctypes.string_at(tensor.data_ptr(), tensor.numel() * size), order
    span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    memory = memoryview((ctypes.c_char * (span * size)).from_address(tensor.data_ptr()))
    view: Array = np.ndarray(
        tuple(tensor.shape),
        dtype=f"V{size}",
        buffer=memory,
        strides=tuple(s * size for s in tensor.stride()),
    )
    return view.tobytes(order="C"), order


# --- section 4: counts, min, max -----------------------------------------------------------------


def classify(bits: Array, dtype: DType) -> dict[str, Array]:
    """One boolean array per class, by bit pattern."""
    nothing = np.zeros(bits.shape, bool)
    if dtype.kind != "float":
        values = decode(bits, dtype)
        saturated = nothing
        if dtype.kind in ("int", "uint"):
            limits = np.iinfo(values.dtype)
            saturated = values == limits.max
            if dtype.kind == "int":
                saturated = saturated | (values == limits.min)
        return {
            "nan": nothing,
            "posinf": nothing,
            "neginf": nothing,
            "zero": values == 0,
            "subnormal": nothing,
            "negative": values < 0,
            "saturated": saturated,
            "finite": ~nothing,
        }
    width = dtype.exponent_bits + dtype.mantissa_bits
    magnitude = bits & bits.dtype.type((1 << width) - 1)
    negative = (bits >> bits.dtype.type(width)) == 1
    largest = finite_max_bits(dtype)
    finite = magnitude <= largest
    infinite = (magnitude == largest + 1) if dtype.has_inf else nothing
    return {
        "nan": ~finite & ~infinite,
        "posinf": infinite & ~negative,
        "neginf": infinite & negative,
        "zero": magnitude == 0,
        "subnormal": (magnitude > 0) & (magnitude < (1 << dtype.mantissa_bits)),
        "negative": finite & negative & (magnitude > 0),
        "saturated": magnitude == largest,
        "finite": finite,
    }


def min_max(values: Array, finite: Array, dtype: DType) -> tuple[bytes, bytes]:
    chosen = values[finite]
    if dtype.kind == "float":
        low = float(chosen.min()) + 0.0 if chosen.size else math.inf  # -0.0 + 0.0 is +0.0
        high = float(chosen.max()) + 0.0 if chosen.size else -math.inf
        return struct.pack("<d", low), struct.pack("<d", high)
    code, limits = (
        ("<q", np.iinfo(np.int64)) if dtype.kind == "int" else ("<Q", np.iinfo(np.uint64))
    )
    least = int(chosen.min()) if chosen.size else int(limits.max)
    greatest = int(chosen.max()) if chosen.size else int(limits.min)
    return struct.pack(code, least), struct.pack(code, greatest)


# --- section 6: sums -----------------------------------------------------------------------------


def pairwise(values: Array) -> Array:
    """The adjacent-pair binary tree over the last axis, whose length is a power of two."""
    while values.shape[-1] > 1:
        values = values[..., 0::2] + values[..., 1::2]
    return values[..., 0]


def tile_sums(values: Array, finite: Array, dtype: DType) -> Array:
    """float64 array (tiles, 3): sum, abs_sum and sum_sq of each tile."""
    tiles = -(-values.size // TILE)
    narrow = dtype.kind == "float" and dtype.itemsize <= 4
    precision = np.float32 if narrow else np.float64
    x: Array = np.zeros(tiles * TILE, precision)
    x[: values.size] = np.where(finite, values, 0).astype(precision)
    x = x.reshape(tiles, TILE)

    undo = np.ones((tiles, 1, 1))
    if narrow:
        largest = np.abs(x).max(axis=1) if tiles else np.zeros(0, np.float32)
        exponent = np.where(largest > 2.0**60, -96, 0) + np.where(
            (largest > 0) & (largest < 2.0**-40), 96, 0
        )
        x = x * np.ldexp(np.float32(1), exponent)[:, None]  # float32 product, rounded once
        undo = np.ldexp(1.0, -exponent)[:, None, None]
    assert x.dtype == precision

    grid = x.reshape(tiles, RUNS, RUN_ROWS, LANES)
    runs = np.zeros((3, tiles, RUNS, LANES), precision)
    for row in range(RUN_ROWS):
        element = grid[:, :, row, :]
        runs[0] += element
        runs[1] += np.abs(element)
        runs[2] = fma32(element, element, runs[2]) if narrow else fma64(element, element, runs[2])
    lanes = (runs[:, :, 0] + runs[:, :, 1]) + (runs[:, :, 2] + runs[:, :, 3])
    assert lanes.dtype == precision

    wide = lanes.astype(np.float64).transpose(1, 0, 2)  # tiles, 3, lanes
    wide[:, :2] *= undo
    wide[:, 2:] *= undo * undo
    return pairwise(wide)


def sums(values: Array, finite: Array, dtype: DType) -> Array:
    """float64 array (3,): sum, abs_sum, sum_sq."""
    if not np.float32(1e-45) * np.float32(1.0) > 0:
        raise RuntimeError("the reference needs subnormals: undo set_flush_denormal(True)")
    with np.errstate(over="ignore", invalid="ignore"):
        tiles = tile_sums(values, finite, dtype)
        width = 1
        while width < len(tiles):
            width *= 2
        padded = np.zeros((width, 3))
        padded[: len(tiles)] = tiles
        total = pairwise(padded.T)
    return np.where(np.isnan(total), CANONICAL_NAN, total)


# --- section 1: the record -----------------------------------------------------------------------

COUNTS = ("nan", "posinf", "neginf", "zero", "subnormal", "negative", "saturated")
EIGHT_COUNTS = ["numel", *(f"{name}_count" for name in COUNTS)]
LAYOUT: dict[str, tuple[int, str]] = {
    "numel": (0, "<q"),
    "nan_count": (8, "<q"),
    "posinf_count": (16, "<q"),
    "neginf_count": (24, "<q"),
    "zero_count": (32, "<q"),
    "subnormal_count": (40, "<q"),
    "negative_count": (48, "<q"),
    "saturated_count": (56, "<q"),
    "min": (64, "8s"),
    "max": (72, "8s"),
    "sum": (80, "<d"),
    "abs_sum": (88, "<d"),
    "sum_sq": (96, "<d"),
    "checksum": (104, "<Q"),
    "seq": (112, "<q"),
    "step": (120, "<q"),
    "call": (128, "<i"),
    "site": (132, "<i"),
    "flags": (136, "<I"),
    "version": (140, "<H"),
    "dtype": (142, "<B"),
    "order": (143, "<B"),
    "depth": (144, "<B"),
    "device_mode": (145, "<B"),
}


def record_of_bytes(
    raw: bytes, dtype: str, *, depth: str = "full", order: str = "storage", numel: int | None = None
) -> bytes:
    """The Record of the traversal bytes ``raw``; seq, step, call and site are zero."""
    row = DTYPES[dtype]
    bits = bit_patterns(raw, row)
    classes = classify(bits, row)
    values = decode(bits, row)
    out = bytearray(RECORD_BYTES)

    def put(field: str, value: Any) -> None:
        offset, code = LAYOUT[field]
        struct.pack_into(code, out, offset, value)

    put("numel", bits.size // row.components if numel is None else numel)
    for name in COUNTS:
        put(f"{name}_count", int(np.count_nonzero(classes[name])))
    if DEPTHS[depth] >= STATS:
        low, high = min_max(values, classes["finite"], row)
        put("min", low)
        put("max", high)
        for field, value in zip(
            ("sum", "abs_sum", "sum_sq"), sums(values, classes["finite"], row), strict=True
        ):
            put(field, float(value))
    if DEPTHS[depth] >= FULL:
        put("checksum", checksum(raw, row.itemsize))
    put("flags", FLAG_NONFINITE if (~classes["finite"]).any() else 0)
    put("version", 1)
    put("dtype", row.code)
    put("order", ORDERS[order])
    put("depth", DEPTHS[depth])
    return bytes(out)


def record(tensor: torch.Tensor, *, depth: str = "full", order: str = "storage") -> bytes:
    """The Record of a CPU tensor."""
    raw, used = traversal(tensor, order)
    return record_of_bytes(
        raw, dtype_of(tensor).name, depth=depth, order=used, numel=tensor.numel()
    )


def fields(rec: bytes) -> dict[str, Any]:
    """The record's fields as Python numbers; min and max by the record's dtype."""
    out = {
        name: struct.unpack_from(code, rec, offset)[0] for name, (offset, code) in LAYOUT.items()
    }
    kind = TABLE[out["dtype"]].kind
    code = {"float": "<d", "int": "<q"}.get(kind, "<Q")
    for name in ("min", "max"):
        out[name] = struct.unpack(code, out[name])[0]
    return out
