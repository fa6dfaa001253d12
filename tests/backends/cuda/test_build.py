"""nvcc compiles csrc/cuda without a warning, and no kernel spills registers.

A spill or a stack frame is local memory: a second memory stream in a kernel whose time is one
reading of memory. FASTCHECK_CUDA_ARCHS (space-separated, e.g. "75 90 120") says what is compiled;
one architecture by default. Most sources are compiled in whole runs (``make test-release``).
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

SOURCES = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
ARCHS = os.environ.get("FASTCHECK_CUDA_ARCHS", "90").split()
# Kernels by file: three depths of each component type, of three types for a launch's only tensor
# too; one found_nonfinite of each format.
KERNELS = {
    "exponents": 6,
    "found_nonfinite": 6,
    "launch": 0,
    "launch_exponents": 0,
    "record_and_exponents": 6,
    "records_bytes": 15,
    "records_floats": 21,
    "records_integers": 18,
}
# Those of the record of floating-point numbers of more than one byte are in each run, beside the
# smallest; test_extension_build.py compiles all of them, without optimisation.
SHORT = ("found_nonfinite", "records_floats")
# Two blocks of 256 threads per multiprocessor; one where exponents are counted beside the record.
MAX_REGISTERS = 128
MAX_WITH_EXPONENTS = 255

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")


def test_every_source_is_compiled() -> None:
    assert {path.stem for path in SOURCES} == set(KERNELS)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "source",
    [path for path in SOURCES if IS_WHOLE or path.stem in SHORT],
    ids=lambda path: path.stem,
)
def test_registers_alone(source: Path, arch: str) -> None:
    _, said = ptx_on_cpu.cubin(source.relative_to(ROOT).as_posix(), arch)
    assert len(re.findall(r"Compiling entry function", said)) == KERNELS[source.stem]
    frames = re.findall(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said
    )
    assert len(frames) >= KERNELS[source.stem]
    assert set(frames) <= {("0", "0", "0")}, said
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", said)]
    assert len(registers) == KERNELS[source.stem]
    most = MAX_WITH_EXPONENTS if source.stem == "record_and_exponents" else MAX_REGISTERS
    assert max(registers, default=0) <= most
    assert "lmem" not in said
    # Shared memory is the launch's, for as many warps as a block has.
    assert "smem" not in said


@pytest.mark.parametrize("arch", ARCHS)
def test_arguments_of_a_launch(arch: str) -> None:
    """Those of its only tensor are a tenth of those of a list or a layout."""
    path, _ = ptx_on_cpu.cubin("csrc/cuda/records_floats.cu", arch)
    entry = r"^\.\w+ \.entry (\w+)\(\s*\.param \.align 8 \.b8 \w+\[(\d+)\]\s*\)"
    entries = re.findall(entry, path.with_suffix(".ptx").read_text(), re.M)
    sizes = [(int(size), "OneTensor" in name) for name, size in entries]
    assert sorted(sizes) == [(120, True)] * 9 + [(1368, False)] * 12
