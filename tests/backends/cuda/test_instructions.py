"""Instructions of the kernels for sm_90, counted: in machine code (bench/instructions.py) for a
whole tile, and in PTX (tests/fakes/ptx_on_cpu) on the longest thread of real launches.

The bars are what was counted with nvcc 13.0, and a little room for other releases. Nothing here is
a time.
"""

from __future__ import annotations

import shutil
import sys

import pytest

from fakes import ptx_on_cpu
from support.paths import ROOT

sys.path.append(str(ROOT / "bench"))

import instructions
import machine_code

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")

# ---- machine code -------------------------------------------------------------------------------

# Issue slots for a component at depths health, stats and full.
SLOTS = {
    "float32": (7.4, 13.1, 18.6),
    "bfloat16": (3.4, 9.7, 12.5),
    "float16": (3.4, 9.4, 12.2),
    "float8_e4m3fn": (5.3, 12.4, 14.0),
}


@pytest.fixture(scope="module")
def kernels() -> instructions.Kernels:
    program = machine_code.nvdisasm()
    if program is None:
        pytest.skip("neither nvdisasm nor Triton is installed")
    found: instructions.Kernels = {}
    for name in instructions.SOURCES:
        path, _ = ptx_on_cpu.cubin(f"csrc/cuda/{name}.cu", "90")
        found |= machine_code.kernels(path, program)
    return found


@pytest.mark.parametrize("dtype", SLOTS)
def test_slots_of_a_whole_tile(dtype: str, kernels: instructions.Kernels) -> None:
    for depth, bar in zip(instructions.DEPTHS, SLOTS[dtype]):
        slots = instructions.slots(kernels, dtype, depth)
        # Below half of the bar, the path that was found is not that of a tile.
        assert bar / 2 < slots <= bar, depth
