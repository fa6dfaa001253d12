"""The Triton kernels in Triton's interpreter, against the CPU extension's records: every dtype that
they read, sizes around every boundary, layouts, one program and several, chunks, and the fold.

`make test-triton` runs them: the interpreter has to be asked for (TRITON_INTERPRET=1) before triton
is first imported. What its compiler makes of them: tests/backends/triton/test_compilers.py.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1: make test-triton", allow_module_level=True)

from fastcheck import _C
from fastcheck.backends.portable import checksum as sum64
from fastcheck.backends.portable.formats import FORMATS
from fastcheck.backends.triton import kernels, launch
from support.helpers import assert_same, kinds, tensor_of
from support.records.reference import (
    DEPTHS,
    DTYPES,
    HALVES,
    VALUE_BYTES,
    chain_term,
    fields,
    pattern,
)
from support.records.special_codes import special_codes
from support.records.torch_dtypes import torch_dtype
from support.records.views import LAYOUTS
from support.sampling import IS_WHOLE, sample

pytestmark = pytest.mark.triton

READ = [name for name in sorted(DTYPES) if launch.reads(torch_dtype(name))]
FLOATS = [name for name in READ if DTYPES[name].kind == "float"]
#: For what does not depend on the dtype but on the size of its elements and how they add up.
OF_EACH_KIND = ["bfloat16", "bool", "float32", "int8", "uint64"]
FILLED = 0xEE
# The interpreter's time goes by operation, not by element: many lanes make few operations.
WIDE = launch.Target(programs=3, lanes=2048, alone=100)
#: Several programs of a few steps each, and more rows of partials than the fold reads at once.
NARROW = launch.Target(programs=3, lanes=256, alone=0, block=4)
CHUNK = 8 * 4096  # bytes: eight tiles of bytes, one of int64


def observed(
    x: torch.Tensor, depth: str = "full", target: launch.Target = WIDE, **options: Any
) -> bytes:
    """The value bytes; nothing else of the slots may have been written."""
    slots = torch.full((3, 192), FILLED, dtype=torch.uint8)
    launch.launch_record(x, slots, 1, DEPTHS[depth], target, **options)
    assert (slots[[0, 2]] == FILLED).all()
    assert (slots[1, VALUE_BYTES:] == FILLED).all()
    return slots[1].numpy().tobytes()[:VALUE_BYTES]


def check(
    x: torch.Tensor,
    note: object = "",
    depth: str = "full",
    target: launch.Target = WIDE,
    logical: bool = False,
    **options: Any,
) -> None:
    wanted = _C.record(x, DEPTHS[depth], logical).numpy().tobytes()
    actual = observed(x, depth, target, logical=logical, **options)
    assert_same(actual + wanted[VALUE_BYTES:], wanted, note, determinism="sums")


def of_bits(codes: Sequence[int], dtype: str) -> torch.Tensor:
    return tensor_of(np.array(codes, f"<u{DTYPES[dtype].itemsize}").tobytes(), dtype)


def test_what_is_read() -> None:
    assert (
        sorted(
            [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
            + ["bfloat16", "bool", "float16", "float32"]
        )
        == READ
    )


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", READ)
def test_sizes(dtype: str) -> None:
    first, *others = kinds(dtype)
    for size in sample((0, 1, 3, 63, 65, 4096, 4097, 3 * 4096 + 1003), 2):
        check(tensor_of(pattern(first, dtype, size, size), dtype), (first, size))
    for kind in others:
        for size in sample((4097, 3), 1):
            check(tensor_of(pattern(kind, dtype, size, size), dtype), (kind, size))


@pytest.mark.parametrize("dtype", sample(OF_EACH_KIND, 1))
def test_several_programs(dtype: str) -> None:
    """Each of which has a row of partials; the last of them a part of a step."""
    x = tensor_of(pattern(kinds(dtype)[-1], dtype, 5 * 4096 + 19, 9), dtype)
    check(x, target=NARROW)


@pytest.mark.parametrize("dtype", sample(OF_EACH_KIND[::-1], 1))
def test_several_chunks(dtype: str) -> None:
    """The first chain of a chunk has the number that it has in the tensor."""
    per_chunk = CHUNK // DTYPES[dtype].itemsize
    for count in sample((2 * per_chunk + 5, 2 * per_chunk), 1):
        x = tensor_of(pattern(kinds(dtype)[0], dtype, count, count), dtype)
        check(x, count, target=WIDE, chunk_bytes=CHUNK)


@pytest.mark.parametrize("dtype", sample([n for n in READ if DTYPES[n].itemsize <= 2], 3))
def test_every_code(dtype: str) -> None:
    codes = 1 << (8 * DTYPES[dtype].itemsize)
    check(tensor_of(pattern("counter", dtype, codes, 0), dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_special_codes(dtype: str) -> None:
    """NaN of all payloads, infinities, both zeros, subnormals, the ends of the range; as the only
    values, and one of them alone.
    """
    codes = special_codes(dtype)
    check(of_bits(codes, dtype))
    nonfinite = [c for c in codes if not torch.isfinite(of_bits([c], dtype)).item()]
    assert len(nonfinite) > 5
    check(of_bits(nonfinite, dtype), "nothing finite")
    check(of_bits(range(1, 1 << min(7, DTYPES[dtype].mantissa_bits)), dtype), "subnormals")
    every = (0, 1, 1 << 8 * DTYPES[dtype].itemsize - 1, codes[3], nonfinite[-1])
    for code in sample(every, 3):
        check(of_bits([code], dtype), hex(code))


def test_every_exponent_of_float32() -> None:
    """The parts that float32's range is cut into meet at 2^-48 and 2^42."""
    every = (range(256), range(1, 30), range(70, 90), range(160, 180), range(240, 255))
    for exponents in sample(every, 3):
        codes = [
            sign | exponent << 23 | mantissa
            for exponent in exponents
            for mantissa in (0, 1, 0x2AAAAA, 0x7FFFFF)
            for sign in (0, 1 << 31)
        ]
        check(of_bits(codes, "float32"), exponents)
    alone = [x << 23 | y for x in (0, 1, 78, 79, 80, 168, 169, 170, 254) for y in (0, 5)]
    for code in sample(alone, 3):
        check(of_bits([code] * 70, "float32"), hex(code))


