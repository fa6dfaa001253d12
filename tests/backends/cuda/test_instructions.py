"""Instructions of the kernels for sm_90, counted: in machine code (bench/instructions.py) for a
whole tile, and in PTX (tests/fakes/ptx_on_cpu) on the longest thread of real launches.

The bars are what was counted with nvcc 13.0, and a little room for other releases. Nothing here is
a time. Other kernels than that of float32 at full depth are compiled in whole runs (``make
test-release``).
"""

from __future__ import annotations

import collections
import ctypes
import functools
import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Callable

import pytest

import harness
import instructions
import machine_code
import ptx_instructions
from fakes import ptx_on_cpu
from fakes.cuda_on_cpu import driver
from fakes.cuda_on_cpu.driver import Cut
from ptx_instructions import OFFSETS, PARTIAL, executed, load_kernels, merging, ordinary, with_nan
from support.sampling import IS_WHOLE

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")

# ---- machine code -------------------------------------------------------------------------------

# Issue slots for a component at depths health, stats and full.
SLOTS = {
    "float32": (5.6, 11.3, 16.6),
    "bfloat16": (2.5, 9.2, 11.7),
    "float16": (2.5, 7.8, 10.4),
    "float8_e4m3fn": (2.9, 8.6, 9.9),
}

# Of the kernel that counts exponents.
EXPONENT_SLOTS = {"float32": 28, "bfloat16": 24, "float16": 22, "float8_e4m3fn": 21.9}
# Of the one that makes a record at full depth too: the last column.
BOTH_SLOTS = {"float32": 41.8, "bfloat16": 34.4, "float16": 31.2, "float8_e4m3fn": 30.5}

# What the busiest pipe of an H100 leaves of a pure read: at full depth, of exponents, of both.
REACH = {
    "float32": (1.0, 0.86, 0.67),
    "bfloat16": (1.0, 0.49, 0.42),
    "float16": (1.0, 0.55, 0.47),
    "float8_e4m3fn": (1.0, 0.28, 0.24),
}

FLOATS = ("csrc/cuda/records_floats.cu",) if IS_WHOLE else ptx_on_cpu.FLOAT32_KERNELS
WIDE = ("float32", "bfloat16", "float16") if IS_WHOLE else ("float32",)
FORMATS = {n: form for n, form in instructions.FORMATS.items() if IS_WHOLE or n in WIDE}
DEPTHS = instructions.DEPTHS if IS_WHOLE else ("full",)
COLUMNS = instructions.COLUMNS if IS_WHOLE else DEPTHS


def kernels_in(sources: Iterable[str], wanted: re.Pattern[str]) -> instructions.Kernels:
    program = machine_code.nvdisasm()
    if program is None:
        pytest.skip("neither nvdisasm nor Triton is installed")
    found: instructions.Kernels = {}
    for name in sources:
        path, _ = ptx_on_cpu.cubin(name, "90")
        found |= machine_code.kernels(path, program, wanted)
    return found


@pytest.fixture(scope="module")
def kernels() -> instructions.Kernels:
    every = [f"csrc/cuda/{name}.cu" for name in instructions.SOURCES]
    return kernels_in(every if IS_WHOLE else FLOATS, instructions.IS_COUNTED)


@pytest.fixture(scope="module")
def kernels_of_one() -> instructions.Kernels:
    return kernels_in(FLOATS, instructions.IS_OF_ONE)


Slots = Callable[[str, str], "collections.Counter[str]"]


@pytest.fixture(scope="module")
def slots_of(kernels: instructions.Kernels) -> Slots:
    """Those of a dtype and a depth, found once: the search takes seconds in all."""
    return functools.cache(functools.partial(instructions.per_component, kernels))


@pytest.mark.parametrize("dtype", FORMATS)
def test_slots_of_a_whole_tile(dtype: str, slots_of: Slots) -> None:
    for depth, bar in bars(dtype):
        slots = slots_of(dtype, depth).total()
        # Below half of the bar, the path that was found is not that of a tile.
        assert bar / 2 < slots <= bar, depth


def bars(dtype: str) -> list[tuple[str, float]]:
    return [row for row in zip(instructions.DEPTHS, SLOTS[dtype]) if row[0] in DEPTHS]


@pytest.mark.parametrize("dtype", WIDE)
def test_slots_of_a_whole_tile_of_the_only_tensor(
    dtype: str, kernels_of_one: instructions.Kernels
) -> None:
    for depth, bar in bars(dtype):
        slots = instructions.per_component(kernels_of_one, dtype, depth).total()
        assert bar / 2 < slots <= bar, depth


@pytest.mark.parametrize("depth", [depth for depth in DEPTHS if depth != "health"])
@pytest.mark.parametrize("dtype", WIDE)
def test_a_batch_is_loaded_while_the_one_in_front_is_taken(
    dtype: str, depth: str, kernels: instructions.Kernels, kernels_of_one: instructions.Kernels
) -> None:
    """bfloat16 once had its sums behind the vote, and no registers for the loads until then."""
    for each in (kernels, kernels_of_one):
        assert min(instructions.sums_behind_loads(each, dtype, depth)) >= 0.75


@pytest.mark.skipif(not IS_WHOLE, reason="make test-release runs this")
@pytest.mark.parametrize("dtype", EXPONENT_SLOTS)
def test_slots_of_an_exponent(dtype: str, slots_of: Slots) -> None:
    for depth, bar in (
        ("exponents", EXPONENT_SLOTS[dtype]),
        (instructions.WITH_EXPONENTS, BOTH_SLOTS[dtype]),
    ):
        slots = slots_of(dtype, depth).total()
        assert bar / 2 < slots <= bar, depth


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_busiest_pipe(dtype: str, slots_of: Slots) -> None:
    size = instructions.FORMATS[dtype].size
    for depth, least in zip(COLUMNS[COLUMNS.index("full") :], REACH[dtype]):
        counts = slots_of(dtype, depth)
        unknown = {
            opcode
            for opcode in counts
            if not any(
                re.fullmatch(pipe.opcodes, opcode)
                for name, pipe in instructions.PIPES.items()
                if name != "issue"
            )
        }
        assert not unknown
        reach, _ = instructions.limit(counts, size, "H100")
        assert least <= reach <= min(1.0, least + 0.1), depth


