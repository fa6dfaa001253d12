"""tests/fakes/ptx_on_cpu detects that a barrier or a fence of the kernel that counts exponents is
missing: each is taken out of a copy, which nvcc compiles.
"""

from __future__ import annotations

import ctypes
import dataclasses
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fastcheck
from fakes import ptx_on_cpu
from fakes.cuda_on_cpu import driver
from fakes.cuda_on_cpu.driver import ROOT, Cut, LaunchError, exponent_words
from support.sampling import IS_WHOLE, sample

pytestmark = pytest.mark.skipif(
    ptx_on_cpu.nvcc() is None or driver.compiler() is None, reason="no nvcc, or no C++ compiler"
)

HEADER = "csrc/cuda/exponents.cuh"
TEXT = (ROOT / HEADER).read_text()
PLACES = list(re.finditer(r"^ *__(syncwarp|syncthreads|threadfence)\(\);.*\n", TEXT, re.M))


def without(place: tuple[int, int], folder: Path) -> ctypes.CDLL:
    """The float32 kernel with a part of its header left out."""
    for each in ("csrc/core", "csrc/cuda", "tests/fakes/cuda_on_cpu", "tests/fakes/ptx_on_cpu"):
        shutil.copytree(ROOT / each, folder / each, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / HEADER).write_text(TEXT[: place[0]] + TEXT[place[1] :])
    return ptx_on_cpu.load(ptx_on_cpu.ptx(ptx_on_cpu.FLOAT32_EXPONENTS, "90", folder))


def faults(lib: ctypes.CDLL, seeds: int) -> Iterator[str]:
    """Under one schedule after the other: errors, and wrong words."""
    x = torch.randn(12 * 4096 + 77, generator=torch.Generator().manual_seed(1))
    x[76] = float("nan")  # counted one by one
    # A few warps of many tiles; and blocks of a tile, which end at about the same time, each with
    # bins of its own: what another block adds to a bin later has all of it seen.
    scales = torch.tensor([2.0**-12, 1.0, 2.0**12]).repeat_interleave(4096)
    cases = (
        (x[4096 : 4 * 4096] * scales, Cut(warps=1, blocks=3)),
        (x[: 5 * 4096], Cut(warps=2, blocks=2)),
        (x[::2], Cut(warps=2, blocks=3)),
    )
    wanted = [[int(word) for word in fastcheck.exponents(part).words] for part, _ in cases]
    for seed in range(1, seeds + 1):
        for (part, cut), words in zip(cases, wanted):
            try:
                found = exponent_words(part, cut=dataclasses.replace(cut, seed=seed), lib=lib)
                if found != words:
                    yield "wrong words"
            except (LaunchError, AssertionError) as error:  # of the machine, of the driver
                yield str(error)


def test_no_fault_in_the_kernel_as_it_is(tmp_path: Path) -> None:
    assert list(faults(without((0, 0), tmp_path), seeds=12 if IS_WHOLE else 3)) == []


@pytest.mark.parametrize("place", sample(PLACES, 1), ids=lambda place: place[1])
def test_every_barrier_and_fence_is_needed(place: re.Match[str], tmp_path: Path) -> None:
    assert next(faults(without(place.span(), tmp_path), seeds=300), None) is not None
