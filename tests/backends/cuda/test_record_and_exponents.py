"""The CUDA kernel that counts exponents in the pass of a record, run thread by thread on the CPU
(tests/fakes/cuda_on_cpu): what it writes equals what the kernels of each write alone.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from backends.cuda.test_exponents import CUTS, edges, normal, of_size
from fakes.cuda_on_cpu import driver
from fakes.cuda_on_cpu.driver import (
    Cut,
    LaunchError,
    exponent_words,
    record,
    record_and_exponents,
)
from fakes.layouts import LAYOUTS
from support.helpers import tensor_of
from support.records.reference import FLOAT_NAMES, pattern
from support.sampling import sample

pytestmark = pytest.mark.skipif(driver.compiler() is None, reason="no C++ compiler")

TILE = 4096
SIZES = (0, 1, 17, 100, TILE - 1, TILE, 3 * TILE + 1001, 9 * TILE)
#: Several chunks, of several tiles of a warp.
CHUNKS = (*CUTS, Cut(warps=2, share=2, blocks=2, seed=5), Cut(warps=1, share=4, blocks=3))


def alone(x: torch.Tensor, order: str = "storage") -> tuple[bytes, list[int]]:
    return record(x, order=order), exponent_words(x, order)


@pytest.mark.parametrize("name", FLOAT_NAMES)
def test_sizes(name: str) -> None:
    cuts = itertools.cycle(CHUNKS)
    for count in sample(SIZES, 4):
        for x in of_size(name, count):
            cut = next(cuts)
            assert record_and_exponents(x, cut=cut) == alone(x), (count, cut)


@pytest.mark.parametrize("name", FLOAT_NAMES)
def test_whole_tiles_that_are_read_again(name: str) -> None:
    """What is not finite, and magnitudes that are scaled: the record takes another way through the
    tile, whose exponents are counted already.
    """
    width = 8 if name in ("float64", "complex128") else 4
    scale = 2.0**400 if width == 8 else 2.0**60
    for factor in (scale, 1 / scale, 1.0):
        x = normal(name, 4 * TILE, factor)
        x[TILE + 5] = float("nan")
        x[2 * TILE + 7] = 0.0
        assert record_and_exponents(x, cut=Cut(warps=1, share=4)) == alone(x), factor


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e5m2"])
def test_every_edge_of_the_format(name: str) -> None:
    x = edges(name)
    assert record_and_exponents(x) == alone(x)


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_the_window_moves_between_tiles_of_a_share(name: str) -> None:
    x = torch.cat([normal(name, TILE, 2.0**power) for power in (-60, 0, 31, -20, 90, 3, -120, 120)])
    for cut in CHUNKS:
        assert record_and_exponents(x, cut=cut) == alone(x), cut


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_layouts(layout: str) -> None:
    for name in ("float32", "bfloat16", "complex64", "float8_e4m3fn"):
        x = LAYOUTS[layout](normal(name, 12_000))
        for order in ("storage", "logical"):
            assert record_and_exponents(x, order) == alone(x, order), (name, order)


@pytest.mark.parametrize("name", ["float64", "float32", "float16", "float8_e5m2"])
def test_alignment(name: str) -> None:
    raw = pattern("exponent:-3", name, TILE + 333, 21)
    expected = alone(tensor_of(raw, name))
    for offset in sample(range(1, 17), 6):
        x = tensor_of(raw, name, offset)
        assert record_and_exponents(x, cut=Cut(seed=offset)) == expected, offset


def test_integers_have_no_exponents() -> None:
    with pytest.raises(LaunchError, match="argument"):
        record_and_exponents(torch.arange(5))
