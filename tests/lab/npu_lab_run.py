"""Runs on the CPU what triton-ascend made of the kernels: its Linalg, compiled by MLIR's own
passes, in the place of the kernels that are launched. Part of tests/lab/npu_lab.py.

The arithmetic, the loops and the addresses are those that Ascend's compiler is given; what it makes
of them is another matter.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from pathlib import Path
from typing import Any, Callable

import torch

from fastcheck.backends.triton import kernels as triton_kernels
from fastcheck.backends.triton import launch as triton_launch
from support.records.reference import DEPTHS, LAYOUT, VALUE_BYTES, fields, pattern, record
from support.records.torch_dtypes import torch_dtype

PASSES = (
    "--convert-elementwise-to-linalg",
    "--empty-tensor-to-alloc-tensor",
    "--one-shot-bufferize=allow-return-allocs-from-loops",
    "--convert-linalg-to-loops",
    "--expand-strided-metadata",
    "--lower-affine",
    "--convert-scf-to-cf",
    "--convert-math-to-llvm",
    "--convert-arith-to-llvm",
    "--convert-cf-to-llvm",
    "--finalize-memref-to-llvm",
    "--convert-func-to-llvm",
    "--reconcile-unrealized-casts",
)
#: What the passes call for a copy between strides.
COPY = """
struct ref { long rank; long* descriptor; };
void memrefCopy(long size, struct ref* from, struct ref* to) {
  long *a = from->descriptor, *b = to->descriptor, rank = from->rank, count = 1;
  for (long i = 0; i < rank; ++i) count *= a[3 + i];
  for (long k = 0; k < count; ++k) {
    long left = k, x = a[2], y = b[2];
    for (long i = rank - 1; i >= 0; --i) {
      x += left % a[3 + i] * a[3 + rank + i];
      y += left % a[3 + i] * b[3 + rank + i];
      left /= a[3 + i];
    }
    __builtin_memcpy((char*)b[1] + y * size, (char*)a[1] + x * size, size);
  }
}
"""
SIZES = (0, 1, 3, 63, 65, 4095, 4096, 4097, 9 * 4096 + 18, 60 * 4096 + 7)
#: Two rows of partials more than the fold reads at once.
TARGET = triton_launch.Target(programs=10, lanes=512, alone=1, block=8)
CHUNK = 1 << 19

Lower = Callable[[Any, dict[str, str], dict[str, int]], str]


class OnCpu:
    """A kernel as it is launched: ``kernel[grid](*arguments, **constants)``."""

    def __init__(self, kernel: Any, lower: Lower, tools: Path, folder: Path) -> None:
        self.kernel, self.lower, self.tools, self.folder = kernel, lower, tools, folder
        self.made: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: int) -> None:
            types, values = {}, []
            for name, argument in zip(self.kernel.arg_names, arguments):
                is_tensor = isinstance(argument, torch.Tensor)
                types[name] = f"*i{8 * argument.element_size()}" if is_tensor else "i32"
                values += descriptor(argument) if is_tensor else [ctypes.c_int32(argument)]
            hidden = torch.zeros(64, dtype=torch.int8)
            run = self._compiled(types, constants)
            for program in range(grid[0]):
                place = [ctypes.c_int32(n) for n in (grid[0], 1, 1, program, 0, 0)]
                run(*descriptor(hidden), *descriptor(hidden), *values, *place)

        return launch

    def _compiled(self, types: dict[str, str], constants: dict[str, int]) -> Any:
        key = f"{self.kernel.__name__}_" + "_".join(map(str, constants.values()))
        if key in self.made:
            return self.made[key]
        linalg = self.lower(self.kernel, types, constants)
        # What only Ascend's compiler reads.
        linalg = re.sub(
            r"\{tt\.tensor_kind[^}]*\}| attributes \{[^}]*global_kernel[^}]*\}", "", linalg
        )
        base = self.folder / key
        base.with_suffix(".mlir").write_text(linalg)
        copy = self.folder / "copy.c"
        copy.write_text(COPY)
        for command in (  # -O1: on pairs of 64-bit words clang 19 does not end at -O2
            ["mlir-opt", *PASSES, f"{base}.mlir", "-o", f"{base}.llvm.mlir"],
            ["mlir-translate", "--mlir-to-llvmir", f"{base}.llvm.mlir", "-o", f"{base}.ll"],
            ["clang", "-O1", "-w", "-shared", "-fPIC", f"{base}.ll", copy, "-o", f"{base}.so"],
        ):
            subprocess.run([self.tools / command[0], *command[1:]], check=True, env=self._env())
        self.made[key] = getattr(ctypes.CDLL(f"{base}.so"), self.kernel.__name__)
        return self.made[key]

    def _env(self) -> dict[str, str]:
        libraries = (
            f"{self.tools.parent / 'lib'}{os.pathsep}{self.tools.parents[1] / 'x86_64-linux-gnu'}"
        )
        return {**os.environ, "LD_LIBRARY_PATH": libraries}


def descriptor(x: torch.Tensor) -> list[Any]:
    """MLIR's memref of one dimension: allocated, aligned, offset, size, stride."""
    pointer = ctypes.c_void_p(x.data_ptr())
    return [pointer, pointer, ctypes.c_int64(0), ctypes.c_int64(x.numel()), ctypes.c_int64(1)]


def differing(actual: bytes, wanted: bytes) -> list[str]:
    got, want = fields(actual + wanted[VALUE_BYTES:]), fields(wanted)
    found = []
    for name, (start, _) in LAYOUT.items():
        if start >= VALUE_BYTES or actual[start : start + 8] == wanted[start : start + 8]:
            continue
        bound = {"sum": "abs_sum", "abs_sum": "abs_sum", "sum_sq": "sum_sq"}.get(name)
        if bound is None or not abs(got[name] - want[name]) <= 1e-6 * want[bound]:
            found.append(f"{name}: got {got[name]!r}, expected {want[name]!r}")
    return found


def records_that_differ(dtype: str, lower: Lower, tools: Path, folder: Path) -> list[str]:
    """Every size at every depth that a record has, whole and in chunks, against the reference."""
    for name in ("whole_kernel", "part_kernel", "fold_kernel"):
        kernel = getattr(triton_kernels, name)
        if not isinstance(kernel, OnCpu):
            setattr(triton_kernels, name, OnCpu(kernel, lower, tools, folder))
    found = []
    is_scaled = dtype in ("float32", "bfloat16")
    for kind in ("random", "exponent:-60", "exponent:55") if is_scaled else ("random",):
        for size in SIZES:
            raw = pattern(kind, dtype, size, size)
            x = torch.frombuffer(bytearray(raw or bytes(8)), dtype=torch_dtype(dtype))[:size]
            for depth in DEPTHS if size == SIZES[-2] else ("full",):
                slots = torch.full((2, 192), 0xEE, dtype=torch.uint8)
                options = {"chunk_bytes": CHUNK, "copied_bytes": CHUNK}
                triton_launch.launch_record(x, slots, 1, DEPTHS[depth], TARGET, **options)
                actual = slots[1].numpy().tobytes()[:VALUE_BYTES]
                for text in differing(actual, record(x, depth=depth)):
                    found.append(f"{kind}, {size} components, {depth}: {text}")
    return found
