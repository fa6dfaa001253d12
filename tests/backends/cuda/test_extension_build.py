"""The extension built with CUDA kernels: FASTCHECK_CUDA, and loading beside any torch."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fastcheck import _C
from support.paths import ROOT

# Kept: only the first build takes minutes.
BUILD = ROOT / "build" / "cuda_extension"
ARCH = os.environ.get("FASTCHECK_CUDA_ARCHS", "90").split()[0]

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")


def tool(name: str) -> str:
    """Of this environment, or of the system."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def configure(build: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Anew but for the compilers, which cmake finds once in a folder: that takes seconds."""
    pybind11 = subprocess.run(
        [sys.executable, "-m", "pybind11", "--cmakedir"], capture_output=True, text=True, check=True
    )
    command = [tool("cmake"), "-G", "Ninja", "-S", str(ROOT), "-B", str(build)]
    command += ["-U", "FASTCHECK_*", "-U", "SKBUILD_*", "-DCMAKE_COMPILE_WARNING_AS_ERROR=ON"]
    command += [f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", f"-DPython_EXECUTABLE={sys.executable}"]
    command += [f"-Dpybind11_DIR={pybind11.stdout.strip()}", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def quick_flags() -> str:
    """Other tests are about the machine code, and nothing here runs it."""
    offered = subprocess.run(["nvcc", "--help"], capture_output=True, text=True, check=True).stdout
    return "-Ofc=max" if "(-Ofc)" in offered else "-Xcicc -O1 -Xptxas -O1"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a fastcheck that was built with FASTCHECK_CUDA=ON. The binding is the installed
    one: nothing of what it is compiled from depends on CUDA, and it takes minutes.
    """
    BUILD.mkdir(parents=True, exist_ok=True)
    done = configure(
        BUILD,
        "-DFASTCHECK_CUDA=ON",
        f"-DFASTCHECK_CUDA_ARCHS={ARCH}",
        "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON",
        f"-DCMAKE_CUDA_FLAGS={quick_flags()}",
        "-DFASTCHECK_CUDA_UNITY=ON",
    )
    assert done.returncode == 0, done.stderr
    build = [tool("cmake"), "--build", str(BUILD), "--target", "_kernels"]
    built = subprocess.run(build, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout
    target = tmp_path_factory.mktemp("cuda") / "fastcheck"
    ignored = shutil.ignore_patterns("*.so", "_build_info.py")
    shutil.copytree(ROOT / "python" / "fastcheck", target, ignore=ignored)
    for path in (BUILD / "_build_info.py", *BUILD.glob("_kernels*.so"), Path(_C.__file__)):
        shutil.copy(path, target)
    return target


def run(package: Path, code: str) -> subprocess.CompletedProcess[str]:
    # -S: an editable install would put its own fastcheck in front.
    path = os.pathsep.join([str(package.parent), *(p for p in sys.path if p.endswith("packages"))])
    return subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


PROGRAM = """
import fastcheck.cli.main, torch
from fastcheck import _C
from fastcheck.backends import cuda, table
print(fastcheck.__file__)
print(fastcheck.stats(torch.ones(3)).numel, table.backend_for(torch.device("cpu")).name)
print(cuda.cuda_problem(), table.backend_for(torch.device("cuda")).name)
try:
    _C.cuda_observe(torch.ones(3), torch.zeros(192, dtype=torch.uint8), 0, 3)
except TypeError as error:
    print(str(error).splitlines()[0])
print(_C.cuda_problem(0))
fastcheck.cli.main.main(["doctor", "--json"])
"""


@pytest.fixture(scope="module")
def lines(package: Path) -> list[str]:
    done = run(package, PROGRAM)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@needs_nvcc
def test_it_loads_and_reads_the_cpu(lines: list[str], package: Path) -> None:
    where, cpu, cuda = lines[:3]
    assert where == str(package / "__init__.py")
    assert cpu == "3 cpu"
    if not torch.cuda.is_available():
        assert cuda == "torch finds no CUDA device portable"


@needs_nvcc
def test_doctor_names_the_accelerator(lines: list[str]) -> None:
    found: Any = json.loads("\n".join(lines[5:]))
    assert re.fullmatch(rf"built \(cuda1\d\.\d+ for {ARCH}\)", found["versions"]["cuda"])
    assert {row["name"]: row["reason"] for row in found["backends"]}["cuda"].startswith("built; ")


@needs_nvcc
def test_a_cuda_tensor_is_asked_for(lines: list[str]) -> None:
    said, problem = lines[3:5]
    assert said.startswith("expected a CUDA tensor, got one on cpu")
    if torch.version.cuda is None:
        assert problem == "this torch was built without CUDA"


@needs_nvcc
def test_the_cuda_runtime_is_inside_and_stays_there(package: Path) -> None:
    """torch's own runtime must not be called by these kernels, nor the other way round."""
    (library,) = package.glob("_kernels*.so")
    readelf = tool("readelf")
    needed = subprocess.run(
        [readelf, "-d", str(library)], capture_output=True, text=True, check=True
    ).stdout
    assert "libstdc++.so" in needed
    assert not any(
        name in needed for name in ("libcudart", "libcuda.", "c10_cuda", "torch", "libc10")
    )
    symbols = subprocess.run(
        [readelf, "--dyn-syms", "-W", str(library)], capture_output=True, text=True, check=True
    ).stdout
    cuda = [line for line in symbols.splitlines() if "cuda" in line.lower()]
    assert "PyInit__kernels" in symbols
    assert cuda == []


@needs_nvcc
def test_flags(package: Path) -> None:
    """Nothing is contracted, reordered or flushed."""
    commands = json.loads((BUILD / "compile_commands.json").read_text())
    (kernels,) = (row for row in commands if row["file"].endswith(".cu"))
    sources = {path.name for path in (ROOT / "csrc" / "cuda").glob("*.cu")}
    assert set(re.findall(r"(\w+\.cu)\"", Path(kernels["file"]).read_text())) == sources
    command = kernels["command"]
    assert "-fmad=false" in command and "-Werror all-warnings" in command
    assert "fast" not in command.replace("fastcheck", "").replace(str(ROOT), "")
    assert f"compute_{ARCH}" in command


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for configurations without CUDA."""
    return tmp_path_factory.mktemp("plain")


def test_a_label_that_promises_cuda_is_kept_or_refused(plain: Path) -> None:
    promise = "-DSKBUILD_PROJECT_VERSION_FULL=0.1.0+pt213.cu99"
    done = configure(plain, "-DFASTCHECK_CUDA=OFF", "-DFASTCHECK_BINDING=OFF", promise)
    assert done.returncode != 0
    said = " ".join(done.stderr.split())
    assert "the version is 0.1.0+pt213.cu99, but what is built is 'cpu'" in said


def test_auto_asks_for_no_compiler_beside_a_torch_without_cuda(plain: Path) -> None:
    if torch.version.cuda is not None:
        pytest.skip("this torch is a CUDA build")
    done = configure(plain)
    assert done.returncode == 0, done.stderr
    assert "CMAKE_CUDA_COMPILER" not in (plain / "CMakeCache.txt").read_text()
    info = (plain / "_build_info.py").read_text()
    assert 'ACCELERATOR = "cpu"' in info


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("-DFASTCHECK_CUDA=MAYBE", "FASTCHECK_CUDA is 'MAYBE'; expected AUTO, ON or OFF"),
        pytest.param(
            "-DSKBUILD_PROJECT_VERSION_FULL=0.1.0+pt213.cpu",
            "the version is 0.1.0+pt213.cpu, but what is built is 'cu1",
            marks=needs_nvcc,
        ),
        pytest.param(
            "-DFASTCHECK_CUDA_ARCHS=sm_90", "FASTCHECK_CUDA_ARCHS has 'sm_90'", marks=needs_nvcc
        ),
    ],
)
def test_a_bad_option_is_an_error(option: str, said: str) -> None:
    done = configure(BUILD, "-DFASTCHECK_CUDA=ON", "-DFASTCHECK_BINDING=OFF", option)
    assert done.returncode != 0
    assert said in " ".join(done.stderr.split())
