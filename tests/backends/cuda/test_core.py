"""nvcc compiles all of csrc/core, which host and device share; the errors of its runtime."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from fakes.cuda_on_cpu import driver
from support.paths import ROOT

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")


@needs_nvcc
def test_core_compiles_for_a_device(tmp_path: Path) -> None:
    result = subprocess.run(
        [
            "nvcc",
            "-std=c++17",
            "-arch=sm_90",
            "-fmad=false",
            "-Werror=all-warnings",
            f"-I{ROOT / 'csrc'}",
            "-cubin",
            str(ROOT / "tests" / "lab" / "core_on_device.cu"),
            "-o",
            str(tmp_path / "core.cubin"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "core.cubin").stat().st_size > 0


@needs_nvcc
@pytest.mark.skipif(driver.compiler() is None, reason="no C++ compiler")
def test_the_errors_that_end_a_process_are_known() -> None:
    """Those of which the runtime's header reads so, by number."""
    listed = subprocess.run(
        ["nvcc", "-M", str(ROOT / "tests" / "lab" / "core_on_device.cu"), f"-I{ROOT / 'csrc'}"],
        capture_output=True,
        text=True,
        check=True,
    )
    header = next(word for word in listed.stdout.split() if word.endswith("driver_types.h"))
    errors = re.findall(
        r"/\*\*((?:(?!\*/).)*)\*/\s*cudaError\w+\s*=\s*(\d+)", Path(header).read_text(), re.S
    )
    fatal = {
        int(number)
        for comment, number in errors
        if "terminated and relaunched" in " ".join(comment.replace("*", " ").split())
    }
    assert {700, 710, 719} <= fatal
    lib = driver.open_library(driver.build())
    assert [
        number for number in sorted(fatal) if not lib.fastcheck_cuda_is_device_lost(number)
    ] == []
    assert [lib.fastcheck_cuda_is_device_lost(number) for number in (0, 2, 600)] == [0, 0, 0]
