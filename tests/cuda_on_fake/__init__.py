"""The CUDA backend on the fake accelerator: the binding of csrc/torch, with the kernels of
csrc/cuda compiled over the host shim and launched on the fake device's streams.

`load()` gives the module that has what `fastcheck._C` has of CUDA; `use()` puts it in the table of
backends. Of the binding, only csrc/torch/cuda_device.cpp is another one.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.machinery
import importlib.util
from pathlib import Path
from types import ModuleType

import torch

import fake_device
from cuda_on_cpu import driver
from fake_device.build import compile_flags
from fastcheck import backends

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "cuda_on_fake"
NAME = "cuda_on_fake_C"
SOURCES = (
    "csrc/torch/cuda_module.cpp",
    "csrc/torch/cuda_observe.cpp",
    "csrc/torch/cuda_workspace.cpp",
    "csrc/torch/python_tensors.cpp",
    "csrc/torch/slots.cpp",
    "csrc/torch/tensor_view.cpp",
    "tests/cuda_on_fake/module.cpp",
    "tests/cuda_on_fake/stream.cpp",
)
HEADERS = ("csrc/core/*.h", "csrc/cpu/*.h", "csrc/cuda/launch.h", "csrc/torch/*.h")


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def build() -> Path:
    """The path of the module; compiles what has changed. RuntimeError when that fails."""
    compiler = driver.compiler()
    assert compiler is not None
    kernels = driver.build()
    flags = [*compile_flags(), "-Werror", f"-I{ROOT / 'csrc'}"]
    headers = b"".join(path.read_bytes() for h in HEADERS for path in sorted(ROOT.glob(h)))
    base = _digest(repr((compiler, flags, torch.__version__)).encode(), headers)
    objects = {
        source: BUILD
        / f"{Path(source).stem}-{_digest(base.encode(), (ROOT / source).read_bytes())}.o"
        for source in SOURCES
    }
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    folder = _digest(str(kernels).encode(), *(str(path).encode() for path in objects.values()))
    target = BUILD / folder / f"{NAME}{suffix}"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    for source, path in objects.items():
        if not path.exists():
            driver.run([compiler, *flags, "-c", str(ROOT / source), "-o", str(path)], ROOT)
    libraries = Path(torch.__file__).parent / "lib"
    link = [compiler, "-shared", "-o", str(target), *map(str, objects.values()), str(kernels)]
    link += [f"-L{libraries}", f"-Wl,-rpath,{libraries}:{kernels.parent}"]
    driver.run([*link, "-ltorch_python", "-ltorch_cpu", "-lc10"], ROOT)
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
    )
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def entry() -> backends.Backend:
    """What the table of backends says of the module."""
    return backends.cuda.entry(load())


def use() -> None:
    """From now on the fake device's tensors are read by the CUDA backend."""
    backend, of_type = entry(), backends._of_type
    name = fake_device.load().name()
    backends._of_type = lambda kind, index: backend if kind == name else of_type(kind, index)


def shim() -> ctypes.CDLL:
    """The kernels' library, for its controls."""
    return ctypes.CDLL(str(driver.build()))
