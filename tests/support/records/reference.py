"""The Record v1 of a tensor, computed slowly from ``docs/record-format.md`` alone.

Nothing here is shared with the kernels or with the package: only NumPy, and the methods of a tensor
for finding its bytes. Every implementation is compared with it. Section numbers in
the comments are those of ``docs/record-format.md``.

    record(tensor)                    -> 192 bytes
    record_of_bytes(raw, "float32")   -> 192 bytes
    fields(record)                    -> dict of Python numbers
    pattern("random", "float32", 9)   -> the bytes of a test tensor
"""

from __future__ import annotations

import ctypes
import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Array = NDArray[Any]

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
    """A row of the dtype table. A complex dtype is described by its component."""

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
    """True if the elements fill one gapless block of memory, each byte once, in any permutation."""
    if tensor.numel() < 2:
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
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
    span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride())) + 1
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
    """A boolean array per class, by bit pattern."""
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


# --- fused multiply-add --------------------------------------------------------------------------
# NumPy has none, and math.fma came with Python 3.13. tests/record/test_reference.py holds both to
# Fractions.


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """Knuth: s = fl(a + b) and the error e, so that a + b = s + e exactly."""
    s = a + b
    b_part = s - a
    return s, (a - (s - b_part)) + (b - b_part)


def _round_to_odd(s: Array, e: Array) -> Array:
    """The float64 neighbour of s + e whose last bit is 1, or s where e = 0 (s = fl(s + e))."""
    even = (np.ascontiguousarray(s).view(np.uint64) & np.uint64(1)) == 0
    toward = np.nextafter(s, np.where(e > 0, np.inf, -np.inf))
    return np.where((e != 0) & even, toward, s)


def fma32(x: Array, y: Array, acc: Array) -> Array:
    """x*y + acc rounded once to float32, for finite float32 arrays.

    x*y has at most 48 bits and an exponent that float64 holds, so the product is exact in float64.
    The sum with acc may need more than 53 bits; rounding it to float64 to nearest and then to
    float32 would round twice and be wrong near ties. Rounded to odd it is right: a sum that is
    inexact in float64 keeps a 1 in its last place, so it is neither a float32 nor the midpoint of
    two, and it lies on the same side of that midpoint as the exact sum (Boldo and Melquiond, 2008:
    53 >= 24 + 2; float32 subnormals, with fewer bits still, are no exception).
    """
    product = x.astype(np.float64) * y.astype(np.float64)
    s, e = _two_sum(product, acc.astype(np.float64))
    with np.errstate(over="ignore"):
        rounded: Array = _round_to_odd(s, e).astype(np.float32)
    return rounded


def exact_fma64(x: float, y: float, acc: float) -> float:
    """x*y + acc rounded once to float64: exact integers, then int / int, which rounds once."""
    if math.isinf(acc):
        return acc
    nx, dx = x.as_integer_ratio()
    ny, dy = y.as_integer_ratio()
    na, da = acc.as_integer_ratio()
    numerator = nx * ny * da + na * dx * dy
    try:
        return numerator / (dx * dy * da)
    except OverflowError:
        return math.inf if numerator > 0 else -math.inf


def fma64(x: Array, y: Array, acc: Array) -> Array:
    """x*y + acc rounded once to float64, for finite x and y.

    Where all exponents are moderate: the product as p + e exactly (Dekker, with Veltkamp's
    splitting), then p + e + acc rounded once by way of round-to-odd (Boldo and Melquiond,
    "Emulation of a FMA and correctly rounded sums", 2008). Elsewhere, one at a time,
    :func:`exact_fma64`.
    """

    def moderate(v: Array) -> Array:
        size = np.abs(v)
        inside: Array = (v == 0) | ((size > 2.0**-200) & (size < 2.0**200))
        return inside

    easy = (
        moderate(x)
        & moderate(y)
        & (moderate(acc) | ((acc > 0) & (acc < 2.0**400) & (acc > 2.0**-400)))
    )
    out = np.empty(np.broadcast_shapes(x.shape, y.shape, acc.shape), np.float64)

    a, b, c = x[easy], y[easy], acc[easy]

    def split(v: Array) -> tuple[Array, Array]:
        big = v * 134217729.0  # 2^27 + 1
        high = big - (big - v)
        return high, v - high

    a_high, a_low = split(a)
    b_high, b_low = split(b)
    p = a * b
    e = a_low * b_low - (((p - a_high * b_high) - a_low * b_high) - a_high * b_low)
    u_high, u_low = _two_sum(c, e)
    t_high, t_low = _two_sum(p, u_high)
    out[easy] = t_high + _round_to_odd(*_two_sum(t_low, u_low))

    for index in np.argwhere(~easy):
        at = tuple(index)
        out[at] = exact_fma64(float(x[at]), float(y[at]), float(acc[at]))
    return out


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


# --- section 7: checksum -------------------------------------------------------------------------

HALVES = {
    "a": {"S": 0x243F6A88, "P": 0x9E3779B1, "Q": 0x85EBCA77, "M": 0xCC9E2D51, "R": 13},
    "b": {"S": 0x13198A2E, "P": 0xC2B2AE3D, "Q": 0x27D4EB2F, "M": 0x9E3779B9, "R": 19},
}
FMIX = (0x85EBCA6B, 0xC2B2AE35)
# One line each of the chain's finish: the half it changes, the other's shift, the factor.
FINISH = [
    ("a", 15, 0x85EBCA6B),
    ("b", 13, 0xC2B2AE35),
    ("a", 16, 0x27D4EB2F),
    ("b", 14, 0x9E3779B1),
    ("a", 15, 1),
]
MASK32 = 0xFFFFFFFF


