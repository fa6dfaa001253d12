"""The checksum: fixed vectors, and each kind of change that it is specified to detect."""

from __future__ import annotations

import json
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastcheck
from fastcheck.statistics import functions
from fastcheck.statistics.functions import crc32
from support.helpers import ISAS, ON_CPU, assert_same, every_isa, kernel, put, tensor_of
from support.paths import ROOT
from support.records.reference import (
    DTYPES,
    FINISH,
    FMIX,
    HALVES,
    VALUE_BYTES,
    chain_term,
    checksum,
    checksum_plain,
    fields,
    length_term,
    pattern,
    record_of_bytes,
    splitmix64,
)
from support.records.vectors import PATH
from support.sampling import sample

pytestmark = pytest.mark.fake_statistics


PAGE = ROOT / "docs" / "record-format.md"
WIDTHS = {"int8": 1, "bfloat16": 2, "float32": 4, "float64": 8}


def of(x: torch.Tensor) -> int:
    value: int = fields(kernel(x))["checksum"]
    return value


def halves(value: int) -> tuple[int, int]:
    return value & 0xFFFFFFFF, value >> 32


@pytest.mark.parametrize("isa", ISAS)
def test_fixed_vectors(isa: str) -> None:
    for kind, dtype, count, seed, wanted in json.loads(PATH.read_text())["vectors"]:
        x = tensor_of(pattern(kind, dtype, count, seed), dtype)
        for _ in every_isa([isa]):
            actual = kernel(x)[:VALUE_BYTES]
            assert_same(
                actual + bytes(80), bytes.fromhex(wanted) + bytes(80), (kind, dtype, count, seed)
            )


def test_values_written_here() -> None:
    # Literals on purpose: the reference and the vectors can be made anew together, these can't.
    cases = {
        (): 0x8937D51CF7969670,
        (0.0,): 0x9FB7030B41D1932E,
        (1.0, -2.0, 3.0): 0xB242ABE9BCFA5757,
    }
    for elements, wanted in cases.items():
        assert of(torch.tensor(elements, dtype=torch.float32)) == wanted
        assert checksum_plain(np.array(elements, "<f4").tobytes(), 4) == wanted


def test_the_page_says_what_the_reference_does() -> None:
    page = PAGE.read_text()
    for constants in HALVES.values():
        row = [f"0x{constants[name]:08x}" for name in "SPQM"] + [str(constants["R"])]
        assert " | ".join(row) in page
    for constant in (*FMIX, *(factor for _, _, factor in FINISH[:-1])):
        assert f"0x{constant:08x}" in page
    assert f"0x{length_term('a', 12):08x} (a) and 0x{length_term('b', 12):08x} (b)" in page
    for number, word in enumerate((0x3F800000, 0xC0000000, 0x40400000)):
        for half, term in chain_term(number, [word]).items():
            assert any(
                f"| {number} | {half} |" in row and f"| 0x{term:08x} |" in row
                for row in page.splitlines()
            )
    example = torch.tensor([1.0, -2.0, 3.0])
    assert f"{of(example):#018x}" in page
    assert f"{of(torch.empty(0)):#018x}" in page
    rec = record_of_bytes(example.numpy().tobytes(), "float32")
    words = "".join(
        page[page.index("in hexadecimal from byte 0") :].split(":", 1)[1].split("## 8")[0].split()
    )
    assert words == rec[:VALUE_BYTES].hex()


def test_public_checksum_and_stats_agree() -> None:
    x = torch.linspace(-1, 1, 5000).to(torch.bfloat16)
    assert fastcheck.checksum(put(x)) == of(x) == fastcheck.stats(put(x)).checksum
    assert isinstance(fastcheck.checksum(put(x)), int)
    assert fastcheck.checksum(put(x)) >= 0


# --- any change of a single word -----------------------------------------------------------------


