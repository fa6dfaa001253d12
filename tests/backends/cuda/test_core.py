"""nvcc compiles all of csrc/core, which host and device share."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from support.paths import ROOT


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
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
