"""Without the extension, or with one built for another torch, the portable backend reads."""

from __future__ import annotations

import subprocess

import pytest
import torch

import fastcheck
from support.processes import run_python

MISSING = "import sys; sys.modules['fastcheck._build_info'] = None\n"
OTHER_TORCH = """
import sys, types
info = types.ModuleType("fastcheck._build_info")
info.VERSION, info.TORCH_VERSION, info.ACCELERATOR = "0.1.0", "1.8.0", "cpu"
info.CUDA_ARCHS, info.COMPILER = "", "g++"
sys.modules["fastcheck._build_info"] = info
"""
SAYS_WHAT_READS = """
import fastcheck, fastcheck.backends.table, torch
assert fastcheck.stats(torch.ones(3)).numel == 3
print(fastcheck.backends.table.backend_for(torch.device("cpu")).name)
"""
UNLOADABLE = "import sys; sys.modules['fastcheck._C'] = None\n"


def run(prelude: str, code: str) -> subprocess.CompletedProcess[str]:
    return run_python("-c", prelude + code, is_fresh=True)


def test_missing_import_still_works() -> None:
    done = run(MISSING, "import fastcheck; print(fastcheck.__version__)")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("use", "said"),
    [
        ("fastcheck.stats(torch.ones(3))", "numel=3, all finite"),
        ("fastcheck.checksum(torch.ones(3))", "{checksum}"),
        ("fastcheck.found_nonfinite([torch.ones(3)])", "tensor(0.)"),
        ("fastcheck.install(torch.nn.Linear(2, 2))", "1 modules"),
    ],
)
def test_missing_is_made_up_for_by_the_portable_backend(use: str, said: str) -> None:
    done = run(MISSING, f"import fastcheck, torch\nprint({use})")
    assert (done.returncode, done.stderr) == (0, "")
    assert said.format(checksum=fastcheck.checksum(torch.ones(3))) in done.stdout


def test_missing_stops_a_run() -> None:
    script = """
import fastcheck, torch
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
fastcheck.install(model)
with torch.no_grad():
    model[0].weight.fill_(3e38)
model(torch.full((1, 2), 1e3))
"""
    done = run(MISSING, script)
    assert done.returncode == 1
    assert "OverflowDetected" in done.stderr
    assert "module    0 (Linear)" in done.stderr


def test_switched_off() -> None:
    done = run("import os; os.environ['FASTCHECK_NO_EXTENSION'] = '1'\n", SAYS_WHAT_READS)
    assert done.stdout == "portable\n", done


@pytest.mark.parametrize("value", ["0", ""])
def test_not_switched_off(value: str) -> None:
    done = run(f"import os; os.environ['FASTCHECK_NO_EXTENSION'] = {value!r}\n", SAYS_WHAT_READS)
    assert done.stdout == "cpu\n", done


@pytest.mark.parametrize(
    ("prelude", "said"),
    [
        ("", f"for torch {torch.__version__.split('+')[0]} False\n"),
        (MISSING, "pure Python: portable backend False\n"),
        (OTHER_TORCH, "for torch 1.8.0, not usable; hooks in pure Python True\n"),
        ("import os; os.environ['FASTCHECK_CPU_ISA'] = 'sse9'\n", "misconfigured True\n"),
    ],
    ids=["usable", "missing", "other-torch", "misconfigured"],
)
def test_status_says_what_reads_and_whether_it_is_a_fault(prelude: str, said: str) -> None:
    code = "from fastcheck.extension import status; print(status.text, status.is_broken)"
    done = run(prelude, code)
    assert done.stdout.replace("+cpu", "").endswith(said), done


def test_missing_what_needs_no_kernel_works() -> None:
    code = "import fastcheck, torch; print(fastcheck.statistics.functions.crc32(torch.zeros(1)))"
    done = run(MISSING, code)
    assert done.stdout == f"{0x2144DF1C}\n"


def test_built_for_another_torch() -> None:
    done = run(OTHER_TORCH, SAYS_WHAT_READS)
    assert done.stdout == "cpu\n", done
    assert "FastcheckWarning" in done.stderr  # a warning at import
    assert "built for torch 1.8.0, and this is torch" in done.stderr
    assert "Until then: hooks in pure Python, which is slower" in done.stderr
    assert "undefined symbol" not in done.stderr


def test_a_wheel_for_another_torch_names_the_one_that_fits() -> None:
    """A wheel's owner has no source tree to build from."""
    release = ".".join(torch.__version__.split(".")[:2])
    done = run(OTHER_TORCH.replace("0.1.0", "0.1.0+pt18.cpu"), SAYS_WHAT_READS)
    assert done.stdout == "cpu\n", done
    assert f"install fastcheck's wheel for torch {release} (+pt{release.replace('.', '')})" in (
        done.stderr
    )
    assert "or the one for any torch, or install torch 1.8" in done.stderr
    assert "rebuild" not in done.stderr
    done = run(OTHER_TORCH, SAYS_WHAT_READS)
    assert "rebuild it with `pip install" in done.stderr
    assert "fastcheck's wheel" not in done.stderr


def test_extension_that_does_not_load() -> None:
    done = run(UNLOADABLE, SAYS_WHAT_READS)
    assert done.stdout == "cpu\n", done
    assert "FastcheckWarning" in done.stderr and "does not load" in done.stderr


@pytest.mark.parametrize("prelude", [MISSING, OTHER_TORCH], ids=["missing", "other-torch"])
def test_doctor_works_and_says_so(prelude: str) -> None:
    done = run(prelude, "import fastcheck.cli.main; fastcheck.cli.main.main(['doctor'])")
    assert "pure Python" in done.stdout, done
    assert ("built for torch 1.8.0" in done.stdout) is (prelude is OTHER_TORCH), done


def test_a_bad_cpu_kernel_is_an_error_before_anything_is_read() -> None:
    prelude = "import os; os.environ['FASTCHECK_CPU_ISA'] = 'sse9'\n"
    done = run(prelude, "import fastcheck, torch; fastcheck.install(torch.nn.Linear(2, 2))")
    last = done.stderr.strip().splitlines()[-1]
    assert "ConfigError" in last and "'sse9'" in last and "scalar" in last
