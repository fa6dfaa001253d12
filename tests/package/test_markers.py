"""The gpu marker of conftest.py: skipped in sight without a GPU, failed when one is required."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from support.paths import TESTS
from support.processes import run_python

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def run(directory: Path, required: str) -> tuple[int, str]:
    shutil.copy(TESTS / "conftest.py", directory)
    (directory / "test_it.py").write_text(
        "import pytest\n@pytest.mark.gpu\ndef test_it() -> None:\n    assert False, 'it ran'\n"
    )
    done = run_python(
        *("-m", "pytest", "-rs", "-p", "no:cacheprovider", "--strict-markers", directory),
        cwd=directory,
        env={"FASTCHECK_REQUIRE_GPU": required, "PYTEST_ADDOPTS": ""},
    )
    return done.returncode, done.stdout


def test_skipped_in_sight(tmp_path: Path) -> None:
    status, output = run(tmp_path, "0")
    assert status == 0
    assert "1 skipped" in output and "no CUDA device" in output


def test_failed_when_required(tmp_path: Path) -> None:
    status, output = run(tmp_path, "1")
    assert status == 1
    assert "FASTCHECK_REQUIRE_GPU=1" in output and "it ran" not in output
