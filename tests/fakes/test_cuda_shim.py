"""tests/fakes/cuda_on_cpu detects the faults that it is meant to detect, and each barrier of the
kernels is needed.

What it cannot see: threads run one at a time and memory is sequentially consistent, so that a
missing fence or a __syncwarp that only orders memory stays hidden. test_ptx_machine.py takes out
those too.
"""

from __future__ import annotations

import ctypes
import dataclasses
import shutil
from pathlib import Path

import pytest

from fakes.cuda_on_cpu import driver
from fakes.cuda_on_cpu.driver import Call, Cut, LaunchError
from support.helpers import kernel, tensor_of
from support.records.reference import pattern
from support.sampling import sample

pytestmark = pytest.mark.skipif(driver.compiler() is None, reason="no C++ compiler")


def test_shim_sees_a_missing_barrier() -> None:
    lib = driver.library()

    def reversed_by(barrier: int, seed: int) -> list[int]:
        out = (ctypes.c_uint32 * 512)()
        lib.cuda_on_cpu_schedule(seed, 2)
        assert lib.probe_reverse(out, 4, barrier) == 0
        return list(out)

    wanted = [127 - i for i in range(128)] * 4
    assert all(reversed_by(1, seed) == wanted for seed in range(5))
    assert all(reversed_by(0, seed) != wanted for seed in range(5))


def test_shim_stops_at_divergence() -> None:
    lib = driver.library()
    for probe, what in (
        ("probe_half_the_block_waits", "divergent barrier"),
        ("probe_two_barriers", "divergent barrier"),
        ("probe_half_the_warp_shuffles", "divergent"),
    ):
        for seed in range(5):
            lib.cuda_on_cpu_schedule(seed, 2)
            assert getattr(lib, probe)() == 719
            assert what in lib.cuda_on_cpu_error().decode()


def test_shim_sees_a_launch_with_other_shared_memory() -> None:
    lib = driver.library()
    assert lib.probe_block_memory(64, 64) == 0
    assert lib.probe_block_memory(64, 32) == 719
    assert b"of 64 bytes of shared memory was launched with 32" in lib.cuda_on_cpu_error()


def test_shim_shuffles_the_order() -> None:
    lib = driver.library()
    sums = set()
    for seed in range(20):
        out = ctypes.c_float(0)
        lib.cuda_on_cpu_schedule(seed, 1)
        assert lib.probe_sum_in_any_order(ctypes.byref(out)) == 0
        sums.add(out.value)
    assert len(sums) > 1


# Barriers of the kernels: the file, the line, and a neighbouring line that identifies it. Where a
# vote or an exchange stands beside a barrier, threads meet without it, too: test_ptx_machine.py
# takes out every one.
BARRIERS = (
    ("fold.cuh", "    __syncwarp();\n", "    const int lane = lane_here();\n    const Pair* const"),
    ("merge.cuh", "  __syncthreads();\n", "  const int count = warp_count();"),
    ("merge.cuh", "  __syncwarp();\n", "}\n\n// ---- chunks"),
    ("merge.cuh", "    __syncwarp();\n", "  }\n}\n\n}  // namespace"),
    ("records.cuh", "    __syncthreads();\n", "    is_last = shared.last != 0;"),
    ("records.cuh", "  __syncthreads();\n", "}\n\n// ---- kernel"),
    (
        "other_rows.cuh",
        "  __syncwarp();\n",
        "  const Place<Component> place(opaque(lane_index()));",
    ),
)


@pytest.mark.parametrize("barrier", range(len(BARRIERS)))
def test_the_barrier_has_one_place(barrier: int) -> None:
    file, line, after = BARRIERS[barrier]
    assert (driver.ROOT / "csrc" / "cuda" / file).read_text().count(line + after) == 1


@pytest.mark.parametrize("barrier", sample(range(len(BARRIERS)), 1))
def test_every_barrier_is_needed(barrier: int, tmp_path: Path) -> None:
    """Each barrier, taken out, gives a wrong record or an error under some schedule."""
    file, line, after = BARRIERS[barrier]
    for folder in ("csrc/core", "csrc/cuda", "tests/fakes/cuda_on_cpu"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(driver.ROOT / folder, tmp_path / folder, ignore=ignored)
    path = tmp_path / "csrc" / "cuda" / file
    text = path.read_text()
    path.write_text(text.replace(line + after, after))
    lib = driver.open_library(driver.build(tmp_path, only_float32=True))
    x = tensor_of(pattern("random", "float32", 33 * 4096 + 77, 1), "float32")
    cases = [
        ([x[: 5 * 4096 + 77]], Cut(warps=2, share=1, blocks=2)),
        ([x[: 9 * 4096 + 77]], Cut(warps=4, share=1, blocks=3)),
        ([x[: 3 * 4096 : 2]], Cut(warps=1, share=1, blocks=2)),
        ([x], Cut(warps=1, share=1, blocks=9)),
        ([x[:20000], x[:30000], x[:7], x[:25000]], Cut(warps=8, share=1, blocks=1)),
    ]
    wanted = [[kernel(tensor) for tensor in tensors] for tensors, _ in cases]

    def right(seed: int) -> bool:
        for (tensors, cut), records in zip(cases, wanted):
            call = Call(tensors, cut=dataclasses.replace(cut, seed=seed), lib=lib)
            try:
                if call.records() != records:
                    return False
            except (LaunchError, AssertionError):
                return False
        return True

    assert not all(right(seed) for seed in range(1, 12))
