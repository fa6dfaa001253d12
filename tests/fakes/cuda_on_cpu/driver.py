"""Builds the CUDA kernels over the host shim, and calls their C interface (csrc/cuda/launch.h).

The library is kept under build/cuda_on_cpu by the hash of what goes into it. Buffers that the
interface says nothing about hold garbage; counters must be zero after every launch.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import functools
import hashlib
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Optional

import torch

from fastcheck.record.exponents import EXPONENT_WORDS
from support import paths
from support.records.reference import DEPTHS, RECORD_BYTES, dtype_of, is_dense

ROOT = paths.ROOT
BUILD = paths.BUILD / "cuda_on_cpu"
SOURCES = (
    "csrc/cuda/exponents.cu",
    "csrc/cuda/launch.cu",
    "csrc/cuda/launch_exponents.cu",
    "csrc/cuda/record_and_exponents.cu",
    "csrc/cuda/records_floats.cu",
    "csrc/cuda/records_bytes.cu",
    "csrc/cuda/records_integers.cu",
    "csrc/cuda/found_nonfinite.cu",
    "tests/fakes/cuda_on_cpu/device.cpp",
    "tests/fakes/cuda_on_cpu/fibers.cpp",
    "tests/fakes/cuda_on_cpu/probes.cpp",
)
# For tests that compile a changed copy: one dtype, in seconds. Its specializations come first.
FLOAT32_SOURCES = (
    "tests/fakes/cuda_on_cpu/float32_alone.cpp",
    "csrc/cuda/launch.cu",
    "tests/fakes/cuda_on_cpu/device.cpp",
    "tests/fakes/cuda_on_cpu/fibers.cpp",
)
HEADERS = ("csrc/core/*.h", "csrc/cuda/*.h", "csrc/cuda/*.cuh", "tests/fakes/cuda_on_cpu/*.h")
# Fortified longjmp refuses to go to another stack.
FLAGS = (
    "-std=c++17",
    "-O1",
    "-fPIC",
    "-ffp-contract=off",
    "-U_FORTIFY_SOURCE",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Icsrc",
    "-Itests/fakes",
)


def compiler() -> Optional[str]:
    return shutil.which(os.environ.get("CXX", "g++"))


def build(root: Path = ROOT, only_float32: bool = False) -> Path:
    """The shared library of the sources under ``root``, compiled unless it is there already."""
    sources = FLOAT32_SOURCES if only_float32 else SOURCES
    return shared_library(BUILD / "libcuda_on_cpu.so", sources, HEADERS, FLAGS, root)


def shared_library(
    path: Path, sources: Sequence[str], headers: Sequence[str], flags: Sequence[str], root: Path
) -> Path:
    """A library of C++ sources, compiled as one file, which saves half of the time; ``path`` with
    the hash of what goes into it as one more folder.
    """
    cxx = compiler()
    assert cxx is not None
    folder = path.parent / fingerprint((cxx, *flags), (*sources, *headers), root)
    library = folder / path.name
    if library.exists():
        return library
    with locked(folder):
        if library.exists():
            return library
        whole, unfinished = folder / "whole.cpp", folder / "unfinished.so"
        whole.write_text("".join(f'#include "{source}"\n' for source in sources))
        run([cxx, *flags, "-I.", "-shared", str(whole), "-o", str(unfinished)], root)
        unfinished.replace(library)
    return library


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Makes the folder; of processes that want to build there at once, one does and others wait."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def fingerprint(command: Sequence[str], patterns: Sequence[str], root: Path) -> str:
    """Of a compilation: another one where compiler, command or a file of these patterns is."""
    digest = hashlib.sha256(repr((_version(command[0]), *command)).encode())
    for path in sorted({path for pattern in patterns for path in root.glob(pattern)}):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def _version(program: str) -> str:
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    return done.stdout


def run(command: Sequence[str], cwd: Path) -> None:
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{result.stderr}")


# --- csrc/cuda/launch.h --------------------------------------------------------------------------


class TensorArgument(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("numel", ctypes.c_int64),
        ("sizes", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("slot", ctypes.c_int64),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint8),
        ("order", ctypes.c_uint8),
        ("dense", ctypes.c_uint8),
        ("reserved", ctypes.c_uint8),
    )


class Workspace(ctypes.Structure):
    _fields_ = (
        ("counters", ctypes.c_void_p),
        ("partials", ctypes.c_void_p),
        ("partials_bytes", ctypes.c_int64),
        ("table_host", ctypes.c_void_p),
        ("table_device", ctypes.c_void_p),
        ("table_bytes", ctypes.c_int64),
        ("box", ctypes.c_void_p),
        ("claims", ctypes.c_void_p),
        ("stretch", ctypes.c_uint64),
        ("box_slots", ctypes.c_uint64),
        ("gate", ctypes.c_void_p),
    )


class Tuning(ctypes.Structure):
    _fields_ = (
        ("multiprocessors", ctypes.c_int32),
        ("warps_per_block", ctypes.c_int32),
        ("tiles_per_warp", ctypes.c_int32),
        ("blocks", ctypes.c_int32),
    )


class WorkspaceSize(ctypes.Structure):
    _fields_ = (
        ("counters", ctypes.c_int64),
        ("partials_bytes", ctypes.c_int64),
        ("table_bytes", ctypes.c_int64),
    )


@functools.cache
def open_library(path: Path) -> ctypes.CDLL:
    lib = ctypes.CDLL(str(path))
    lib.fastcheck_cuda_error_name.restype = ctypes.c_char_p
    lib.cuda_on_cpu_error.restype = ctypes.c_char_p
    lib.cuda_on_cpu_schedule.argtypes = (ctypes.c_uint64, ctypes.c_int)
    return lib


_in_use: list[ctypes.CDLL] = []


def library() -> ctypes.CDLL:
    """What calls go to that name no library: the one in use, else the kernels over the shim."""
    return _in_use[-1] if _in_use else open_library(build())


@contextlib.contextmanager
def using(lib: ctypes.CDLL) -> Iterator[None]:
    _in_use.append(lib)
    try:
        yield
    finally:
        _in_use.pop()


class LaunchError(Exception):
    pass


def check(lib: ctypes.CDLL, code: int) -> None:
    if code != 0:
        raise LaunchError(lib.fastcheck_cuda_error_name(code).decode())


# --- what the tests call -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a launch is cut, and in what order its threads run. None of it may show."""

    warps: int = 0
    share: int = 0  # tiles per warp
    blocks: int = 0
    multiprocessors: int = 2
    seed: int = 1
    resident: int = 3  # blocks under way at once


