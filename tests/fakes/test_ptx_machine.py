"""tests/fakes/ptx_on_cpu detects the faults that it is meant to detect, and each instruction of
csrc/cuda/intrinsics.cuh equals its plain code.

The faults are put into copies of the kernels, a line each, and compiled by nvcc: every barrier and
every fence that they have, taken out, is missed.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from fakes import ptx_on_cpu
from fakes.cuda_on_cpu import driver
from fakes.cuda_on_cpu.driver import ROOT, Call, Cut, Garbage, LaunchError
from fastcheck.ring.device import MAX_SEGMENTS
from support.helpers import kernel, tensor_of
from support.records.reference import pattern
from support.sampling import IS_WHOLE, sample

pytestmark = pytest.mark.skipif(
    ptx_on_cpu.nvcc() is None or driver.compiler() is None, reason="no nvcc, or no C++ compiler"
)

# ---- faults --------------------------------------------------------------------------------------


def changed(
    folder: Path, file: str, begin: int, end: int, text: str = "", depth: str = "full"
) -> ctypes.CDLL:
    """The float32 kernel of a depth with a part of a header replaced."""
    for each in ("csrc/core", "csrc/cuda", "tests/fakes/cuda_on_cpu"):
        shutil.copytree(ROOT / each, folder / each, ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "csrc" / "cuda" / file
    before = path.read_text()
    path.write_text(before[:begin] + text + before[end:])
    source = folder / ptx_on_cpu.FLOAT32_KERNELS[0]
    source.write_text(source.read_text().replace("Depth::kFull", f"Depth::k{depth.title()}"))
    return ptx_on_cpu.load(ptx_on_cpu.ptx(ptx_on_cpu.FLOAT32_KERNELS, "90", folder))


def cases() -> list[tuple[list[torch.Tensor], Cut]]:
    x = tensor_of(pattern("random", "float32", 33 * 4096 + 77, 1), "float32")
    x[77] = float("nan")
    few = tensor_of(pattern("random", "float32", 100, 1), "float32", offset=4)
    more = tensor_of(pattern("random", "float32", 199, 1), "float32", offset=4)
    return [
        ([x[: 5 * 4096 + 77]], Cut(warps=2, share=1, blocks=2)),
        ([x[: 9 * 4096 + 77]], Cut(warps=4, share=1, blocks=3)),
        ([x[1:5001]], Cut(warps=1, share=1, blocks=2)),
        ([x[1 : 3 * 4096 - 90 : 2]], Cut(warps=1, share=1, blocks=2)),
        ([x], Cut(warps=1, share=1, blocks=9)),
        ([x[5 * 4096 : 17 * 4096]], Cut(warps=2, share=4, blocks=1)),
        ([x[:20000], x[:30000], few, more, x[:25000]], Cut(warps=4, share=1, blocks=1)),
    ]


def many_chunks() -> tuple[list[torch.Tensor], Cut]:
    """More than the warps of a block merge at once. It takes as long as all the others together."""
    x = tensor_of(pattern("random", "float32", 257 * 4096, 1), "float32")
    return [x], Cut(warps=1, share=1, blocks=300)


def faults(lib: ctypes.CDLL, seeds: int, depth: str = "full") -> Iterator[str]:
    """What is found under one schedule after the other: errors, and wrong records."""

    def of(cases: list[tuple[list[torch.Tensor], Cut]], seeds: int) -> Iterator[str]:
        wanted = [[kernel(x, depth) for x in tensors] for tensors, _ in cases]
        for seed in range(1, seeds + 1):
            for (tensors, cut), records in zip(cases, wanted):
                call = Call(tensors, cut=dataclasses.replace(cut, seed=seed), lib=lib)
                try:
                    if call.records(depth) != records:
                        yield "a wrong record"
                except (LaunchError, AssertionError) as error:  # of the machine, of the driver
                    yield str(error)

    yield from of(cases(), seeds)
    if IS_WHOLE:
        yield from of([many_chunks()], min(seeds, 2))


def test_no_fault_in_the_kernels_as_they_are(tmp_path: Path) -> None:
    assert list(faults(changed(tmp_path, "records.cuh", 0, 0), seeds=12 if IS_WHOLE else 1)) == []


# Those of the kernels that are not loaded here: test_ptx_exponents.py.
NOT_RUN_HERE = "exponents.cuh"
SYNCHRONISATION = re.compile(r"^ *__(syncwarp|syncthreads|threadfence)\(\);.*\n", re.M)
PLACES = [
    (path.name, match.start(), match.end(), text[: match.start()].count("\n") + 1, match[1])
    for path in sorted((ROOT / "csrc" / "cuda").glob("*.cuh"))
    if path.name != NOT_RUN_HERE
    for text in [path.read_text()]
    for match in SYNCHRONISATION.finditer(text)
]


def test_all_kinds_of_synchronisation_are_among_the_faults() -> None:
    assert {kind for *_, kind in PLACES} == {
        "syncwarp",
        "syncthreads",
        "threadfence",
    }


@pytest.mark.parametrize("place", sample(PLACES, 1), ids=lambda place: f"{place[0]}:{place[3]}")
def test_every_barrier_and_fence_is_needed(
    place: tuple[str, int, int, int, str], tmp_path: Path
) -> None:
    # Where there are sums, their barriers stand beside that of the counts.
    depth = "health" if place[0] == "batch.cuh" else "full"
    assert next(faults(changed(tmp_path, *place[:3], depth=depth), 12, depth), None) is not None


HOST_FENCES = [
    match.span()
    for match in re.finditer(
        r"^ *__threadfence_system\(\);\n", (ROOT / "csrc/cuda/records.cuh").read_text(), re.M
    )
]


class Boxed:
    """A call with a record that goes to the box of a lost device."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        self.call = Call([torch.full((5,), float("nan"))], lib=lib)
        self.box = Garbage(MAX_SEGMENTS * 16 * 208, fill=0)
        self.claims = Garbage(MAX_SEGMENTS * 8)
        workspace = self.call.workspace
        workspace.box, workspace.claims = self.box.address, self.claims.address
        workspace.stretch = 1


