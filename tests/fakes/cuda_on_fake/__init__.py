"""The CUDA backend on the fake accelerator: the binding of csrc/torch, with the kernels of
csrc/cuda compiled over the host shim and launched on the fake device's streams.

`load()` gives the module that has what `fastcheck._C` has of CUDA; `use()` puts it in the table of
backends. Of the binding, only csrc/torch/cuda/device.cpp is another one. `python_entry()` is the
backend without it: launched by Python, through what `fastcheck._kernels` has of CUDA.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import importlib.util
import operator
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Callable

import torch

from fakes import fake_device
from fakes.cuda_on_cpu import driver
from fakes.fake_device.build import compile_flags
from fastcheck.backends import table as backends
from fastcheck.backends.cuda import Launches
from support import paths

ROOT = paths.ROOT
BUILD = paths.BUILD / "cuda_on_fake"
NAME = "cuda_on_fake_C"
SOURCES = (
    "csrc/torch/binding/cuda_module.cpp",
    "csrc/torch/cuda/black_box.cpp",
    "csrc/torch/cuda/observe.cpp",
    "csrc/torch/cuda/workspace.cpp",
    "csrc/torch/python/tensors.cpp",
    "csrc/torch/read/slots.cpp",
    "csrc/torch/read/tensor_view.cpp",
    "tests/fakes/cuda_on_fake/module.cpp",
    "tests/fakes/cuda_on_fake/stream.cpp",
)
HEADERS = (
    "csrc/core/*.h",
    "csrc/cpu/*.h",
    "csrc/cuda/*.h",
    "csrc/kernels/*.h",
    "csrc/torch/*/*.h",
)


KERNELS = "cuda_on_fake_kernels"
KERNEL_SOURCES = (
    "csrc/abi3/arguments.cpp",
    "csrc/abi3/cuda.cpp",
    "tests/fakes/cuda_on_fake/kernels.cpp",
)
KERNEL_HEADERS = ("csrc/*/*.h",)


def build() -> Path:
    """The path of the module, compiled unless it is there. RuntimeError when that fails.

    The sources are compiled as one file: most of the time goes into torch's headers.
    """
    compiler = driver.compiler()
    assert compiler is not None
    libraries = Path(torch.__file__).parent / "lib"
    command = [compiler, *compile_flags(), "-DAT_PER_OPERATOR_HEADERS"]
    command.append(f"-DTORCH_VERSION={torch.__version__}")
    wrapped = ("fastcheck_cuda_workspace", "fastcheck_cuda_records")
    wraps = [f"-Wl,--wrap={name}" for name in wrapped]
    link = [
        *wraps,
        f"-L{libraries}",
        f"-Wl,-rpath,{libraries}",
        "-ltorch_python",
        "-ltorch_cpu",
        "-lc10",
    ]
    return _build(NAME, command, SOURCES, HEADERS, link)


def build_kernels() -> Path:
    """The same of the module of python_entry(), in which there is no torch."""
    compiler = driver.compiler()
    assert compiler is not None
    include = f"-isystem{sysconfig.get_path('include')}"
    command = [compiler, "-std=c++17", "-O1", "-fPIC", "-Wall", include]
    return _build(
        KERNELS, [*command, "-DPy_LIMITED_API=0x03090000"], KERNEL_SOURCES, KERNEL_HEADERS
    )


def _build(
    name: str,
    command: list[str],
    sources: tuple[str, ...],
    headers: tuple[str, ...],
    link: Sequence[str] = (),
) -> Path:
    kernels = driver.build()
    command = [*command, "-Werror", f"-I{ROOT}", f"-I{ROOT / 'csrc'}"]
    folder = BUILD / driver.fingerprint([*command, str(kernels)], (*sources, *headers), ROOT)
    target = folder / f"{name}{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    if target.exists():
        return target
    with driver.locked(folder):
        if not target.exists():
            source = folder / f"{name}.cpp"
            source.write_text("".join(f'#include "{path}"\n' for path in sources))
            unfinished = target.with_suffix(".part")
            shared = ["-shared", str(source), str(kernels), f"-Wl,-rpath,{kernels.parent}"]
            driver.run([*command, *shared, *link, "-o", str(unfinished)], ROOT)
            unfinished.replace(target)
    return target


@functools.cache
def load() -> ModuleType:
    """Builds the module if need be, and connects the shim to the fake device, which is loaded."""
    return _load(NAME, build)


def _load(name: str, build: Callable[[], Path]) -> ModuleType:
    fake_device.load()
    path = build()
    device = ctypes.CDLL(str(fake_device.library()))
    shim().cuda_on_cpu_connect(
        ctypes.cast(device.fake_device_launch, ctypes.c_void_p),
        ctypes.cast(device.fake_device_memory, ctypes.c_void_p),
        ctypes.cast(device.fake_device_is_capturing, ctypes.c_void_p),
        ctypes.cast(device.fake_device_exchange_capture_mode, ctypes.c_void_p),
    )
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def entry() -> backends.Backend:
    """How the table of backends describes the module."""
    return backends.cuda.backend_of(load())


@functools.cache
def python_entry() -> backends.Backend:
    """The backend that Python launches."""
    handle = operator.attrgetter("native_handle")
    kernels = _load(KERNELS, build_kernels)
    return backends.cuda.backend_of(Launches(kernels, fake_device.load(), handle))


def use() -> None:
    """From now on the fake device's tensors are read by the CUDA backend."""
    backend, of_type = entry(), backends._of_type
    name = fake_device.load().name()
    backends._of_type = lambda kind, index: backend if kind == name else of_type(kind, index)


def shim() -> ctypes.CDLL:
    """The kernels' library, for its controls."""
    return ctypes.CDLL(str(driver.build()))
