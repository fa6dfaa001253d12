"""The CUDA backend on the fake accelerator: the binding of csrc/torch, with the kernels of
csrc/cuda compiled over the host shim and launched on the fake device's streams.

`load()` gives the module that has what `fastcheck._C` has of CUDA; `use()` puts it in the table of
backends. Of the binding, only csrc/torch/cuda/device.cpp is another one.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import importlib.util
import os
from pathlib import Path
from types import ModuleType

import torch

from fakes import fake_device
from fakes.cuda_on_cpu import driver
from fakes.fake_device.build import compile_flags
from fastcheck.backends import table as backends

ROOT = Path(__file__).resolve().parents[3]
BUILD = ROOT / "build" / "cuda_on_fake"
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
HEADERS = ("csrc/core/*.h", "csrc/cpu/*.h", "csrc/cuda/launch.h", "csrc/torch/*/*.h")


def build() -> Path:
    """The path of the module, compiled unless it is there. RuntimeError when that fails.

    The sources are compiled as one file: most of the time goes into torch's headers.
    """
    compiler = driver.compiler()
    assert compiler is not None
    kernels = driver.build()
    command = [compiler, *compile_flags(), "-Werror", f"-I{ROOT}", f"-I{ROOT / 'csrc'}"]
    command.append(f"-DTORCH_VERSION={torch.__version__}")
    folder = BUILD / driver.fingerprint([*command, str(kernels)], (*SOURCES, *HEADERS), ROOT)
    target = folder / f"{NAME}{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / f"{NAME}.cpp"
    source.write_text("".join(f'#include "{path}"\n' for path in SOURCES))
    libraries = Path(torch.__file__).parent / "lib"
    unfinished = target.with_suffix(f".{os.getpid()}")
    link = ["-shared", str(source), str(kernels), "-o", str(unfinished)]
    link += [f"-L{libraries}", f"-Wl,-rpath,{libraries}:{kernels.parent}"]
    driver.run([*command, *link, "-ltorch_python", "-ltorch_cpu", "-lc10"], ROOT)
    unfinished.replace(target)
    return target


@functools.cache
def load() -> ModuleType:
    """Builds the module if need be, and connects the shim to the fake device, which is loaded."""
    fake_device.load()
    path = build()
    device = ctypes.CDLL(str(fake_device.library()))
    shim().cuda_on_cpu_connect(
        ctypes.cast(device.fake_device_launch, ctypes.c_void_p),
        ctypes.cast(device.fake_device_memory, ctypes.c_void_p),
        ctypes.cast(device.fake_device_is_capturing, ctypes.c_void_p),
        ctypes.cast(device.fake_device_exchange_capture_mode, ctypes.c_void_p),
    )
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def entry() -> backends.Backend:
    """How the table of backends describes the module."""
    return backends.cuda.cuda_backend(load())


def use() -> None:
    """From now on the fake device's tensors are read by the CUDA backend."""
    backend, of_type = entry(), backends._of_type
    name = fake_device.load().name()
    backends._of_type = lambda kind, index: backend if kind == name else of_type(kind, index)


def shim() -> ctypes.CDLL:
    """The kernels' library, for its controls."""
    return ctypes.CDLL(str(driver.build()))
