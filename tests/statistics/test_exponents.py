"""fastcheck.exponents: the words of every kernel against the reference; views, threads, errors."""

from __future__ import annotations

import pytest
import torch

import fastcheck
from fastcheck import UnsupportedTensorError
from fastcheck.backends.portable.exponents import count_exponents
from fastcheck.record.exponents import EXPONENT_WORDS
from support.helpers import ISAS, cpu_only, even, every_isa, put, tensor_of
from support.records.reference import FLOAT_NAMES, pattern
from support.records.reference_exponents import WORDS, exponent_words
from support.records.special_codes import special_codes
from support.records.torch_dtypes import torch_dtype
from support.records.views import LAYOUTS

# Less than a block, around the ends of blocks, of a vector's part, of a tile and of several tiles.
SIZES = (0, 1, 15, 16, 17, 31, 33, 64, 100, 2048 + 7, 4096, 2 * 4096 + 1000)


def data(name: str, count: int) -> list[torch.Tensor]:
    """Normal numbers of usual and of extreme sizes, zeros among them, and random bits."""
    dtype = torch_dtype(name)
    generator = torch.Generator().manual_seed(count)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    x = torch.randn(count, dtype=wide, generator=generator)
    some_zeros = x * (torch.rand(count, generator=generator) > 0.3)
    near = [x * factor for factor in (1.0, 1e-5, 2.0**-130)]
    bits = tensor_of(pattern("random", name, even(count, name), 7), name)
    return [*(one.to(dtype) for one in (*near, some_zeros, x * 0)), bits]


def words_of(x: torch.Tensor, order: str = "storage") -> list[int]:
    return [int(word) for word in fastcheck.exponents(put(x), order=order).words]


@pytest.mark.parametrize("name", FLOAT_NAMES)
def test_every_kernel_equals_the_reference(name: str) -> None:
    for count in SIZES:
        for x in data(name, count):
            expected = exponent_words(x)
            for isa in every_isa(ISAS):
                assert words_of(x) == expected, (count, isa)
            small_chunks = count_exponents(put(x), False, 1 << 19)
            assert small_chunks.tolist() == expected, count


@pytest.mark.parametrize("name", FLOAT_NAMES)
def test_every_edge_of_the_format(name: str) -> None:
    width = torch_dtype(name).itemsize // (2 if name.startswith("complex") else 1)
    codes = special_codes(name)
    raw = b"".join(code.to_bytes(width, "little") for code in codes * 2)
    for x in (tensor_of(raw, name), *(tensor_of(raw, name)[i : i + 1] for i in range(len(codes)))):
        expected = exponent_words(x)
        for isa in every_isa(ISAS):
            assert words_of(x) == expected, (x, isa)
        assert count_exponents(put(x)).tolist() == expected, x


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_layouts(layout: str) -> None:
    for name in ("bfloat16", "complex64"):
        x = LAYOUTS[layout](data(name, 13_000)[3])
        for order in ("storage", "logical"):
            expected = exponent_words(x, order)
            assert words_of(x, order) == expected, (name, order)
            assert count_exponents(put(x), order == "logical").tolist() == expected, (name, order)


def test_views_of_other_signs_and_alignments() -> None:
    x = torch.randn(500, dtype=torch.complex64)
    for view in (x.conj(), torch._neg_view(x), x[3:]):
        assert words_of(view) == exponent_words(view)
    raw = pattern("exponent:-8", "float32", 5000, 1)
    assert words_of(tensor_of(raw, "float32", offset=3)) == exponent_words(
        tensor_of(raw, "float32")
    )


@cpu_only
def test_threads_and_flushed_denormals_change_nothing() -> None:
    x = torch.randn((1 << 18) + 999)
    x[::7] *= 2.0**-130
    before = torch.get_num_threads()
    one = words_of(x)
    try:
        torch.set_num_threads(1)
        assert words_of(x) == one
        torch.set_flush_denormal(True)
        assert words_of(x) == one
        half = x[:4097].half() * 2**-12
        assert words_of(half) == count_exponents(half).tolist()
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(before)


def test_histograms() -> None:
    x = torch.tensor([8.0, 5.0, -4.0, 0.25, 0.0, float("nan"), float("inf")] + [0.0] * 25 + [1.0])
    found = fastcheck.exponents(put(x))
    assert (found.components, found.nonfinite_count, found.zero_count) == (33, 2, 26)
    assert (found.count, found.abs_max, found.top, found.block_top) == (5, 8.0, 3, 3)
    # 8 and 5 are above 4; 4 itself is not.
    assert found.elements[:6].tolist() == [2, 1, 0, 1, 0, 1]
    assert found.maxima(32)[:4].tolist() == [1, 0, 0, 1]
    assert found.maxima(16)[:4].tolist() == [1, 0, 0, 1]
    assert found.below(32)[:8].tolist() == [0, 3, 1, 0, 0, 0, 1, 0]
    assert found.words.shape == (EXPONENT_WORDS,) == (WORDS,)
    with pytest.raises(fastcheck.ConfigError, match="32 or 16"):
        found.maxima(8)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool])
def test_integers_are_refused(dtype: torch.dtype) -> None:
    x = put(torch.ones(3, dtype=dtype))
    with pytest.raises(UnsupportedTensorError, match="integers have no exponents"):
        fastcheck.exponents(x)


def test_other_errors() -> None:
    with pytest.raises(UnsupportedTensorError, match=r"expected a torch\.Tensor"):
        fastcheck.exponents([1.0])  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(UnsupportedTensorError, match="meta"):
        fastcheck.exponents(torch.ones(3, device="meta"))
    with pytest.raises(fastcheck.ConfigError, match="order"):
        fastcheck.exponents(put(torch.ones(3)), order="rows")
