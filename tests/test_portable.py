"""The portable backend on plain CPU tensors against the reference: every dtype, layout and depth,
one tensor and lists, with chunks so small that small tensors cross their ends.

Everything has to be exact but the three sums. On another device: tests/test_portable_device.py,
and the tests of statistics with FASTCHECK_TEST_DEVICE=fake.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastcheck
from fastcheck._readable import unreadable_reason
from fastcheck.backends import portable, portable_many, portable_one
from fastcheck.backends import portable_checksum as sum64
from fastcheck.backends.portable_constants import constant
from fastcheck.backends.portable_formats import FORMATS
from fastcheck.backends.whole import record as whole_record
from helpers import SIZES, assert_same, even, kinds, tensor_of
from reference import (
    DEPTHS,
    DTYPES,
    FLOAT_NAMES,
    LAYOUT,
    VALUE_BYTES,
    dtype_of,
    fields,
    record,
    record_of_bytes,
    torch_dtype,
)
from reference_checksum import HALVES, chain_term, length_term
from test_properties import special_codes
from test_stats_errors import UNREADABLE, quiet
from test_stats_values import LAYOUTS
from vectors import pattern, splitmix64

ALL = sorted(DTYPES)
DEFAULT = portable.TEMPORARY_BYTES
CPU = torch.device("cpu")
SMALL = 400_000  # chunks of a few tiles, whatever the dtype
FILLED = 0xEE


def slots_for(count: int) -> torch.Tensor:
    """Slots that were used before, and one more on either side."""
    return torch.full((count + 2, 192), FILLED, dtype=torch.uint8)


def taken(slots: torch.Tensor) -> list[bytes]:
    """The value bytes between the outer slots; nothing else may have been written."""
    assert (slots[[0, -1]] == FILLED).all()
    assert (slots[:, VALUE_BYTES:] == FILLED).all()
    return [row.numpy().tobytes()[:VALUE_BYTES] for row in slots[1:-1]]


def observed(x: torch.Tensor, depth: str = "full", **options: Any) -> bytes:
    slots = slots_for(1)
    portable.observe(x, slots, 1, DEPTHS[depth], **options)
    return taken(slots)[0]


def observed_list(xs: Sequence[torch.Tensor], depth: str = "full", **options: Any) -> list[bytes]:
    slots = slots_for(len(xs))
    portable.observe_list(xs, slots, 1, DEPTHS[depth], **options)
    return taken(slots)


def check(actual: bytes, wanted: bytes, note: object = "") -> None:
    """Value bytes against a reference record, sums within what they promise."""
    assert_same(actual + wanted[VALUE_BYTES:], wanted, note, determinism="sums")


# --- one tensor ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ALL)
def test_sizes(dtype: str) -> None:
    for kind in kinds(dtype):
        for size in (*SIZES, 7, 8, 9, 2040, 2041, 2048):
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
    for dtype in ALL:
        kind = kinds(dtype)[min(1, len(kinds(dtype)) - 1)]
        x = LAYOUTS[layout](tensor_of(pattern(kind, dtype, even(26001, dtype), 8), dtype))
        for order in ("storage", "logical"):
            wanted = record(x, order=order)
            logical = order == "logical"
            for bound in (DEFAULT, SMALL):
                actual = observed(x, logical=logical, temporary_bytes=bound)
                check(actual, wanted, (dtype, order, bound))
            assert portable.identity(x, logical) == (
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
                assert portable.identity(lazy, order == "logical")[1] == fields(wanted)["order"]


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
        for code in range(256):
            one = bytes([code])
            check(observed(tensor_of(one, dtype)), record_of_bytes(one, dtype), hex(code))


@pytest.mark.parametrize("dtype", FLOAT_NAMES)
def test_special_codes(dtype: str) -> None:
    row = DTYPES[dtype]
    for code in special_codes(dtype):
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
                # beside numbers of that size 6144 is nothing: what is promised is 1e-6 of abs_sum
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


@settings(max_examples=20)
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


# --- whole records, and what is read -------------------------------------------------------------


def test_whole_records() -> None:
    for x in (torch.tensor([1.0, math.nan]), torch.ones(60, 70).t()[::2], torch.arange(5)):
        for depth in DEPTHS:
            for logical in (False, True):
                row = whole_record(x, DEPTHS[depth], logical)
                wanted = record(x, depth=depth, order="logical" if logical else "storage")
                assert_same(row.numpy().tobytes(), wanted, determinism="sums")


def test_nothing_of_the_tensor_changes() -> None:
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *arguments: Any, **options: Any) -> Any:
            raise AssertionError("an operation went through the subclass")

    x = torch.randn(5000, requires_grad=True)
    y = x * 2
    before, rng = y.detach().clone(), torch.get_rng_state()
    for depth in DEPTHS:
        check(observed(y, depth), record(before, depth=depth))
        check(observed_list([y, x], depth)[0], record(before, depth=depth))
    assert float(portable.found_nonfinite([y, x])) == 0.0
    assert y._version == 0 and torch.equal(y, before)
    assert torch.equal(rng, torch.get_rng_state())
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, torch.full((5000,), 2.0))
    loud = before.as_subclass(Loud)
    check(observed(loud), record(before))
    with torch.inference_mode():
        check(observed(before * 1), record(before))
    check(observed(before), record(before))


@pytest.mark.parametrize("case", sorted(UNREADABLE))
def test_why_a_tensor_is_not_read(case: str) -> None:
    """Said in Python as the extension says it: the same words up to the semicolon."""
    make, _ = UNREADABLE[case]
    x = quiet(make)
    reason = unreadable_reason(x)
    assert reason is not None
    with pytest.raises(fastcheck.UnsupportedTensorError) as error:
        fastcheck.stats(x)
    said = str(error.value).split(";")[0]
    if case not in ("sparse", "sparse_csr", "jagged", "mkldnn"):  # layouts are spelt otherwise
        assert reason.split(";")[0].lower() == said.lower()
    assert reason.startswith("expected") and "came" in reason and ";" in reason


def test_readable_tensors_have_no_reason() -> None:
    for dtype in ALL:
        x = torch.zeros(6, dtype=torch_dtype(dtype))
        for y in (x, x.view(2, 3).t(), x[:0], x[2], x[:1].expand(9), torch.nn.Parameter(x, False)):
            assert unreadable_reason(y) is None
            assert dtype_of(y).code == portable.identity(y)[0]


def test_the_bound_decides_how_much_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above cross the ends of chunks only if a small bound makes small chunks."""
    seen: list[int] = []
    count = portable_one.values.count

    def spy(chunk: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        seen.append(chunk.numel())
        return count(chunk, *arguments, **options)

    monkeypatch.setattr(portable_one.values, "count", spy)
    x = torch.ones(200_000)
    observed(x, "health")
    assert seen == [200_704]  # with padding
    seen.clear()
    observed(x, "health", temporary_bytes=SMALL)
    assert len(seen) > 5 and max(seen) <= SMALL // 17
    seen.clear()
    observed_list([x[:15000], x[:15000]], "health", temporary_bytes=SMALL)
    assert len(seen) == 2
    assert portable_many.values is portable_one.values


def test_no_chunk_has_chains_on_both_sides_of_2_32(monkeypatch: pytest.MonkeyPatch) -> None:
    """As every chunk starts at a multiple of its own number of chains, a power of two."""
    seen: list[tuple[int, int]] = []
    start = sum64.start

    def spy(numbers: torch.Tensor, origin: int) -> torch.Tensor:
        seen.append((origin, numbers.numel()))
        return start(numbers, origin)

    monkeypatch.setattr(sum64, "start", spy)
    for dtype in (torch.float32, torch.float16, torch.float64, torch.uint8):
        for bound in (SMALL, 3 * SMALL, 5 * SMALL):
            seen.clear()
            x = torch.zeros(2_000_000, dtype=torch.uint8).view(dtype)
            observed(x, temporary_bytes=bound)
            chains = seen[0][1]
            assert len(seen) > 1 and chains & (chains - 1) == 0
            assert [origin for origin, _ in seen] == [chains * k for k in range(len(seen))]


def test_all_threads_get_the_same_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that ask for it at the same time: none may be freed while it is read."""
    together, make = threading.Barrier(2), torch.tensor

    def make_late(*args: Any, **options: Any) -> torch.Tensor:
        together.wait()
        return make(*args, **options)

    monkeypatch.setattr(torch, "tensor", make_late)
    found: list[torch.Tensor] = []
    threads = [
        threading.Thread(target=lambda: found.append(constant((3, 5, 8), torch.int64, CPU)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] is found[1] is constant((3, 5, 8), torch.int64, CPU)


def test_every_dtype_has_a_format() -> None:
    assert sorted(form.info.name for form in FORMATS.values()) == ALL
    start, _ = LAYOUT["checksum"]
    assert len(observed(torch.ones(3))) == VALUE_BYTES == start + 8