@pytest.mark.parametrize("dtype", sample(["float32", "bfloat16"], 1))
def test_sums_of_very_different_magnitudes(dtype: str) -> None:
    apart = (
        [3e38] * 4000,  # whose sum and squares leave float32
        [3e38, -3e38] * 2000,
        [1e-40] * 4000,
        [1e-40, 1e30],
        [2.0**41.9] * 3000 + [2.0**42.1],
        [2.0**-48.1] * 3000 + [2.0**-47.9],
        [2.0**-60] * 3000 + [2.0**-47],
        [1e5] * 3000 + [5e12],
    )
    for values in sample(apart, 2):
        check(torch.tensor(values, dtype=torch_dtype(dtype)), values[-1])
    # Rounded alike in every lane; and parts that different programs find.
    parts = ([3e38] * 4096 + [1e-3] * 5000 + [1e-30] * 5000, [0.1] * 12288)
    for values in sample(parts, 1):
        check(torch.tensor(values, dtype=torch_dtype(dtype)), values[-1], target=NARROW)


@pytest.mark.skipif(not IS_WHOLE, reason="make test-release runs this")
def test_runs_too_small_to_change_what_is_there() -> None:
    """Each run is half of a unit in the last place of the total: alone, none would count."""
    one_program = launch.Target(programs=1, lanes=64, alone=100)
    x = torch.full((33 * 1024,), 2.0**-8)
    x[:64] = 2.0**20
    check(x, depth="stats", target=one_program)