@given(
    count=st.integers(1, 3000),
    seed=st.integers(0, 2**32),
    where=st.floats(0, 1, exclude_max=True),
    delta=st.integers(1, 2**32 - 1),
)
def test_any_change_of_a_single_word(count: int, seed: int, where: float, delta: int) -> None:
    for dtype, itemsize in WIDTHS.items():
        raw = bytearray(pattern("random", dtype, 4 * count // itemsize, seed))
        if len(raw) < 4:
            continue
        before = of(tensor_of(bytes(raw), dtype))
        at = 4 * int(where * (len(raw) // 4))
        word = int.from_bytes(raw[at : at + 4], "little") ^ delta
        raw[at : at + 4] = word.to_bytes(4, "little")
        assert before != of(tensor_of(bytes(raw), dtype))


@pytest.mark.parametrize("dtype", sorted(WIDTHS))
def test_every_bit_of_a_small_tensor_counts(dtype: str) -> None:
    raw = pattern("random", dtype, 24 // WIDTHS[dtype], 3) + pattern("random", dtype, 1, 5)
    seen = {of(tensor_of(raw, dtype))}
    for bit in range(8 * len(raw)):
        changed = bytearray(raw)
        changed[bit // 8] ^= 1 << bit % 8
        seen.add(of(tensor_of(bytes(changed), dtype)))
    assert len(seen) == 8 * len(raw) + 1


# --- changes that other fingerprints miss --------------------------------------------------------


@given(count=st.integers(2, 9000), seed=st.integers(0, 2**32), data=st.data())
def test_swapping_two_different_elements(count: int, seed: int, data: st.DataObject) -> None:
    i = data.draw(st.integers(0, count - 1))
    j = data.draw(st.integers(0, count - 1))
    for dtype in WIDTHS:
        x = tensor_of(pattern("random", dtype, count, seed), dtype)
        y = x.clone()
        y[i], y[j] = x[j].clone(), x[i].clone()
        same = kernel(x[i])[:VALUE_BYTES] == kernel(x[j])[:VALUE_BYTES]
        assert (of(x) == of(y)) == same
    # a XOR over all words, as other tools use, sees none of these swaps
    words = np.frombuffer(pattern("random", "float32", count, seed), "<u4").copy()
    swapped = words.copy()
    swapped[[i, j]] = swapped[[j, i]]
    assert np.bitwise_xor.reduce(words) == np.bitwise_xor.reduce(swapped)


@given(
    count=st.integers(1, 5000),
    seed=st.integers(0, 2**32),
    flips=st.sets(st.integers(0, 4999), min_size=1, max_size=6),
)
def test_flipping_signs(count: int, seed: int, flips: set[int]) -> None:
    for dtype in ("float32", "bfloat16", "float16", "float64", "float8_e5m2"):
        width = DTYPES[dtype].itemsize
        bits = np.frombuffer(pattern("random", dtype, count, seed), f"<u{width}").copy()
        flipped = bits.copy()
        at = sorted({index % count for index in flips})
        flipped[at] ^= bits.dtype.type(1 << (8 * width - 1))
        assert of(tensor_of(bits.tobytes(), dtype)) != of(tensor_of(flipped.tobytes(), dtype))


@given(
    count=st.integers(2, 9000),
    value=st.integers(1, 2**16 - 1),
    places=st.sets(st.integers(0, 8999), min_size=2, max_size=8),
)
def test_equal_values_an_even_number_of_times(count: int, value: int, places: set[int]) -> None:
    at = sorted({place % count for place in places})
    at = at[: len(at) // 2 * 2]
    seen = set()
    for chosen in (at[:k] for k in range(0, len(at) + 1, 2)):
        bits = np.zeros(count, "<u2")
        bits[chosen] = value
        seen.add(of(tensor_of(bits.tobytes(), "bfloat16")))
    assert len(seen) == len(at) // 2 + 1


def test_permutations() -> None:
    x = tensor_of(pattern("exponent:-8", "float32", 6 * 4096, 1), "float32")
    grid = x.view(6, 64, 64)
    variants = {
        "as it is": x,
        "reversed": x.flip(0),
        "rotated by one": x.roll(1),
        "rotated by a row": x.roll(64),
        "rotated by a run": x.roll(1024),
        "rotated by a tile": x.roll(4096),
        "tiles swapped": grid[[1, 0, 2, 3, 4, 5]],
        "rows reversed": grid.flip(1),
        "lanes reversed": grid.flip(2),
        "rows and lanes exchanged": grid.transpose(1, 2).contiguous(),
        "tile and row exchanged": grid.transpose(0, 1).contiguous(),
        "runs swapped": grid.view(6, 4, 16, 64)[:, [1, 0, 3, 2]],
        "sorted": x.sort().values,
        "shuffled": x[torch.from_numpy(splitmix64(x.numel(), 9).argsort(kind="stable"))],
    }
    seen = {name: of(t.contiguous()) for name, t in variants.items()}
    assert len(set(seen.values())) == len(variants), seen


def test_length() -> None:
    for dtype in sample(WIDTHS, len(WIDTHS) if ON_CPU else 1):  # int8 has all lengths in bytes
        x = torch.zeros(9000).to(getattr(torch, dtype))
        sizes = [*range(300), 4095, 4096, 4097, 8191, 8192, 8999, 9000]
        seen = [of(x[:n]) for n in sizes]
        assert len(set(seen)) == len(sizes)
        # both halves tell lengths apart, not only the two together
        assert len({halves(value)[0] for value in seen}) == len(sizes)
        assert len({halves(value)[1] for value in seen}) == len(sizes)


def test_it_is_a_checksum_of_bytes() -> None:
    x = tensor_of(pattern("random", "float32", 5000, 2), "float32")
    assert of(x) == of(x.view(torch.int32))
    assert of(x) != of(x.view(torch.int16)) != of(x.view(torch.float64))
    assert of(x[:16]) == of(x[:16].view(torch.int8))  # one row of the narrower type


def test_zero_and_minus_zero_and_nan_payloads_differ() -> None:
    bits = torch.tensor(
        [0, -(2**31), 0x7FC00000, 0x7FC00001, 0x7F800001, -0x400000], dtype=torch.int32
    )
    assert len({of(bits[k : k + 1].view(torch.float32)) for k in range(len(bits))}) == len(bits)


def test_layout_and_order() -> None:
    x = tensor_of(pattern("random", "float32", 6000, 2), "float32").view(60, 100)
    logical = fastcheck.stats(put(x.t()), order="logical").checksum
    assert logical == of(x.t().contiguous())
    assert fastcheck.checksum(put(x.t())) == of(x) != logical
    assert fastcheck.checksum(put(x[:, 1:])) == of(x[:, 1:].contiguous())


# --- crc32 ---------------------------------------------------------------------------------------


def test_crc32_is_zlibs_over_the_row_major_bytes() -> None:
    for dtype in sorted(DTYPES):
        if dtype == "bool" and not ON_CPU:
            continue  # moving a strided bool may rewrite bytes that are neither 0 nor 1
        x = tensor_of(pattern("random", dtype, 26000, 6), dtype)[:12000].view(100, 120)
        for view in (x, x.t(), x[:, ::2], x[3, 4], x[:0], x[:1].expand(5, 120)):
            plain = (
                view.contiguous().flatten().view(torch.uint8) if view.numel() else torch.empty(0)
            )
            wanted = zlib.crc32(plain.numpy().tobytes())
            assert crc32(put(view)) == wanted
    assert crc32(put(torch.tensor([1.0, 2.0]))) == zlib.crc32(np.array([1, 2], "<f4").tobytes())
    assert isinstance(crc32(put(torch.ones(3))), int)


def test_crc32_of_one_element_with_a_stride() -> None:
    x = torch.arange(120).view(10, 12)
    for view in (x[:1, 3], x[2:3, 3:4], x[4, 5], x.t()[3:4]):
        wanted = zlib.crc32(np.ascontiguousarray(view.numpy()).tobytes())
        assert crc32(put(view)) == wanted, (view.shape, view.stride())


def test_crc32_of_lazy_views() -> None:
    x = tensor_of(pattern("exponent:-8", "complex64", 2000, 6), "complex64")
    assert x.conj().is_conj() and x.conj().imag.is_neg()
    assert crc32(put(x.conj())) == zlib.crc32(x.numpy().conj().tobytes())
    assert crc32(put(x.conj().imag)) == zlib.crc32((-x.numpy().imag).tobytes())


@pytest.mark.parametrize("chunk_bytes", [8, 60, 1000, 4096])
def test_crc32_in_chunks(chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of one element, shorter than a row, and of several rows, with a remainder."""
    monkeypatch.setattr(functions, "_CRC_CHUNK_BYTES", chunk_bytes)
    x = tensor_of(pattern("random", "int64", 600, 6), "int64").view(5, 10, 12)
    views = (
        x,
        x.permute(2, 0, 1),
        x[:, ::3],
        x[:, :, 3:4],
        x[:1].expand(4, 10, 12),
        x[0, 0],
        x[0, 0, 0],
        x[:0],
    )
    for view in views:
        wanted = zlib.crc32(np.ascontiguousarray(view.numpy()).tobytes())
        assert crc32(put(view)) == wanted, (view.shape, view.stride())


def test_crc32_of_more_than_one_chunk_as_shipped() -> None:
    x = torch.arange(functions._CRC_CHUNK_BYTES // 8 + 5)
    assert crc32(put(x)) == zlib.crc32(x.numpy().tobytes())


def test_the_reference_checksums_agree() -> None:
    raw = pattern("random", "int8", 9001, 0)
    assert checksum(raw, 1) == checksum_plain(raw, 1)