def fmix(h: int) -> int:
    h ^= h >> 16
    h = h * FMIX[0] & MASK32
    h ^= h >> 13
    h = h * FMIX[1] & MASK32
    return h ^ h >> 16


def rotl(h: int, by: int) -> int:
    return (h << by | h >> (32 - by)) & MASK32


def length_term(half: str, size: int) -> int:
    k = HALVES[half]
    return fmix(k["S"] ^ ((size & MASK32) * k["Q"] + (size >> 32) * k["P"] + 1) & MASK32)


def words_of(raw: bytes) -> list[int]:
    padded = raw + b"\0" * (-len(raw) % 4)
    return [int(word) for word in np.frombuffer(padded, "<u4")]


def chain_term(identity: int, chain: list[int]) -> dict[str, int]:
    """The terms that a chain adds to either half."""
    state = {}
    for half, k in HALVES.items():
        h = (k["S"] + (identity & MASK32) * k["P"] + (identity >> 32) * k["Q"]) & MASK32
        for word in chain:
            h = (rotl(h, k["R"]) * k["M"] + word) & MASK32
        state[half] = h
    for half, shift, factor in FINISH:
        other = state["b" if half == "a" else "a"]
        state[half] = (state[half] ^ other >> shift) * factor & MASK32
    return state


def checksum_plain(raw: bytes, itemsize: int) -> int:
    """The checksum word by word in Python integers: the definition."""
    row_words = LANES * itemsize // 4
    tile_words = TILE * itemsize // 4
    chains: dict[int, list[int]] = {}
    for position, word in enumerate(words_of(raw)):
        tile, inside = divmod(position, tile_words)
        word_row, word_lane = divmod(inside, row_words)
        identity = (tile * RUNS + word_row // RUN_ROWS) * row_words + word_lane
        chains.setdefault(identity, []).append(word)
    total = {half: length_term(half, len(raw)) for half in HALVES}
    for identity, chain in chains.items():
        for half, term in chain_term(identity, chain).items():
            total[half] = (total[half] + term) & MASK32
    return total["b"] << 32 | total["a"]


def checksum(raw: bytes, itemsize: int) -> int:
    """:func:`checksum_plain` for all chains at once (uint32 arrays wrap mod 2^32)."""
    row_words = LANES * itemsize // 4
    words = np.frombuffer(raw + b"\0" * (-len(raw) % 4), "<u4")
    count = words.size
    tiles = -(-count // (row_words * RUNS * RUN_ROWS))
    padded = np.zeros(tiles * RUNS * RUN_ROWS * row_words, np.uint32)
    padded[:count] = words
    there = (np.arange(padded.size) < count).reshape(tiles * RUNS, RUN_ROWS, row_words)
    grid = padded.reshape(tiles * RUNS, RUN_ROWS, row_words)
    identity = np.arange(tiles * RUNS * row_words, dtype=np.uint64).reshape(-1, row_words)
    low = (identity & np.uint64(MASK32)).astype(np.uint32)
    high = (identity >> np.uint64(32)).astype(np.uint32)
    state = {}
    for half, k in HALVES.items():
        h = np.uint32(k["S"]) + low * np.uint32(k["P"]) + high * np.uint32(k["Q"])
        left, right = np.uint32(k["R"]), np.uint32(32 - k["R"])
        for row in range(RUN_ROWS):
            mixed = ((h << left) | (h >> right)) * np.uint32(k["M"]) + grid[:, row]
            h = np.where(there[:, row], mixed, h)
        state[half] = h
    for half, shift, factor in FINISH:
        other = state["b" if half == "a" else "a"]
        state[half] = (state[half] ^ (other >> np.uint32(shift))) * np.uint32(factor)
    total = {}
    for half in HALVES:
        terms = int(state[half][there[:, 0]].sum(dtype=np.uint64))
        total[half] = (terms + length_term(half, len(raw))) & MASK32
    return total["b"] << 32 | total["a"]


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
        for field, value in zip(("sum", "abs_sum", "sum_sq"), sums(values, classes["finite"], row)):
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


# --- section 9: inputs given by formula ----------------------------------------------------------


def splitmix64(count: int, seed: int) -> Array:
    """count words of splitmix64: word k mixes seed + (k + 1) * 0x9E3779B97F4A7C15."""
    z = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Array = z ^ (z >> np.uint64(31))
    return mixed


def pattern(kind: str, dtype: str, count: int, seed: int = 0) -> bytes:
    """The bytes of ``count`` components.

    ``random``      component k is the low bits of splitmix64 word k: every bit pattern can come
    ``counter``     component k has the bits (seed + k) mod 2^width
    ``constant``    every component has the bits ``seed``
    ``exponent:E``  floats only: sign and mantissa bits are those of word k, the binary exponent is
                    E + (word >> 60)
    """
    row = DTYPES[dtype]
    width = 8 * row.itemsize
    mask = np.uint64((1 << width) - 1)
    if kind == "random":
        bits = splitmix64(count, seed) & mask
    elif kind == "counter":
        bits = (np.uint64(seed) + np.arange(count, dtype=np.uint64)) & mask
    elif kind == "constant":
        bits = np.full(count, seed, np.uint64)
    else:
        word = splitmix64(count, seed)
        bias = (1 << (row.exponent_bits - 1)) - 1
        exponent = (word >> np.uint64(60)) + np.uint64(int(kind.removeprefix("exponent:")) + bias)
        keep = np.uint64(1 << (width - 1) | ((1 << row.mantissa_bits) - 1))
        bits = (word & keep) | (exponent << np.uint64(row.mantissa_bits))
    raw: bytes = bits.astype(f"<u{row.itemsize}").tobytes()
    return raw
