"""The CUDA exponent kernel, run thread by thread on the CPU (tests/fakes/cuda_on_cpu): its words
equal the CPU's, which tests/statistics/test_exponents.py holds to the reference.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Union

import pytest
import torch

import fastcheck
from fakes.cuda_on_cpu import driver
from fakes.cuda_on_cpu.driver import Cut, LaunchError, exponent_words
from fakes.layouts import LAYOUTS
from support.helpers import even, tensor_of
from support.records.reference import FLOAT_NAMES, pattern
from support.records.special_codes import special_codes
from support.records.torch_dtypes import torch_dtype
from support.sampling import sample

pytestmark = pytest.mark.skipif(driver.compiler() is None, reason="no C++ compiler")

# Of one block and of several, fewer and more warps than tiles, in other orders.
CUTS = (
    Cut(),
    Cut(warps=1, blocks=1, resident=1),
    Cut(warps=2, blocks=3, seed=2),
    Cut(warps=8, blocks=2, seed=4, resident=7),
)


def words(x: torch.Tensor, order: str = "storage") -> list[int]:
    return [int(word) for word in fastcheck.exponents(x, order=order).words]


def normal(name: str, count: int, scale: Union[float, torch.Tensor] = 1.0) -> torch.Tensor:
    dtype = torch_dtype(name)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    x = torch.randn(count, dtype=wide, generator=torch.Generator().manual_seed(count))
    return (x * scale).to(dtype)


def of_size(name: str, count: int) -> Iterator[torch.Tensor]:
    """Ordinary numbers, some of which are 0, and random bits."""
    yield normal(name, count)
    yield normal(name, count, torch.arange(count) % 3 != 0)
    yield tensor_of(pattern("random", name, even(count, name), 7), name)


def edges(name: str) -> torch.Tensor:
    """Every edge of the format, twice."""
    width = torch_dtype(name).itemsize // (2 if name.startswith("complex") else 1)
    codes = special_codes(name)
    return tensor_of(b"".join(code.to_bytes(width, "little") for code in codes * 2), name)


@pytest.mark.parametrize("name", FLOAT_NAMES)
def test_sizes(name: str) -> None:
    cuts = itertools.cycle(CUTS)
    for count in sample((0, 1, 15, 16, 17, 33, 64, 100, 2055, 4096, 3 * 4096 + 1001), 6):
        for x in of_size(name, count):
            cut = next(cuts)
            assert exponent_words(x, cut=cut) == words(x), (count, cut)


@pytest.mark.parametrize("name", FLOAT_NAMES)
def test_every_edge_of_the_format(name: str) -> None:
    """Alone in a tile of ordinary numbers, and all of them together."""
    x = edges(name)
    assert exponent_words(x) == words(x)
    for i in sample(range(0, x.numel(), 3), 12):
        tile = normal(name, 600)
        tile[37 * (i % 16)] = x[i]
        assert exponent_words(tile) == words(tile), x[i]


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_the_window_moves_with_the_numbers(name: str) -> None:
    """Up and down between tiles, further than 32 binades, and within blocks."""
    tiles = [normal(name, 4096, 2.0**power) for power in (-60, 0, 31, -20, 90, 3, -120, 120)]
    wide = torch.randn(4096).mul_(2.0 ** torch.arange(-100, 100, 200 / 4096)).to(tiles[0].dtype)
    zeros = torch.zeros_like(wide)
    x = torch.cat([zeros, *tiles, wide, zeros, wide[torch.randperm(4096)], tiles[1]])
    for cut in CUTS:
        assert exponent_words(x, cut=cut) == words(x), cut


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_the_ends_of_the_window(name: str) -> None:
    """Two binades of one block so far apart, and powers of two, whose own binade is one lower."""
    for apart in range(27, 36):
        for mantissa in (1.0, 1.5):
            x = normal(name, 4096, 1e-3)
            x[100], x[101], x[1000] = 1.5, mantissa * 2.0**-apart, mantissa
            assert exponent_words(x) == words(x), (apart, mantissa)


def test_counters_of_a_thread_are_emptied_before_they_are_full() -> None:
    for name in ("float32", "float16", "float8_e5m2"):
        x = normal(name, 1).expand(40 * 4096).contiguous()
        assert exponent_words(x, cut=Cut(warps=1, blocks=1)) == words(x)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_layouts(layout: str) -> None:
    for name in ("float32", "bfloat16", "complex64", "float8_e4m3fn"):
        x = LAYOUTS[layout](normal(name, 12_000))
        for order in ("storage", "logical"):
            assert exponent_words(x, order) == words(x, order), (name, order)


@pytest.mark.parametrize("name", ["float64", "float32", "float16", "float8_e5m2"])
def test_alignment(name: str) -> None:
    raw = pattern("exponent:-3", name, 4096 + 333, 21)
    expected = words(tensor_of(raw, name))
    for offset in sample(range(1, 17), 6):
        x = tensor_of(raw, name, offset)
        assert exponent_words(x, cut=Cut(seed=offset)) == expected, offset


def test_integers_have_no_exponents() -> None:
    with pytest.raises(LaunchError, match="argument"):
        exponent_words(torch.arange(5))