@pytest.mark.parametrize("dtype", sample([n for n in READ if DTYPES[n].kind == "int"], 2))
def test_ends_of_integers(dtype: str) -> None:
    width = 8 * DTYPES[dtype].itemsize
    top = (1 << width) - 1
    codes = [0, 1, top, top - 1, top >> 1, (top >> 1) + 1, (top >> 1) + 2, (top >> 1) - 1]
    check(of_bits(codes, dtype))
    # The last of them, as int64, is -2^32: nothing is left of its lower half.
    for code in (top, top >> 1, (top >> 1) + 1, top - (top >> width // 2)):
        check(of_bits([code] * 65, dtype), hex(code))


@pytest.mark.parametrize("dtype", sample(["int64", "uint64"], 1))
def test_extremes_that_differ_in_one_half(dtype: str) -> None:
    for codes in (
        [5 << 32 | 7, 5 << 32 | 1 << 31, 5 << 32 | (1 << 31) - 1],
        [5 << 32 | 7, 6 << 32 | 1, 4 << 32 | 9],
        [(1 << 64) - 1, (1 << 64) - (1 << 32), (1 << 63) + 5],
    ):
        check(of_bits(codes, dtype), codes)
    check(of_bits([5 << 32 | k for k in range(9000)], dtype), target=NARROW)


def test_bytes_of_bool_other_than_one() -> None:
    check(torch.frombuffer(bytearray(bytes(range(256)) * 20), dtype=torch.bool))


def test_depths() -> None:
    """A field that the depth does not reach is zero, also in a slot that was used before."""
    for dtype in ("float32", "int64"):
        x = tensor_of(pattern("random", dtype, 70, 4), dtype)
        for depth in ("health", "stats"):
            for target in (WIDE, NARROW):
                check(x, (dtype, depth), depth, target=target)
    check(torch.empty(0), depth="health")


@pytest.mark.parametrize("layout", sample(sorted(LAYOUTS), 4))
def test_layouts(layout: str) -> None:
    """What lies how is the traversal's to know (tests/backends/portable/test_values.py); here, that
    it is asked.
    """
    dtype = ("float32", "int8", "bfloat16")[len(layout) % 3]
    x = LAYOUTS[layout](tensor_of(pattern("random", dtype, 26001, 8), dtype))
    check(x, dtype, depth="stats", copied_bytes=CHUNK)


def test_logical_order() -> None:
    for dtype in ("float32", "int8"):
        x = tensor_of(pattern("random", dtype, 9000, 8), dtype).view(90, 100).t()
        check(x, dtype, logical=True)


def test_memory_that_no_word_starts_at() -> None:
    for dtype in sample(("int8", "bfloat16"), 1):
        base = tensor_of(pattern("random", dtype, 2 * CHUNK, 8), dtype)
        check(base[3:1027], dtype)
        count = CHUNK // base.element_size() + 70
        check(base[1 : 1 + count], dtype, copied_bytes=CHUNK)


def test_a_lazy_negation() -> None:
    x = tensor_of(pattern("exponent:-8", "float32", 9000, 3), "float32")
    check(torch._neg_view(x))
    check(torch._neg_view(x)[::2])


# --- sizes that are not at hand ------------------------------------------------------------------


def test_numbers_of_chains_beyond_32_bits() -> None:
    """What a tensor of more than 2^32 chains would do, without one: 64 chains from any number."""
    x = tensor_of(pattern("random", "int32", 4096, 3), "int32")
    words = x.numpy().reshape(4, 16, 64)
    reader = launch.Reader(FORMATS[torch.int32], 3, WIDE)
    for origin in sample((0, (1 << 31) - 256, (1 << 32) - 256, 1 << 32, (5 << 32) + 512), 2):
        partials = torch.zeros(kernels.COLUMNS, 1, dtype=torch.int32)
        assert reader.part(x, partials, 0, origin) == 1
        wanted = dict.fromkeys(HALVES, 0)
        for chain in range(256):
            column = [int(w) & 0xFFFFFFFF for w in words[chain // 64, :, chain % 64]]
            terms = chain_term(origin + chain, column)
            wanted = {half: wanted[half] + terms[half] for half in HALVES}
        found = [int(value) & 0xFFFFFFFF for value in partials[-2:, 0]]
        assert found == [wanted[half] & 0xFFFFFFFF for half in "ab"]


def folded(partials: torch.Tensor, dtype: str, numel: int) -> dict[str, Any]:
    target = launch.Target(programs=1, lanes=64, block=8 if partials.shape[1] < 100 else 1024)
    reader = launch.Reader(FORMATS[torch_dtype(dtype)], 3, target)
    slot = torch.zeros(192, dtype=torch.uint8)
    lengths = sum64.length_terms(numel * DTYPES[dtype].itemsize)
    reader.fold(
        partials,
        slot.view(torch.int32),
        (*launch._halves(numel), *map(sum64.signed, lengths)),
    )
    raw = bytearray(slot.numpy().tobytes())
    raw[142] = DTYPES[dtype].code  # dtype, which defines how to read min and max
    return fields(bytes(raw))


def bits_of(value: float) -> int:
    return int(np.float32(value).view(np.int32))


def test_the_fold_counts_beyond_2_31() -> None:
    """Rows as 13 launches of 2^30 components would leave them."""
    rows = 13
    counts = [(1 << 30) - k * 65537 for k in range(7)]
    partials = torch.zeros(kernels.COLUMNS, rows, dtype=torch.int32)
    for column, count in enumerate(counts):
        partials[column] = count
    partials[11] = bits_of(2.0**100)  # the sum's part below 2^42, times 2^40
    partials[13] = bits_of(2.0**100)
    partials[15] = bits_of(2.0**120)
    numel = 13 << 30
    got = folded(partials, "float32", numel)
    assert got["numel"] == numel
    names = ("nan", "posinf", "neginf", "zero", "subnormal", "negative", "saturated")
    assert [got[f"{name}_count"] for name in names] == [rows * count for count in counts]
    assert got["sum"] == got["abs_sum"] == rows * 2.0**60
    assert got["sum_sq"] == rows * 2.0**120


def test_the_fold_takes_extremes_from_any_row() -> None:
    for place in range(7):
        partials = torch.zeros(kernels.COLUMNS, 7, dtype=torch.int32)
        partials[7] = partials[9] = 3
        partials[8] = partials[10] = 0
        partials[7, place], partials[8, place] = 3, -5
        partials[9, place], partials[10, place] = 3, 5
        got = folded(partials, "int64", 70)
        # The lower halves are held with their highest bit turned over.
        assert (got["min"], got["max"]) == ((3 << 32) + (1 << 31) - 5, (3 << 32) + (1 << 31) + 5)


def test_sums_beyond_float32() -> None:
    """2^33 components of the largest float32 in 2^10 rows: squares of 2^289."""
    partials = torch.zeros(kernels.COLUMNS, 1024, dtype=torch.int32)
    partials[12] = bits_of(-(2.0**67))  # 2^23 components of 2^128, at 2^-84
    partials[14] = bits_of(2.0**67)
    partials[16] = bits_of(2.0**111)
    got = folded(partials, "float32", 1 << 33)
    assert (got["sum"], got["abs_sum"]) == (-(2.0**161), 2.0**161)
    assert got["sum_sq"] == 2.0**289
