"""nvcc compiles csrc/cuda without a warning, and no kernel spills registers.

A spill or a stack frame is local memory: a second memory stream in a kernel whose time is one
reading of memory. FASTCHECK_CUDA_ARCHS (space-separated, e.g. "75 90 120") says what is compiled;
one architecture by default. Whole runs (``make test-release``) have the sources, others the record
of float32 at full depth beside the smallest; test_extension_build.py compiles all of them, without
optimisation.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from fakes import ptx_on_cpu
from support.paths import ROOT
from support.sampling import IS_WHOLE

ARCHS = os.environ.get("FASTCHECK_CUDA_ARCHS", "90").split()
# Kernels by file: three depths of each component type, of three types for a launch's only tensor
# too; one found_nonfinite of each format.
KERNELS = {
    "csrc/cuda/exponents.cu": 6,
    "csrc/cuda/found_nonfinite.cu": 6,
    "csrc/cuda/launch.cu": 0,
    "csrc/cuda/launch_exponents.cu": 0,
    "csrc/cuda/record_and_exponents.cu": 6,
    "csrc/cuda/records_bytes.cu": 15,
    "csrc/cuda/records_floats.cu": 21,
    "csrc/cuda/records_integers.cu": 18,
}
(FLOAT32,) = ptx_on_cpu.FLOAT32_KERNELS
COMPILED = KERNELS if IS_WHOLE else {FLOAT32: 2, "csrc/cuda/found_nonfinite.cu": 6}
# Two blocks of 256 threads per multiprocessor; one where exponents are counted beside the record.
MAX_REGISTERS = 128
MAX_WITH_EXPONENTS = 255

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")


def test_every_source_is_compiled() -> None:
    sources = (ROOT / "csrc" / "cuda").glob("*.cu")
    assert {path.relative_to(ROOT).as_posix() for path in sources} == set(KERNELS)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("source", COMPILED, ids=lambda source: Path(source).stem)
def test_registers_alone(source: str, arch: str) -> None:
    _, said = ptx_on_cpu.cubin(source, arch)
    kernels = COMPILED[source]
    assert len(re.findall(r"Compiling entry function", said)) == kernels
    frames = re.findall(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said
    )
    assert len(frames) >= kernels
    assert set(frames) <= {("0", "0", "0")}, said
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", said)]
    assert len(registers) == kernels
    most = MAX_WITH_EXPONENTS if "record_and_exponents" in source else MAX_REGISTERS
    assert max(registers, default=0) <= most
    assert "lmem" not in said
    # Shared memory is the launch's, for as many warps as a block has.
    assert "smem" not in said


@pytest.mark.parametrize("arch", ARCHS)
def test_arguments_of_a_launch(arch: str) -> None:
    """Those of its only tensor are a tenth of those of a list or a layout."""
    source, of_one, of_more = (
        ("csrc/cuda/records_floats.cu", 9, 12) if IS_WHOLE else (FLOAT32, 1, 1)
    )
    path, _ = ptx_on_cpu.cubin(source, arch)
    entry = r"^\.\w+ \.entry (\w+)\(\s*\.param \.align 8 \.b8 \w+\[(\d+)\]\s*\)"
    entries = re.findall(entry, path.with_suffix(".ptx").read_text(), re.M)
    sizes = [(int(size), "OneTensor" in name) for name, size in entries]
    assert sorted(sizes) == [(120, True)] * of_one + [(1368, False)] * of_more
