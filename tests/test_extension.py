"""Without the compiled extension, or with one built for another torch, there is one clear error."""

from __future__ import annotations

import subprocess
import sys

import pytest

MISSING = "import sys; sys.modules['fastcheck._build_info'] = None\n"
OTHER_TORCH = """
import sys, types
info = types.ModuleType("fastcheck._build_info")
info.TORCH_VERSION, info.ACCELERATOR, info.COMPILER = "1.8.0", "cpu", "g++"
sys.modules["fastcheck._build_info"] = info
"""
UNLOADABLE = "import sys; sys.modules['fastcheck._C'] = None\n"


def run(prelude: str, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", prelude + code], capture_output=True, text=True, check=False
    )


def test_missing_import_still_works() -> None:
    done = run(MISSING, "import fastcheck; print(fastcheck.__version__)")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "use",
    [
        "fastcheck.stats(torch.ones(3))",
        "fastcheck.checksum(torch.ones(3))",
        "fastcheck.found_nonfinite([torch.ones(3)])",
        "fastcheck.install(torch.nn.Linear(2, 2))",
    ],
)
def test_missing_use_says_how_to_build_it(use: str) -> None:
    done = run(MISSING, f"import fastcheck, torch\n{use}")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("fastcheck.ExtensionError: ") or "ExtensionError: " in last
    assert "not installed" in last and "pip install --no-build-isolation" in last


def test_missing_what_needs_no_kernel_works() -> None:
    done = run(MISSING, "import fastcheck, torch; print(fastcheck.crc32(torch.zeros(1)))")
    assert done.stdout == f"{0x2144DF1C}\n"


def test_built_for_another_torch() -> None:
    done = run(OTHER_TORCH, "import fastcheck, torch; fastcheck.stats(torch.ones(3))")
    assert done.returncode == 1
    warned, last = done.stderr.splitlines()[0], done.stderr.strip().splitlines()[-1]
    assert "FastcheckWarning" in warned  # said at import
    for said in (warned, last):
        assert "built for torch 1.8.0, and this is torch" in said
    assert "undefined symbol" not in done.stderr


def test_extension_that_does_not_load() -> None:
    done = run(UNLOADABLE, "import fastcheck, torch; fastcheck.stats(torch.ones(3))")
    assert "ExtensionError" in done.stderr and "does not load" in done.stderr


@pytest.mark.parametrize("prelude", [MISSING, OTHER_TORCH], ids=["missing", "other-torch"])
def test_doctor_works_and_says_so(prelude: str) -> None:
    done = run(prelude, "import fastcheck.cli; fastcheck.cli.main(['doctor'])")
    assert "built for torch 1.8.0" in done.stdout or "not installed" in done.stdout, done


def test_a_bad_cpu_kernel_is_an_error_before_anything_is_read() -> None:
    prelude = "import os; os.environ['FASTCHECK_CPU_ISA'] = 'sse9'\n"
    done = run(prelude, "import fastcheck, torch; fastcheck.install(torch.nn.Linear(2, 2))")
    last = done.stderr.strip().splitlines()[-1]
    assert "ConfigError" in last and "'sse9'" in last and "scalar" in last
