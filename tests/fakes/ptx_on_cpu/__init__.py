"""The CUDA kernels as nvcc compiled them, run on the CPU: their PTX, an instruction at a time.

`cuda_on_cpu` runs the sources, through a host compiler; this runs what comes out of nvcc, with the
branches that only a GPU takes, and holds every access to what the launch may touch, to alignment
and to the barriers and fences that PTX's memory model asks for. What ptxas makes of the PTX, and
how fast that is, only a GPU can show.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Optional

from fakes.cuda_on_cpu import driver
from support import paths
from support.sampling import IS_WHOLE

ROOT = paths.ROOT
BUILD = paths.BUILD / "ptx_on_cpu"
KERNELS = (
    "csrc/cuda/records_floats.cu",
    "csrc/cuda/records_bytes.cu",
    "csrc/cuda/records_integers.cu",
    "csrc/cuda/found_nonfinite.cu",
    "csrc/cuda/exponents.cu",
    "csrc/cuda/record_and_exponents.cu",
)
FLOAT32_KERNELS = ("tests/fakes/cuda_on_cpu/float32_alone.cpp",)
FLOAT32_EXPONENTS = ("tests/fakes/ptx_on_cpu/float32_exponents.cu",)
#: nvcc takes a minute for all of them: other runs than whole ones have float32 at full depth.
SAMPLE = (*FLOAT32_KERNELS, *FLOAT32_EXPONENTS, "csrc/cuda/found_nonfinite.cu")
MACHINE = (
    "csrc/cuda/launch.cu",
    "csrc/cuda/launch_exponents.cu",
    "tests/fakes/cuda_on_cpu/device.cpp",
    "tests/fakes/cuda_on_cpu/fibers.cpp",
    "tests/fakes/ptx_on_cpu/accesses.cpp",
    "tests/fakes/ptx_on_cpu/floats.cpp",
    "tests/fakes/ptx_on_cpu/instructions.cpp",
    "tests/fakes/ptx_on_cpu/integers.cpp",
    "tests/fakes/ptx_on_cpu/kernels.cpp",
    "tests/fakes/ptx_on_cpu/machine.cpp",
    "tests/fakes/ptx_on_cpu/meetings.cpp",
    "tests/fakes/ptx_on_cpu/memory.cpp",
    "tests/fakes/ptx_on_cpu/moves.cpp",
    "tests/fakes/ptx_on_cpu/parse.cpp",
)
# Lambdas without a capture are made from their type alone, which is C++20.
MACHINE_FLAGS = ("-std=c++20", "-O2" if IS_WHOLE else "-O1", *driver.FLAGS[2:])
# As CMakeLists.txt compiles them.
NVCC_FLAGS = (
    *("-std=c++17", "-fmad=false", "-Werror=all-warnings"),
    *("-Icsrc", "-Itests/fakes", "-x", "cu"),
)


def nvcc() -> Optional[str]:
    return shutil.which("nvcc")


def ptx(sources: Sequence[str], arch: str, root: Path = ROOT) -> list[Path]:
    """What nvcc makes of each source for a compute capability, compiled unless it is there, two at
    a time, and by one process where several want it at once.
    """
    compiler = nvcc()
    assert compiler is not None
    command = (compiler, *NVCC_FLAGS, f"-arch=compute_{arch}", "-ptx")

    def make(source: str) -> Path:
        folder = BUILD / driver.fingerprint(command, (source, *driver.HEADERS), root)
        target = folder / f"{Path(source).stem}.sm_{arch}.ptx"
        with driver.locked(folder):
            if not target.exists():
                unfinished = target.with_suffix(".part")
                driver.run([*command, source, "-o", str(unfinished)], root)
                unfinished.replace(target)
        return target

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(make, sources))


def cubin(source: str, arch: str) -> tuple[Path, str]:
    """The machine code of a source, and what ptxas says of it; compiled unless it is there."""
    (text,) = ptx((source,), arch)
    target = text.with_suffix(".cubin")
    said = text.with_suffix(".ptxas")
    with driver.locked(text.parent):
        if not said.exists():
            command = ["nvcc", f"-arch=sm_{arch}", "-Werror=all-warnings", "-Xptxas=-v"]
            command += ["-cubin", str(text), "-o", str(target)]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            assert result.returncode == 0, result.stderr
            said.write_text(result.stdout + result.stderr)
        return target, said.read_text()


@functools.cache
def machine() -> ctypes.CDLL:
    """The C interface of csrc/cuda/launch.h, whose kernels are those that were loaded last."""
    path = driver.shared_library(
        BUILD / "libptx_on_cpu.so",
        MACHINE,
        (*driver.HEADERS, "tests/fakes/ptx_on_cpu/*.h"),
        MACHINE_FLAGS,
        ROOT,
    )
    lib = driver.open_library(path)
    lib.ptx_on_cpu_load.restype = ctypes.c_char_p
    lib.ptx_on_cpu_probe.restype = ctypes.c_char_p
    return lib


def load(paths: Sequence[Path]) -> ctypes.CDLL:
    """The machine, with the kernels of these files instead of those it had."""
    lib = machine()
    lib.ptx_on_cpu_unload()
    for path in paths:
        error = lib.ptx_on_cpu_load(str(path).encode())
        if error is not None:
            raise RuntimeError(error.decode())
    return lib


def count(lib: ctypes.CDLL) -> tuple[int, int]:
    """Launches since the last call, and the instructions of the longest thread of each, added."""
    launches, longest = ctypes.c_int64(), ctypes.c_int64()
    lib.ptx_on_cpu_count(ctypes.byref(launches), ctypes.byref(longest))
    return launches.value, longest.value


@contextlib.contextmanager
def kernels(arch: str) -> Iterator[None]:
    """Calls that name no library go to the PTX of the kernels, or of ``SAMPLE``."""
    with driver.using(load(ptx(KERNELS if IS_WHOLE else SAMPLE, arch))):
        yield
