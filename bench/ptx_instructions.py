"""Counts the PTX instructions that the longest thread of a record launch executes, at depth full.

    python bench/ptx_instructions.py     writes bench/results/ptx_instructions.json, prints tables

Needs nvcc and g++. The kernels are csrc/cuda, compiled for sm_90, and run in the interpreter of
tests/fakes/ptx_on_cpu, which counts; every record is compared with the CPU's. Nothing runs on a
GPU: these are instructions, not times.
"""

from __future__ import annotations

import ctypes
import shutil
from typing import Any, Optional

import torch

import harness
from fakes import ptx_on_cpu
from fakes.cuda_on_cpu.driver import Call, Cut
from support.helpers import assert_same, kernel, tensor_of
from support.records.reference import pattern

TILE = 4096
DTYPES = ("float32", "bfloat16")
#: Components of a tensor of one tile; the most is taken at 4,033 (float32) and 4,095 (bfloat16).
PARTIAL = (1, 64, 768, 1024, 2049, 4032, 4033, 4095)
#: Bytes behind an aligned address.
OFFSETS = {"float32": (4, 8), "bfloat16": (2, 4, 8)}
WARPS = (2, 8)
CHUNKS = (2, 8, 32, 128, 256, 257)
MOST = (8, 256)  # warps and chunks at once


def load_kernels(*sources: str) -> ctypes.CDLL:
    """The interpreter with some kernels."""
    return ptx_on_cpu.load(ptx_on_cpu.ptx(sources, "90"))


def ordinary(dtype: str, count: int, offset: int = 0, exponent: int = -3) -> torch.Tensor:
    """Numbers of one binade, ``offset`` bytes behind an aligned address."""
    return tensor_of(pattern(f"exponent:{exponent}", dtype, count, 1), dtype, offset)


def with_nan(dtype: str) -> torch.Tensor:
    x = ordinary(dtype, TILE)
    x[77] = float("nan")
    return x


def executed(
    machine: ctypes.CDLL, tensors: list[torch.Tensor], cut: Optional[Cut] = None
) -> tuple[int, int]:
    """Launches for the records of the tensors, and the instructions of the longest thread."""
    call = Call(tensors, cut=cut or Cut(), lib=machine)
    ptx_on_cpu.count(machine)
    for x, record in zip(tensors, call.records()):
        assert_same(record, kernel(x))
    return ptx_on_cpu.count(machine)


def merging(machine: ctypes.CDLL, warps: int, chunks: int) -> int:
    """What a tile for each warp takes more than one tile."""
    alone = executed(machine, [ordinary("float32", TILE)])[1]
    cut = Cut(warps=warps, share=1, blocks=chunks)
    return executed(machine, [ordinary("float32", TILE * warps * chunks)], cut)[1] - alone


def of_one_tensor(machine: ctypes.CDLL, dtype: str) -> list[dict[str, Any]]:
    cases = {"4,096 elements": ordinary(dtype, TILE), "empty": ordinary(dtype, 0)}
    cases |= {f"{n:,} elements": ordinary(dtype, n) for n in PARTIAL}
    for count in (TILE, TILE - 1):
        for offset in OFFSETS[dtype]:
            cases[f"{count:,}, {offset} bytes off"] = ordinary(dtype, count, offset)
    cases |= {"all tiny": ordinary(dtype, TILE, 0, -60), "all huge": ordinary(dtype, TILE, 0, 60)}
    cases["one NaN"] = with_nan(dtype)
    counts = {case: executed(machine, [x])[1] for case, x in cases.items()}
    whole = counts["4,096 elements"]
    return [
        {"dtype": dtype, "case": case, "instructions": n, "of_a_whole_tile": round(n / whole, 3)}
        for case, n in counts.items()
    ]


def main() -> None:
    if shutil.which("nvcc") is None:
        raise SystemExit("ptx_instructions.py needs nvcc, and there is none on PATH")
    machine = load_kernels("csrc/cuda/records_floats.cu")
    rows = [row for dtype in DTYPES for row in of_one_tensor(machine, dtype)]
    merges = [{"warps": n, "chunks": 1, "more": merging(machine, n, 1)} for n in WARPS]
    merges += [{"warps": 1, "chunks": n, "more": merging(machine, 1, n)} for n in CHUNKS]
    merges.append({"warps": MOST[0], "chunks": MOST[1], "more": merging(machine, *MOST)})
    print(harness.table(list(rows[0]), [[str(cell) for cell in row.values()] for row in rows]))
    print()
    print(harness.table(list(merges[0]), [[str(c) for c in row.values()] for row in merges]))
    harness.write_results("ptx_instructions", rows, merges=merges)


if __name__ == "__main__":
    main()
