"""Properties of the Record that hold for any input, and the inputs most likely to break them."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from support.helpers import (
    BACKEND,
    ISAS,
    SUMS,
    assert_same,
    canonical_sums,
    cpu_only,
    every_isa,
    is_close,
    kernel,
    tensor_of,
)
from support.records.reference import (
    DTYPES,
    EIGHT_COUNTS,
    LAYOUT,
    TILE,
    bit_patterns,
    fields,
    pattern,
    record_of_bytes,
    splitmix64,
)
from support.records.torch_dtypes import torch_dtype

pytestmark = pytest.mark.fake_statistics


dtypes = st.sampled_from(sorted(DTYPES))
seeds = st.integers(0, 2**32)


@st.composite
def mixed_bytes(draw: st.DrawFn) -> tuple[str, bytes]:
    """A dtype, and components of it: random ones, with a few special values at drawn places."""
    dtype = draw(dtypes)
    row = DTYPES[dtype]
    count = draw(st.one_of(st.integers(0, 200), st.integers(0, 3 * TILE + 50)))
    count -= count % row.components
    kind = "random"
    if row.kind == "float":
        low = -(1 << (row.exponent_bits - 1)) + 2
        high = max(low, (1 << (row.exponent_bits - 1)) - 16)
        kind = draw(st.sampled_from(["random", f"exponent:{draw(st.integers(low, high))}"]))
        if row.exponent_bits == 4:
            kind = draw(st.sampled_from(["random", "exponent:-7"]))
    bits = bit_patterns(pattern(kind, dtype, count, draw(seeds)), row).copy()
    if count:
        for place, code in draw(
            st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, 2**64 - 1)), max_size=6)
        ):
            bits[place] = code & ((1 << (8 * row.itemsize)) - 1)
        start = draw(st.integers(0, count - 1))
        bits[start : start + draw(st.integers(0, 300))] = draw(
            st.sampled_from([0, int(bits[start])])
        )
    return dtype, bits.tobytes()


@given(mixed_bytes(), st.integers(0, 64))
def test_every_isa_gives_the_references_bits(case: tuple[str, bytes], offset: int) -> None:
    dtype, raw = case
    x = tensor_of(raw, dtype, offset)
    wanted = record_of_bytes(raw, dtype)
    for isa in every_isa():
        assert_same(kernel(x), wanted, (isa, dtype, x.numel()))


@given(mixed_bytes(), seeds)
def test_counts_min_and_max_do_not_care_about_order(case: tuple[str, bytes], seed: int) -> None:
    dtype, raw = case
    bits = bit_patterns(raw, DTYPES[dtype])
    shuffled = bits[splitmix64(len(bits), seed).argsort(kind="stable")]
    before, after = (fields(kernel(tensor_of(b.tobytes(), dtype))) for b in (bits, shuffled))
    for name in (*EIGHT_COUNTS, "min", "max"):
        assert before[name] == after[name], name


@canonical_sums
@given(
    dtype=dtypes,
    tiles=st.integers(1, 11),
    tail=st.integers(0, TILE - 1),
    level=st.integers(0, 3),
    seed=seeds,
    exponent=st.integers(-100, 90),
)
def test_aligned_groups_of_tiles_merge_to_the_whole(
    dtype: str, tiles: int, tail: int, level: int, seed: int, exponent: int
) -> None:
    row = DTYPES[dtype]
    count = tiles * TILE + tail - tail % row.components
    wide = row.kind == "float" and row.exponent_bits >= 8
    raw = pattern(f"exponent:{exponent}" if wide else "random", dtype, count, seed)
    whole = fields(kernel(tensor_of(raw, dtype)))
    step = TILE * row.itemsize << level
    parts = [
        fields(kernel(tensor_of(raw[at : at + step], dtype))) for at in range(0, len(raw), step)
    ]
    for name in EIGHT_COUNTS:
        assert whole[name] == sum(part[name] for part in parts), name
    assert whole["min"] == min(part["min"] for part in parts)
    assert whole["max"] == max(part["max"] for part in parts)
    for name in SUMS:
        values = [part[name] for part in parts]
        values += [0.0] * ((1 << (len(values) - 1).bit_length()) - len(values))
        while len(values) > 1:
            values = [values[k] + values[k + 1] for k in range(0, len(values), 2)]
        assert struct.pack("<d", whole[name]) == struct.pack("<d", values[0]), name


@given(mixed_bytes(), st.integers(1, 4))
def test_zeros_behind_only_add_to_numel_and_zero_count(
    case: tuple[str, bytes], factor: int
) -> None:
    dtype, raw = case
    row = DTYPES[dtype]
    extra = factor * 1000 * row.components
    before = fields(kernel(tensor_of(raw, dtype)))
    after = fields(kernel(tensor_of(raw + bytes(extra * row.itemsize), dtype)))
    assert after["zero_count"] == before["zero_count"] + extra
    for name in (*EIGHT_COUNTS[1:4], *EIGHT_COUNTS[5:]):
        assert after[name] == before[name], name
    for name in SUMS:  # as bytes: sums of float64 that overflow both ways are NaN
        assert struct.pack("<d", after[name]) == struct.pack("<d", before[name]) or (
            BACKEND.determinism == "sums" and is_close(name, after[name], before)
        ), name


# --- the scale rule ------------------------------------------------------------------------------


def neighbours(value: float) -> list[float]:
    v = np.float32(value)
    return [
        float(np.nextafter(v, np.float32(0))),
        float(v),
        float(np.nextafter(v, np.float32(np.inf))),
    ]


BOUNDARIES = [
    *neighbours(2.0**60),
    *neighbours(2.0**-40),
    *neighbours(2.0**-126),
    *neighbours(2.0**-149)[1:],
    *neighbours(2.0**127),
    float(np.finfo(np.float32).max),
    float(np.finfo(np.float32).max) / 2,
    2.0**-148,
    2.0**96,
    2.0**-96,
    1.0,
]


@pytest.mark.parametrize("largest", BOUNDARIES)
def test_scale_rule(largest: float) -> None:
    """Tiles of numbers from the largest one to 2^120 below it, wherever the largest stands."""
    small = np.ldexp(np.float32(largest), -(splitmix64(5000, 3) % np.uint64(120)).astype(np.int32))
    small = np.minimum(small.astype(np.float32), np.float32(largest))
    small[::3] *= np.float32(-1)
    for place in (0, 63, 1024, 4095, 4096, 4999):
        for sign in (1, -1):
            values = small / np.float32(2)
            values[place] = np.float32(sign * largest)
            for isa in every_isa():
                assert_same(
                    kernel(torch.from_numpy(values)),
                    record_of_bytes(values.tobytes(), "float32"),
                    (isa, place),
                )


@pytest.mark.parametrize("largest", BOUNDARIES)
def test_scale_rule_is_per_tile(largest: float) -> None:
    values = np.ones(4 * TILE + 100, np.float32)
    values[TILE : 2 * TILE] = np.float32(largest)
    values[3 * TILE :] = np.float32(-largest)
    for dtype in ("float32", "complex64"):
        x = torch.from_numpy(values).view(torch_dtype(dtype))
        for isa in every_isa():
            assert_same(kernel(x), record_of_bytes(values.tobytes(), dtype), (isa, dtype))


@canonical_sums
def test_scale_rule_at_exactly_its_limits() -> None:
    """Values small enough to lose bits on the one side of the rule and not on the other."""
    above = float(np.nextafter(np.float32(2.0**60), np.float32(np.inf)))
    below = float(np.nextafter(np.float32(2.0**-40), np.float32(0)))
    last = 1 + 2.0**-23
    for isa in every_isa():
        tile = torch.zeros(TILE)
        tile[1] = 2.0**-35 * last  # times 2^-96 it is subnormal, and its last bit goes
        tile[0], tile[64] = 2.0**60, -(2.0**60)  # they cancel in lane 0
        assert fields(kernel(tile))["sum"] == 2.0**-35 * last, isa
        tile[0], tile[64] = above, -above
        assert fields(kernel(tile))["sum"] == 2.0**-35, isa

        # Lane 1 brings half a unit in the last place of lane 0's square, which goes to even, and
        # 2^-156 more, which decides; unscaled that is below float32's last bit.
        tile = torch.zeros(TILE)
        tile[0], tile[1], tile[65] = 2.0**-40, 2.0**-67, 2.0**-67 * last
        assert fields(kernel(tile))["sum_sq"] == 2.0**-80, isa
        tile[0], tile[1], tile[65] = below, 2.0**-67 * last, 0.0
        assert fields(kernel(tile))["sum_sq"] == 2.0**-80 - 2.0**-103 + 2.0**-133, isa


@canonical_sums
def test_scale_rule_changes_bits() -> None:
    """The tiles above would pass without the rule if it never mattered: here it does."""
    large = fields(kernel(torch.full((TILE,), 2.0**100)))
    assert large["sum_sq"] == 2.0**212  # infinity in float32 alone
    tiny = fields(kernel(torch.full((TILE,), 2.0**-100)))
    assert tiny["sum_sq"] == 2.0**-188  # and here zero
    subnormal = fields(kernel(torch.full((TILE,), 2.0**-149)))
    assert (subnormal["sum"], subnormal["sum_sq"]) == (2.0**-137, 2.0**-286)
    # not scaled at exactly 2^60: a square of 2^-80 is lost beside it, as the page states
    mixed = torch.zeros(TILE)
    mixed[0], mixed[1] = 2.0**60, 2.0**-80
    assert fields(kernel(mixed))["sum_sq"] == 2.0**120
    mixed[0] = 2.0**-40
    assert fields(kernel(mixed))["sum_sq"] == 2.0**-80
    mixed[0] = float(np.nextafter(np.float32(2.0**-40), np.float32(0)))
    assert fields(kernel(mixed))["sum_sq"] != float(mixed[0].double() ** 2)


@given(
    largest=st.sampled_from(BOUNDARIES[:6]),
    others=st.lists(st.floats(width=32), min_size=0, max_size=40),
    at=st.integers(0, TILE - 1),
)
@example(largest=2.0**60, others=[math.nan, math.inf, -math.inf], at=0)
def test_only_finite_values_decide_the_scale(largest: float, others: list[float], at: int) -> None:
    values = np.zeros(TILE + 30, np.float32)
    values[:2048] = np.float32(largest)
    where = (at + 97 * np.arange(len(others))) % len(values)
    values[where] = np.array(others, np.float32)
    for isa in every_isa():
        assert_same(
            kernel(torch.from_numpy(values)), record_of_bytes(values.tobytes(), "float32"), isa
        )


@given(count=st.integers(1, 600), seed=seeds, spread=st.integers(1, 200))
def test_float64_at_the_ends_of_its_range(count: int, seed: int, spread: int) -> None:
    for exponent in (-1022, -537, 510, 1024 - 16):
        raw = pattern(f"exponent:{exponent}", "float64", count, seed)
        x = tensor_of(raw, "float64")
        x[::7] *= 2.0**-spread
        for isa in every_isa():
            assert_same(kernel(x), record_of_bytes(x.numpy().tobytes(), "float64"), (isa, exponent))


@canonical_sums
def test_a_nan_sum_has_one_bit_pattern() -> None:
    top = float(np.finfo(np.float64).max)
    x = torch.full((2 * TILE,), top, dtype=torch.float64)
    x[TILE:] = -top
    start, _ = LAYOUT["sum"]
    for isa in every_isa():
        rec = kernel(x)
        assert rec[start : start + 8] == bytes.fromhex("000000000000f87f"), isa
        assert fields(rec)["abs_sum"] == fields(rec)["sum_sq"] == math.inf
        assert_same(rec, record_of_bytes(x.numpy().tobytes(), "float64"), isa)
        assert fields(rec)["flags"] == 0  # no element is non-finite


# --- extremes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [n for n, row in DTYPES.items() if row.kind in ("float", "int")])
def test_values_of_one_sign(dtype: str) -> None:
    """Extremes of negative floats run against the order of their bits."""
    row = DTYPES[dtype]
    top = 1 << (8 * row.itemsize - 1)
    for count in (2, 64, 700, TILE, 2 * TILE + 300):
        bits = bit_patterns(pattern("random", dtype, count, count), row)
        for sign in (0, top):
            codes = (bits & bits.dtype.type(top - 1)) | bits.dtype.type(sign)
            if row.kind == "float":  # finite, and none of them zero
                codes = codes & ~bits.dtype.type(1 << row.mantissa_bits) | bits.dtype.type(1)
            raw = codes.tobytes()
            wanted = record_of_bytes(raw, dtype)
            assert (fields(wanted)["max"] < 0) == bool(sign)
            for isa in every_isa():
                assert_same(kernel(tensor_of(raw, dtype)), wanted, (isa, count, sign))


@given(dtype=dtypes, count=st.integers(2, 5000), seed=seeds, data=st.data())
def test_an_extreme_is_found_wherever_it_stands(
    dtype: str, count: int, seed: int, data: st.DataObject
) -> None:
    """One value beyond all others, which are of one sign, at any place."""
    row = DTYPES[dtype]
    count -= count % row.components
    place = data.draw(st.integers(0, count - 1))
    codes = {"float": (1, 3), "int": (1, 3), "uint": (1, 3), "bool": (0, 1)}[row.kind]
    small, large = data.draw(st.sampled_from([codes, codes[::-1]]))
    sign = data.draw(st.sampled_from([0, 1])) if row.kind in ("float", "int") else 0
    bits = np.full(count, small, f"<u{row.itemsize}")
    bits[place] = large
    bits |= bits.dtype.type(sign << (8 * row.itemsize - 1))
    wanted = record_of_bytes(bits.tobytes(), dtype)
    assert fields(wanted)["min"] != fields(wanted)["max"]
    for isa in every_isa():
        assert_same(kernel(tensor_of(bits.tobytes(), dtype)), wanted, (isa, dtype, place))


@cpu_only
def test_more_than_one_isa_was_tested() -> None:
    assert "scalar" in ISAS
    assert len(ISAS) >= 1