def test_all_of_the_bench_runs(
    slots_of: Slots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instructions, "COLUMNS", COLUMNS)
    monkeypatch.setattr(instructions, "FORMATS", FORMATS)
    monkeypatch.setattr(instructions, "compiled", dict)
    monkeypatch.setattr(instructions, "per_component", lambda _, *which: slots_of(*which))
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    instructions.main()
    rows = json.loads((tmp_path / "instructions.json").read_text())["rows"]
    assert {row["dtype"] for row in rows} == set(FORMATS)


# ---- PTX ----------------------------------------------------------------------------------------

RUN = ptx_instructions.DTYPES if IS_WHOLE else ("float32",)


@pytest.fixture(scope="module")
def machine() -> ctypes.CDLL:
    if driver.compiler() is None:
        pytest.skip("no C++ compiler")
    return load_kernels(*FLOATS)


# A tensor of one tile. When the bars were set, a whole one took 2,925 and 2,170; one of 4,033 and
# of 4,095 elements, the most of any number of them, 1.15 and 1.19 times that; one that is 4 or 2
# bytes behind an aligned address 1.17 and 1.30 times.
WHOLE = {"float32": 3040, "bfloat16": 2260}
OF_PARTIAL = 1.22
OF_NOT_ALIGNED = 1.33


@pytest.mark.parametrize("dtype", RUN)
def test_a_partial_tile_costs_little_more_than_a_whole_one(
    dtype: str, machine: ctypes.CDLL
) -> None:
    whole = executed(machine, [ordinary(dtype, 4096)])[1]
    assert whole <= WHOLE[dtype]
    for count in PARTIAL:
        assert executed(machine, [ordinary(dtype, count)])[1] <= OF_PARTIAL * whole, count


# When the bars were set: 291 and 279; 111 more for the warps of a block; for chunks in blocks of
# one warp 252, 252, 242, 368, 536 and 1,028 more.
@pytest.mark.parametrize("dtype", RUN)
def test_what_follows_the_tiles_of_a_tensor(dtype: str, machine: ctypes.CDLL) -> None:
    assert executed(machine, [ordinary(dtype, 0)])[1] <= 303


@pytest.mark.parametrize("warps", [2, 8])
def test_merging_warps(warps: int, machine: ctypes.CDLL) -> None:
    assert merging(machine, warps, 1) <= 118


MERGES = {2: 265, 8: 265, 32: 265, 128: 385, 256: 560, 257: 1075}


@pytest.mark.parametrize("chunks", MERGES)
def test_merging_chunks(chunks: int, machine: ctypes.CDLL) -> None:
    assert merging(machine, 1, chunks) <= MERGES[chunks]


@pytest.mark.parametrize("dtype", RUN)
def test_a_tensor_that_is_not_aligned_costs_little_more(dtype: str, machine: ctypes.CDLL) -> None:
    whole = executed(machine, [ordinary(dtype, 4096)])[1]
    for count in (4095, 4096):
        for offset in OFFSETS[dtype]:
            instructions = executed(machine, [ordinary(dtype, count, offset)])[1]
            assert instructions <= OF_NOT_ALIGNED * whole, (count, offset)


# Of 4,096 float32 that are read again, when the bars were set: 5,082, 5,079 and 5,493.
AGAIN = {"tiny": 5285, "huge": 5285, "nan": 5715}


@pytest.mark.parametrize("kind", AGAIN)
def test_a_tile_that_is_read_again(kind: str, machine: ctypes.CDLL) -> None:
    exponents = {"tiny": -60, "huge": 60}
    x = ordinary("float32", 4096, 0, exponents[kind]) if kind != "nan" else with_nan("float32")
    assert executed(machine, [x])[1] <= AGAIN[kind]


@pytest.mark.parametrize("dtype", RUN)
def test_tiles_of_one_scale_are_read_once(dtype: str, machine: ctypes.CDLL) -> None:
    """All but the first two of a warp's share, which no cache holds when it is read again."""
    cut = Cut(warps=1, share=16, blocks=1)
    counts = [
        executed(machine, [ordinary(dtype, 16 * 4096, 0, exponent)], cut)[1]
        for exponent in (-3, -60, 60)
    ]
    assert max(counts[1:]) <= 1.2 * counts[0]


def test_tensors_that_are_not_aligned_share_a_launch(machine: ctypes.CDLL) -> None:
    tensors = [ordinary("float32", 5 + i, 4 * (i % 4)) for i in range(40)]
    assert executed(machine, tensors)[0] == 1


def test_all_of_the_bench_of_ptx_runs(
    machine: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ptx_instructions, "load_kernels", lambda *_: machine)
    monkeypatch.setattr(ptx_instructions, "DTYPES", RUN)
    monkeypatch.setattr(ptx_instructions, "PARTIAL", (1,))
    monkeypatch.setattr(ptx_instructions, "OFFSETS", dict.fromkeys(OFFSETS, (4,)))
    monkeypatch.setattr(ptx_instructions, "CHUNKS", (2,))
    monkeypatch.setattr(ptx_instructions, "MOST", (2, 2))
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    ptx_instructions.main()
    assert json.loads((tmp_path / "ptx_instructions.json").read_text())["merges"]