@pytest.mark.parametrize(
    ("place", "instead"), sample(itertools.product((0, 1), ("", "  __threadfence();\n")), 1)
)
def test_every_fence_for_the_host_is_needed(place: int, instead: str, tmp_path: Path) -> None:
    """A device that is lost between two stores must leave no row that only looks whole."""
    boxed = Boxed(changed(tmp_path, "records.cuh", *HOST_FENCES[place], instead))
    with pytest.raises(LaunchError, match="the host may see a row that is not whole"):
        boxed.call.records()


def test_a_row_that_the_host_may_see_is_whole(tmp_path: Path) -> None:
    assert len(HOST_FENCES) == 2
    boxed = Boxed(changed(tmp_path, "records.cuh", 0, 0))
    boxed.call.records()
    assert any(boxed.box.bytes())


# A file, the text in it, its replacement, and the machine's error.
FAULTS = {
    "reads past the end": (
        "other_rows.cuh",
        "in_tile + step > end) continue;",
        "in_tile > end) continue;",
        "out of bounds: ",
    ),
    "reads past the end of a tensor that is not aligned": (
        "other_rows.cuh",
        "bytes >= S::kVectorBytes + S::kHalfBytes - past",
        "bytes >= S::kVectorBytes + S::kHalfBytes - past - 4",
        "out of bounds: ",
    ),
    "reads vectors past the end": (
        "other_rows.cuh",
        "if (room >= needed + ",
        "if (room >= needed - 4 + ",
        "out of bounds: ",
    ),
    "reads in front of a tensor that is not aligned": (
        "other_rows.cuh",
        "&& !(past != 0 && at == data)",
        "",
        "out of bounds: ",
    ),
    "reads vectors that are not aligned": (
        "other_rows.cuh",
        "const int step = layout.granule_bytes;",
        "const int step = S::kVectorBytes;",
        "misaligned access of 16 bytes",
    ),
    "reads global memory that nobody wrote": (
        "merge.cuh",
        "for (int k = lane_index(); k < count;",
        "for (int k = lane_index(); k <= count;",
        "uninitialised: the levels",
    ),
    "reads shared memory that nobody wrote": (
        "records.cuh",
        "for (auto& leaves : shared.leaf) leaves[lane] = 0.0;",
        "for (int i = 0; i < 0; ++i) {\n}",
        "uninitialised: shared memory",
    ),
    "reads through the read-only cache what the launch writes": (
        "intrinsics.cuh",
        "ld.global.cg.u64",
        "ld.global.nc.u64",
        "ld.global.nc of the partials",
    ),
    "writes to shared memory of another warp": (
        "records.cuh",
        "shared.warps[warp], shared.merge.parts",
        "shared.warps[0], shared.merge.parts",
        "race: shared memory",
    ),
    "writes to shared memory that other warps may still read": (
        "records.cuh",
        "    is_last = shared.last != 0;",
        "    is_last = shared.last != 0;\n    __syncwarp();\n"
        "    if (threadIdx.x == 0) shared.last = 0;",
        "was read by warp",
    ),
    "writes to shared memory that its warp may still read": (
        "records.cuh",
        "entry.slot)[lane] = word;\n",
        "entry.slot)[lane] = word;\n  if (lane == 0) shared.parts[0] = {};\n",
        "was read by thread",
    ),
    "writes twice to shared memory": (
        "batch.cuh",
        "    if (lane_index() < 4) shared_.rare[lane_index()] = 0;",
        "    shared_.rare[lane_index() % 4] = 0;",
        r"was written by thread .*: st\.shared",
    ),
    "adds to what it has stored": (
        "records.cuh",
        "  if (lane != 0) return false;\n  __threadfence();\n",
        "  if (lane != 0) return false;\n  __threadfence();\n  launch.counters[index] = 0;\n",
        "an atomic on what the thread itself stored",
    ),
    "writes past its slot": (
        "records.cuh",
        "(launch.slots + entry.slot)",
        "(launch.slots + entry.slot + 1000)",
        "out of bounds: 8 bytes",
    ),
    "writes to a tensor": (
        "records.cuh",
        "  if (lane != 0) return false;\n",
        "  if (lane != 0) return false;\n  *(float*)entries_of(launch.list)[index].data = 0;\n",
        "a store to a tensor",
    ),
    "divides by zero": (
        "other_rows.cuh",
        "Index stretch = position / inner;",
        "Index stretch = position / static_cast<Index>(layout.sizes[kMaxDims - 1]);",
        "a division by zero",
    ),
    "leaves a barrier to some": (
        "merge.cuh",
        "  __syncthreads();\n  const int count = warp_count();",
        "  if (warp_index() != 0) return;\n  __syncthreads();\n  const int count = warp_count();",
        "divergent barrier",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_has_one_place(name: str) -> None:
    file, before, *_ = FAULTS[name]
    assert (ROOT / "csrc" / "cuda" / file).read_text().count(before) == 1


@pytest.mark.parametrize("name", sample(FAULTS, 1))
def test_faults_are_named(name: str, tmp_path: Path) -> None:
    file, before, after, wanted = FAULTS[name]
    text = (ROOT / "csrc" / "cuda" / file).read_text()
    begin = text.index(before)
    lib = changed(tmp_path, file, begin, begin + len(before), after)
    found = []
    for said in faults(lib, seeds=3):
        found.append(said)
        if re.search(wanted, said):
            return
    pytest.fail(f"{wanted!r} was not found, but {found}")


def test_what_a_barrier_orders_is_no_fault(tmp_path: Path) -> None:
    """A flag that every warp has read is read and written by one of them, behind a barrier."""
    text = (ROOT / "csrc" / "cuda" / "records.cuh").read_text()
    barrier = "  __syncthreads();\n"
    end = text.index(barrier + "}\n", text.index("void finish_chunk(")) + len(barrier)
    added = "  if (threadIdx.x == 0) shared.last += 1;\n"
    lib = changed(tmp_path, "records.cuh", end, end, added)
    assert list(faults(lib, seeds=3 if IS_WHOLE else 1)) == []


def test_what_it_does_not_know_is_said(tmp_path: Path) -> None:
    target = tmp_path / "a.ptx"
    source = ptx_on_cpu.ptx(ptx_on_cpu.FLOAT32_KERNELS, "90")[0].read_text()
    target.write_text(source.replace("add.rn.f32", "add.rz.f32", 1))
    with pytest.raises(RuntimeError, match=r"a\.ptx:\d+: no definition of add\.rz\.f32"):
        ptx_on_cpu.load([target])
    lib = ptx_on_cpu.load(ptx_on_cpu.ptx(ptx_on_cpu.FLOAT32_KERNELS, "90"))
    with pytest.raises(LaunchError, match=r"no kernel .* was loaded"):
        Call([torch.ones(3, dtype=torch.bfloat16)], lib=lib).records()


# ---- instructions --------------------------------------------------------------------------------

HALVES = {
    "brain": (0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF),
    "half": (0x0000, 0x0001, 0x03FF, 0x0400, 0x3C00, 0x7BFF, 0x7C00, 0x7C01, 0x7E00, 0x7FFF),
}
WORDS = (0x00000000, 0x00000001, 0x007FFFFF, 0x00800000, 0x3F800000, 0x7F7FFFFF, 0x7F800000)
WORDS += (0x7F800001, 0x7FC00000, 0x7FFFFFFF)


def operands(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Both signs of all classes of value against many values."""
    rng = np.random.default_rng(1)
    every = np.arange(1 << 16, dtype=np.uint32)
    many = 200_000 if IS_WHOLE else 20_000
    if name in ("permute", "dots"):
        x, y = rng.integers(0, 1 << 32, (2, many), dtype=np.uint32)
        return x, y
    if name.startswith("two"):
        finite = rng.integers(0, 1 << 32, (2, many), dtype=np.uint32) & 0xFF7FFFFF
        return finite[0], finite[1]
    if name == "half_value":
        finite = every[(every & 0x7FFF) < 0x7C00]
        return finite, finite
    if name == "times_256":
        kept = every[((every & 0x7F) == 0) & ((every & 0x7FFF) < 0x4000)]
        return kept | kept[::-1] << 16, kept
    if name == "e4m3":
        return every | every[::-1] << 16, every
    if name == "max_float":
        special = np.array([w | sign for w in WORDS for sign in (0, 1 << 31)], np.uint32)
        others = np.concatenate([special, rng.integers(0, 1 << 32, 2000, dtype=np.uint32)])
        pairs = np.array(list(itertools.product(special, others)), np.uint32)
    else:
        halves = HALVES[name.split("_")[1]]
        special = np.array([h | sign for h in halves for sign in (0, 1 << 15)], np.uint32)
        pairs = np.stack(
            np.meshgrid(special, every[:: 5 if IS_WHOLE else 41], indexing="ij"), -1
        ).reshape(-1, 2)
        pairs = pairs | pairs[::-1] << 16  # another pair in the upper halves
    return np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])


def told_apart(name: str, x: np.ndarray) -> np.ndarray:
    """Without what means nothing: a zero's sign, a NaN's payload, the sign of a magnitude."""
    if name.startswith("max_float"):
        bits = np.where(x == 1 << 31, np.uint32(0), x)
        return np.where((bits & 0x7FFFFFFF) > 0x7F800000, np.uint32(0x7FFFFFFF), bits)
    if name in ("permute", "dots", "half_value", "times_256") or name.startswith("two"):
        return x
    if name == "e4m3":
        halves = x.view(np.uint16)
        return np.where((halves & 0x7FFF) > 0x5F00, np.uint16(0x7FFF), halves)  # 448
    infinity = 0x7F80 if name.endswith("brain") else 0x7C00
    halves = x.view(np.uint16) & (0x7FFF if name.startswith("magnitude") else 0xFFFF)
    halves = np.where(halves == 0x8000, np.uint16(0), halves)
    return np.where((halves & 0x7FFF) > infinity, np.uint16(0x7FFF), halves)


@pytest.fixture(scope="module")
def plain() -> ctypes.CDLL:
    flags = (*driver.FLAGS, "-DPLAIN")
    source = ("tests/fakes/ptx_on_cpu/intrinsics.cu", *driver.SOURCES[-3:-1])
    path = ptx_on_cpu.BUILD / "libplain.so"
    return ctypes.CDLL(str(driver.shared_library(path, source, driver.HEADERS, flags, ROOT)))


INTRINSICS = (
    "permute",
    "dots",
    "max_brain",
    "max_half",
    "min_brain",
    "min_half",
    "magnitude_brain",
    "magnitude_half",
    "max_float",
    "half_value",
    "times_256",
    "e4m3",
    "two_sums",
    "two_products",
    "two_squares",
)
#: Each one's file takes nvcc seconds; samples have the ends of the range.
ARCHS = ("75", "80", "86", "90", "100") if IS_WHOLE else ("75", "100")


@pytest.mark.parametrize(
    ("name", "arch"),
    sample(itertools.product(INTRINSICS, ARCHS), len(INTRINSICS)),
)
def test_instructions_equal_their_plain_code(name: str, arch: str, plain: ctypes.CDLL) -> None:
    lib = ptx_on_cpu.load(ptx_on_cpu.ptx(("tests/fakes/ptx_on_cpu/intrinsics.cu",), arch))
    x, y = operands(name)
    wanted, got = np.empty_like(x), np.empty_like(x)
    pointers = [ctypes.c_void_p(each.ctypes.data) for each in (x, y, wanted, got)]
    count = ctypes.c_int64(len(x))
    getattr(plain, f"plain_{name}")(*pointers[:3], count)
    lib.cuda_on_cpu_schedule(1, 1)
    error = lib.ptx_on_cpu_probe(f"device_{name}".encode(), *pointers[:2], pointers[3], count)
    assert error is None, error
    assert (told_apart(name, got) == told_apart(name, wanted)).all()


@pytest.mark.parametrize(
    ("name", "instruction"),
    [
        ("permute", "prmt.b32"),
        ("max_brain", "max.NaN.bf16x2"),
        ("max_half", "max.NaN.f16x2"),
        ("min_brain", "min.bf16x2"),
        ("min_half", "min.f16x2"),
        ("magnitude_brain", "min.xorsign.abs.bf16x2"),
        ("magnitude_half", "min.xorsign.abs.f16x2"),
        ("max_float", "max.NaN.f32"),
        ("half_value", "cvt.f32.f16"),
        ("times_256", "mul.rn.f16x2"),
        ("e4m3", "cvt.rn.f16x2.e4m3x2"),
        ("two_sums", "add.rn.f32x2"),
        ("two_products", "mul.rn.f32x2"),
        ("two_squares", "fma.rn.f32x2"),
    ],
)
def test_the_instruction_is_what_was_run(name: str, instruction: str) -> None:
    text = ptx_on_cpu.ptx(("tests/fakes/ptx_on_cpu/intrinsics.cu",), "100")[0].read_text()
    body = text[text.index(f".entry device_{name}(") :]
    assert f"\t{instruction} " in body[: body.index("ret;")]
