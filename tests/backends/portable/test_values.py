"""The portable backend on plain CPU tensors against the reference: every dtype, layout and depth,
one tensor and lists, with chunks so small that small tensors cross their ends.

Everything has to be exact but the three sums. On another device:
tests/backends/portable/test_device.py, and the tests of statistics with FASTCHECK_TEST_DEVICE=fake.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastcheck.backends.portable import checksum as sum64
from fastcheck.backends.portable.traversal import dtype_and_order
from support.helpers import SIZES, even, kinds, tensor_of
from support.records.portable import ALL, DEFAULT, SMALL, check, observed, observed_list
from support.records.reference import (
    DEPTHS,
    DTYPES,
    FLOAT_NAMES,
    HALVES,
    VALUE_BYTES,
    chain_term,
    fields,
    length_term,
    pattern,
    record,
    record_of_bytes,
    splitmix64,
)
from support.records.special_codes import special_codes
from support.records.torch_dtypes import torch_dtype
from support.records.views import LAYOUTS
from support.sampling import IS_WHOLE, sample

# --- one tensor ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ALL)
def test_sizes(dtype: str) -> None:
    for kind in kinds(dtype):
        for size in sample((*SIZES, 7, 8, 9, 2040, 2041, 2048), 6):
            count = even(size, dtype)
            raw = pattern(kind, dtype, count, size)
            x, wanted = tensor_of(raw, dtype), record_of_bytes(raw, dtype)
            for bound in (DEFAULT, SMALL):
                check(observed(x, temporary_bytes=bound), wanted, (kind, count, bound))


@pytest.mark.parametrize("dtype", ALL)
def test_depths(dtype: str) -> None:
    """A field that the depth does not reach is zero, also in a slot that was used before."""
    for count in (0, 2, 4098, 9000):
        raw = pattern("random", dtype, count, 4)
        x = tensor_of(raw, dtype)
        for depth in DEPTHS:
            check(observed(x, depth), record_of_bytes(raw, dtype, depth=depth), (depth, count))


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_layouts(layout: str) -> None:
    for dtype in sample(ALL, 4):
        kind = kinds(dtype)[min(1, len(kinds(dtype)) - 1)]
        x = LAYOUTS[layout](tensor_of(pattern(kind, dtype, even(26001, dtype), 8), dtype))
        for order in ("storage", "logical"):
            wanted = record(x, order=order)
            logical = order == "logical"
            for bound in (DEFAULT, SMALL):
                actual = observed(x, logical=logical, temporary_bytes=bound)
                check(actual, wanted, (dtype, order, bound))
            assert dtype_and_order(x, logical) == (
                fields(wanted)["dtype"],
                fields(wanted)["order"],
            )


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_lazy_views_of_any_layout(dtype: str) -> None:
    base = tensor_of(pattern("exponent:-8", dtype, 24000, 3), dtype).view(100, 120)
    for x in (base, base.t(), base[:, ::2], base.t()[::2, 1:], base[:, :, None].permute(2, 1, 0)):
        for lazy in (x.conj(), x.conj().imag, torch._neg_view(x.conj()), torch._neg_view(x)):
            assert lazy.is_conj() or lazy.is_neg()
            for order in ("storage", "logical"):
                wanted = record(lazy, order=order)
                for bound in (DEFAULT, SMALL):
                    actual = observed(lazy, logical=order == "logical", temporary_bytes=bound)
                    check(actual, wanted, (x.stride(), order, bound))
                assert dtype_and_order(lazy, order == "logical")[1] == fields(wanted)["order"]


@pytest.mark.parametrize("dtype", ALL)
def test_offsets_that_no_word_starts_at(dtype: str) -> None:
    base = tensor_of(pattern("random", dtype, 9000, 8), dtype)
    for offset in range(5):
        for count in (3, 4096 - offset, 4096):
            x = base[offset : offset + count]
            check(observed(x), record(x), (offset, count))
            check(observed_list([x])[0], record(x), (offset, count))


@pytest.mark.parametrize("dtype", [n for n, row in DTYPES.items() if row.itemsize <= 2])
def test_every_code(dtype: str) -> None:
    codes = 1 << (8 * DTYPES[dtype].itemsize)
    raw = pattern("counter", dtype, codes, 0)
    for bound in (DEFAULT, SMALL):
        check(observed(tensor_of(raw, dtype), temporary_bytes=bound), record_of_bytes(raw, dtype))
    if codes == 256:
        for code in sample(range(256), 20):
            one = bytes([code])
            check(observed(tensor_of(one, dtype)), record_of_bytes(one, dtype), hex(code))


@pytest.mark.parametrize("dtype", FLOAT_NAMES)
def test_special_codes(dtype: str) -> None:
    row = DTYPES[dtype]
    for code in sample(special_codes(dtype), 7):
        component = code.to_bytes(row.itemsize, "little")
        alone = component + bytes(row.itemsize) * (row.components - 1)
        among = bytearray(pattern("exponent:-7", dtype, 1030, code & 0xFFFF))
        for place in (0, 17, 1023, 1024, 1029):
            among[place * row.itemsize : (place + 1) * row.itemsize] = component
        for raw in (alone, bytes(among)):
            check(
                observed(tensor_of(raw, dtype)), record_of_bytes(raw, dtype), (hex(code), len(raw))
            )


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_float64_sums_at_the_end_of_the_range(dtype: str) -> None:
    """A partial sum that overflows must not make a NaN, or an infinity of what is finite."""
    top = np.finfo(np.float64).max
    values = np.full(9 * 4096, top)
    values[1::2] = -top
    alternating = values.copy()
    values = np.concatenate([np.full(4096, top), np.full(4096, -top), np.full(4096, 1.5)])
    for case, total in ((alternating, 0.0), (values, 4096 * 1.5), (np.full(6, top), math.inf)):
        x = torch.from_numpy(case).view(torch_dtype(dtype))
        for bound in (DEFAULT, SMALL):
            listed = observed_list([x, x[:2]], temporary_bytes=bound)[0]
            for raw in (observed(x, temporary_bytes=bound), listed):
                got = fields(raw + bytes(80))
                # beside numbers of that size 6144 is nothing: what is guaranteed is 1e-6 of abs_sum
                assert got["sum"] == total or (total == 6144 and abs(got["sum"]) <= 1e300)
                assert got["abs_sum"] == got["sum_sq"] == math.inf


@given(
    dtype=st.sampled_from(ALL),
    count=st.integers(1, 3 * 4096 + 50),
    seed=st.integers(0, 2**32),
    places=st.lists(st.tuples(st.integers(0, 2**20), st.integers(0, 2**64 - 1)), max_size=6),
    run=st.tuples(st.integers(0, 2**20), st.integers(0, 300)),
    bound=st.sampled_from([DEFAULT, SMALL, 1]),
)
def test_any_bytes(
    dtype: str,
    count: int,
    seed: int,
    places: list[tuple[int, int]],
    run: tuple[int, int],
    bound: int,
) -> None:
    row = DTYPES[dtype]
    count = even(count, dtype)
    bits = np.frombuffer(pattern("random", dtype, count, seed), f"<u{row.itemsize}").copy()
    for place, code in places:
        bits[place % count] = code & ((1 << (8 * row.itemsize)) - 1)
    bits[run[0] % count : run[0] % count + run[1]] = 0
    x = tensor_of(bits.tobytes(), dtype)
    wanted = record_of_bytes(bits.tobytes(), dtype)
    check(observed(x, temporary_bytes=bound), wanted)
    check(observed_list([x, x], temporary_bytes=bound)[1], wanted)


def test_extremes_beyond_float64_are_exact() -> None:
    top = 2**64 - 1
    for dtype, values in (
        ("uint64", [top - 1, top]),
        ("uint64", [3, 5]),
        ("int64", [-(2**63), 2**63 - 1]),
        ("int64", [2**53 + 1, 2**53 + 3]),
        ("uint32", [2**32 - 2, 2**32 - 1]),
    ):
        x = torch.tensor(values, dtype=torch_dtype(dtype))
        for raw in (observed(x), observed_list([x, x])[1]):
            got = fields(raw + record(x)[VALUE_BYTES:])
            assert (got["min"], got["max"]) == tuple(values)


@pytest.mark.skipif(not IS_WHOLE, reason="reads 2 GiB; make test-release runs this")
def test_more_than_2_31_elements() -> None:
    count = (1 << 31) + 4096 + 5
    x = torch.zeros(count, dtype=torch.bool)  # untouched pages: almost no memory is taken
    x[-1] = True
    got = fields(observed(x, "health") + bytes(80))
    assert (got["numel"], got["zero_count"]) == (count, count - 1)


def test_numbers_of_chains_beyond_32_bits() -> None:
    """What a tensor of more than 2^32 chains would do, without one: 64 chains from any number."""
    words = np.frombuffer(pattern("random", "int32", 4096, 3), "<i4")
    grid = torch.from_numpy(words.copy()).view(1, 4, 16, 64)
    numbers = torch.arange(256, dtype=torch.int32).view(1, 4, 64)
    for origin in (0, 256, (1 << 31) - 256, (1 << 32) - 256, 1 << 32, (5 << 32) + 512):
        state = sum64.start(numbers, origin)
        sums = sum64.chain_sums(grid, state, None, 16)
        wanted = dict.fromkeys(HALVES, 0)
        for chain in range(256):
            column = words.reshape(4, 16, 64)[chain // 64, :, chain % 64]
            terms = chain_term(origin + chain, [int(w) & 0xFFFFFFFF for w in column])
            wanted = {half: wanted[half] + terms[half] for half in HALVES}
        assert [int(s) & 0xFFFFFFFF for s in sums.flatten()] == [
            wanted[half] & 0xFFFFFFFF for half in "ab"
        ]
    for size in (0, 12, (1 << 32) - 1, 1 << 32, (7 << 32) + 5):
        assert sum64.length_terms(size) == (length_term("a", size), length_term("b", size))


# --- lists ---------------------------------------------------------------------------------------


def mixed_list(seed: int) -> list[torch.Tensor]:
    """Every dtype, sizes around every boundary, some of them not dense, in no order."""
    xs = []
    for dtype in ALL:
        for kind in kinds(dtype):
            for size in (0, 1, 2, 1023, 1024, 1025, 4095, 4096, 4097, 3 * 4096 + 5):
                count = even(size, dtype)
                xs.append(tensor_of(pattern(kind, dtype, count, size), dtype))
        x = tensor_of(pattern("random", dtype, 12000, 5), dtype).view(-1, 60)
        xs += [x.t(), x[:, ::7], x[3, 4], x[:2, 0].expand(3, 2), x[:, 5:5]]
    xs += [xs[-1].new_ones((), dtype=torch.complex64).expand(70, 70).conj()]
    return [xs[i] for i in splitmix64(len(xs), seed).argsort(kind="stable")]


@pytest.mark.parametrize("depth", sorted(DEPTHS))
def test_mixed_lists(depth: str) -> None:
    xs = mixed_list(1)
    for logical in (False, True):
        wanted = [record(x, depth=depth, order="logical" if logical else "storage") for x in xs]
        for bound in (DEFAULT, SMALL):
            rows = observed_list(xs, depth, logical=logical, temporary_bytes=bound)
            for x, row, expected in zip(xs, rows, wanted):
                check(row, expected, (x.dtype, x.shape, bound))


def test_lists_of_few() -> None:
    assert observed_list([]) == []
    for xs in ([torch.empty(0)], [torch.ones(())], [torch.empty(0), torch.ones(4096)]):
        for x, row in zip(xs, observed_list(xs)):
            check(row, record(x))


def test_the_same_sizes_with_other_values() -> None:
    """The arrangement of a list is kept; what was read is not."""
    for seed in range(3):
        xs = [
            tensor_of(pattern("random", "float32", count, seed + count), "float32")
            for count in (5, 5000, 4096)
        ]
        for x, row in zip(xs, observed_list(xs)):
            check(row, record(x))


def test_equal_shapes_in_another_order_of_dtypes() -> None:
    one, other = torch.ones(64), torch.ones(64, dtype=torch.float16)
    for xs in ([one, other], [other, one], [one, one], [other, other]):
        for x, row in zip(xs, observed_list(xs)):
            check(row, record(x), x.dtype)


@given(st.lists(st.tuples(st.sampled_from(ALL), st.integers(0, 9000)), max_size=9), st.data())
def test_any_list(shapes: list[tuple[str, int]], data: st.DataObject) -> None:
    bound = data.draw(st.sampled_from([DEFAULT, SMALL, 1]))
    depth = data.draw(st.sampled_from(sorted(DEPTHS)))
    xs = [
        tensor_of(pattern("random", dtype, even(count, dtype), count + place), dtype)
        for place, (dtype, count) in enumerate(shapes)
    ]
    for x, row in zip(xs, observed_list(xs, depth, temporary_bytes=bound)):
        check(row, record(x, depth=depth), (x.dtype, x.numel()))