class Garbage:
    """Memory that holds anything but zeros."""

    def __init__(self, size: int, fill: int = 0xA5) -> None:
        self.block = torch.full((size + 64,), fill, dtype=torch.uint8)
        self.start = -self.block.data_ptr() % 64
        self.size = size

    @property
    def address(self) -> int:
        return self.block.data_ptr() + self.start

    def bytes(self) -> bytes:
        return self.block[self.start : self.start + self.size].numpy().tobytes()


class Call:
    """One call of a launcher with workspace of exactly the size that it asks for."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        order: str = "storage",
        cut: Cut = Cut(),
        lib: Optional[ctypes.CDLL] = None,
    ) -> None:
        self.lib = lib or library()
        self.tuning = Tuning(cut.multiprocessors, cut.warps, cut.share, cut.blocks)
        self.count = len(tensors)
        self.arguments = (TensorArgument * max(1, self.count))()
        self.kept: list[object] = [tensors]
        for i, x in enumerate(tensors):
            dense = x.is_contiguous() if order == "logical" else is_dense(x)
            sizes = (ctypes.c_int64 * max(1, x.dim()))(*x.shape)
            strides = (ctypes.c_int64 * max(1, x.dim()))(*x.stride())
            self.kept += [sizes, strides]
            self.arguments[i] = TensorArgument(
                data=x.data_ptr(),
                numel=x.numel(),
                sizes=ctypes.addressof(sizes),
                strides=ctypes.addressof(strides),
                slot=i,
                ndim=x.dim(),
                dtype=dtype_of(x).code,
                order=int(order == "logical" or not dense),
                dense=int(dense),
            )
        size = WorkspaceSize()
        self.check(
            self.lib.fastcheck_cuda_workspace(
                self.arguments, self.count, ctypes.byref(self.tuning), ctypes.byref(size)
            )
        )
        self.counters = Garbage(4 * size.counters, fill=0)
        self.partials = Garbage(size.partials_bytes)
        self.table_host = Garbage(size.table_bytes)
        self.table_device = Garbage(size.table_bytes)
        self.workspace = Workspace(
            self.counters.address,
            self.partials.address,
            size.partials_bytes,
            self.table_host.address if size.table_bytes else None,
            self.table_device.address if size.table_bytes else None,
            size.table_bytes,
        )
        self.slots = Garbage(RECORD_BYTES * self.count)
        self.lib.cuda_on_cpu_schedule(cut.seed, cut.resident)

    def check(self, code: int) -> None:
        check(self.lib, code)

    def records(self, depth: str = "full") -> list[bytes]:
        self.check(
            self.lib.fastcheck_cuda_records(
                self.arguments,
                self.count,
                DEPTHS[depth],
                ctypes.c_void_p(self.slots.address),
                ctypes.byref(self.workspace),
                ctypes.byref(self.tuning),
                None,
            )
        )
        assert not any(self.counters.bytes()), "a launch left its counters"
        raw = self.slots.bytes()
        return [raw[i : i + RECORD_BYTES] for i in range(0, len(raw), RECORD_BYTES)]

    def found_nonfinite(self, found: float = 0.0) -> float:
        word = ctypes.c_float(found)
        self.check(
            self.lib.fastcheck_cuda_found_nonfinite(
                self.arguments,
                self.count,
                ctypes.byref(word),
                ctypes.byref(self.workspace),
                ctypes.byref(self.tuning),
                None,
            )
        )
        return word.value


def exponent_words(
    x: torch.Tensor,
    order: str = "storage",
    cut: Cut = Cut(),
    lib: Optional[ctypes.CDLL] = None,
) -> list[int]:
    """The words that the CUDA kernel counts of one tensor (csrc/cuda/exponents.h)."""
    call = Call([x], order, cut, lib)
    size = WorkspaceSize()
    call.check(call.lib.fastcheck_cuda_exponents_workspace(call.arguments, ctypes.byref(size)))
    assert size.partials_bytes == size.table_bytes == 0
    counters = Garbage(4 * size.counters, fill=0)
    words = Garbage(8 * EXPONENT_WORDS)
    workspace = Workspace(counters.address, None, 0, None, None, 0)
    call.check(
        call.lib.fastcheck_cuda_exponents(
            call.arguments,
            ctypes.c_void_p(words.address),
            ctypes.byref(workspace),
            ctypes.byref(call.tuning),
            None,
        )
    )
    assert not any(counters.bytes()), "a launch left its counters"
    return list(struct.unpack(f"<{EXPONENT_WORDS}q", words.bytes()))


def record_and_exponents(
    x: torch.Tensor,
    order: str = "storage",
    cut: Cut = Cut(),
    lib: Optional[ctypes.CDLL] = None,
) -> tuple[bytes, list[int]]:
    """The Record of one tensor and its words, by the CUDA kernel that reads it once."""
    call = Call([x], order, cut, lib)
    size = WorkspaceSize()
    call.check(
        call.lib.fastcheck_cuda_record_and_exponents_workspace(
            call.arguments, ctypes.byref(call.tuning), ctypes.byref(size)
        )
    )
    assert size.table_bytes == 0
    counters = Garbage(4 * size.counters, fill=0)
    partials = Garbage(size.partials_bytes)
    words = Garbage(8 * EXPONENT_WORDS)
    workspace = Workspace(counters.address, partials.address, size.partials_bytes, None, None, 0)
    call.check(
        call.lib.fastcheck_cuda_record_and_exponents(
            call.arguments,
            ctypes.c_void_p(call.slots.address),
            ctypes.c_void_p(words.address),
            ctypes.byref(workspace),
            ctypes.byref(call.tuning),
            None,
        )
    )
    assert not any(counters.bytes()), "a launch left its counters"
    return call.slots.bytes(), list(struct.unpack(f"<{EXPONENT_WORDS}q", words.bytes()))


def record(x: torch.Tensor, depth: str = "full", order: str = "storage", cut: Cut = Cut()) -> bytes:
    """The Record that the CUDA kernels make of one tensor."""
    return Call([x], order, cut).records(depth)[0]
