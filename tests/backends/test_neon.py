"""The NEON and the scalar kernel as AArch64 programs, run in an emulator or on such a machine.

Held byte for byte to the Records of the reference (tests/support/records/vectors.json) and of the
extension's scalar kernel, which test_stats_values.py holds to it. ``make test-neon`` finds what
this needs."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch

from fakes.layouts import LAYOUTS
from fakes.neon import driver
from fakes.neon.driver import Case, records
from fastcheck import _kernels
from support.helpers import SIZES, assert_same, even, every_isa, kernel, kinds, tensor_of
from support.records.reference import DTYPES, FLOAT_NAMES, VALUE_BYTES, pattern
from support.records.vectors import PATH
from support.sampling import sample

pytestmark = pytest.mark.skipif(not driver.CXX, reason="make test-neon runs these")

ALL = sorted(DTYPES)
ISAS = ("neon", "scalar")
# Arm ARM, FPCR: what a program may have set before it calls. Alternative half-precision, default
# NaN, flush to zero, rounding toward zero and toward minus infinity, half-precision flush to zero.
AHP, DN, FZ, RZ, RM, FZ16 = (1 << 26, 1 << 25, 1 << 24, 3 << 22, 2 << 22, 1 << 19)


def check(cases: list[Case]) -> None:
    """Each Record as the scalar kernel of the extension makes it."""
    for _ in every_isa(["scalar"]):
        wanted = [kernel(case.x, case.depth, case.order) for case in cases]
    for case, want, answer in zip(cases, wanted, records(cases)):
        note = (case.isa, case.x.dtype, case.x.shape, case.x.stride(), case)
        assert_same(answer.record, want, note, "bitwise")
        assert answer.fpcr == case.fpcr


def test_kernels_of_the_build() -> None:
    done = driver.isas()
    assert done.stdout.splitlines() == [
        "neon 1 needs Advanced SIMD; usable",
        "scalar 1 needs nothing; usable",
        "neon",
    ], done
    assert driver.isas(FASTCHECK_CPU_ISA="scalar").stdout.splitlines()[-1] == "scalar"
    done = driver.isas(FASTCHECK_CPU_ISA="avx2")
    assert done.returncode == 1
    assert done.stderr.endswith("that this machine can run: auto, neon, scalar\n"), done.stderr


def test_build_has_no_source_of_another_architecture() -> None:
    driver.build()
    commands = json.loads((driver.BUILD / "compile_commands.json").read_text())
    compiled = {entry["file"].rpartition("/")[2] for entry in commands}
    assert {name for name in compiled if name.startswith("kernel_")} == {
        "kernel_neon.cpp",
        "kernel_scalar.cpp",
    }
    for entry in commands:
        assert "-ffp-contract=off" in entry["command"] and "-mavx" not in entry["command"], entry


@pytest.mark.parametrize("isa", ISAS)
def test_vectors(isa: str) -> None:
    rows = json.loads(PATH.read_text())["vectors"]
    cases = [
        Case(tensor_of(pattern(kind, dtype, count, seed), dtype), isa)
        for kind, dtype, count, seed, _ in rows
    ]
    for row, answer in zip(rows, records(cases)):
        assert answer.record[:VALUE_BYTES].hex() == row[-1], row[:-1]


@pytest.mark.parametrize("dtype", ALL)
def test_sizes_and_depths(dtype: str) -> None:
    every = {even(n, dtype) for n in (*SIZES, *range(3, 40), 2048 + 31, 4096 + 130)}
    sizes = sample(sorted(every), 5)
    tensors = [
        tensor_of(pattern(kind, dtype, count, count), dtype)
        for kind, count in itertools.product(kinds(dtype), sizes)
    ]
    cases = [Case(x, depth=depth) for x in tensors for depth in ("health", "stats", "full")]
    check(cases + [Case(x, "scalar") for x in tensors])


@pytest.mark.parametrize("dtype", ALL)
def test_alignment(dtype: str) -> None:
    count = even(4096 + 333, dtype)
    tensors = [tensor_of(pattern(kind, dtype, count, 21), dtype) for kind in kinds(dtype)]
    check([Case(x, alignment=a) for x in tensors for a in sample((*range(17), 31, 33, 63), 3)])


@pytest.mark.parametrize("dtype", ALL)
def test_layouts(dtype: str) -> None:
    flat = tensor_of(pattern("random", dtype, 12000 * DTYPES[dtype].components, 8), dtype)
    orders = ("storage", "logical")
    check(
        [
            Case(view(flat), order=order, alignment=alignment)
            for view, order, alignment in sample(
                itertools.product(LAYOUTS.values(), orders, (0, 4)), 9
            )
        ]
    )


@pytest.mark.parametrize("dtype", FLOAT_NAMES)
def test_special_tiles(dtype: str) -> None:
    """One unusual component in one of three tiles; then all of a tile, then all of it."""
    row = DTYPES[dtype]
    top = 1 << (8 * row.itemsize - 1)
    one = 1 << row.mantissa_bits
    largest = top - 1 - (one if row.has_inf else 1)
    special = {0, 1, one - 1, one, largest, largest + 1, top - 1, largest + row.has_inf + 1}
    # NaNs, quiet and signaling, with payloads of one bit and of all: they differ in the checksum.
    special |= (
        {top - 1 - (one >> 1), top - one + (one >> 1), top - one + 1} if row.has_inf else set()
    )
    base = np.frombuffer(
        pattern("exponent:-6" if row.exponent_bits > 4 else "exponent:-7", dtype, 3 * 4096 + 7, 9),
        f"<u{row.itemsize}",
    )
    cases = []
    for bits, place in itertools.product(
        sample(sorted(special | {b | top for b in special}), 4),
        (4096 + 5, 4096 + 64, 3 * 4096 + 6, slice(4096, 8192), slice(None)),
    ):
        x = base.copy()
        x[place] = bits
        cases.append(Case(tensor_of(x.tobytes(), dtype)))
    check(cases)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scale_rule(dtype: str) -> None:
    """Tiles on either side of both limits, whole and partial, and at the limits themselves."""
    cases = []
    for exponent, count in itertools.product(
        (-60, -56, -55, -41, 44, 45, 59, 60, 112), (4096, 5000)
    ):
        cases.append(Case(tensor_of(pattern(f"exponent:{exponent}", dtype, count, 11), dtype)))
    for limit, place, factor in itertools.product(
        (2.0**60, 2.0**-40), (0, 700, 4095), (0.5, 1 - 2**-8, 1, 1 + 2**-7, 2)
    ):
        values = torch.full((4096,), 2.0**-50 if limit < 1 else 1.0)
        values[place] = limit * factor
        cases.append(Case(values.to(getattr(torch, dtype))))
    check(cases)


@pytest.mark.parametrize("dtype", sample(ALL, 3))
def test_threads(dtype: str) -> None:
    count = even((1 << 18) + 4096 + 77, dtype)
    x = tensor_of(pattern(kinds(dtype)[-1], dtype, count, 5), dtype)
    check([Case(x, threads=threads) for threads in sample((1, 2, 3, 7), 2)])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 3])
def test_floating_point_modes_of_the_caller(isa: str, threads: int) -> None:
    """Flushed subnormals, another rounding, another float16: no Record shows them, and the caller
    has them back."""
    subnormal = torch.arange(1, 1 << 18, dtype=torch.int32).view(torch.float32)
    tensors = [
        subnormal,
        subnormal.double() * 2.0**-900,  # their squares are subnormal, or zero
        torch.arange(1 << 15, dtype=torch.int16).view(torch.float16).repeat(9),
        tensor_of(pattern("exponent:-126", "float32", 200_001, 3), "float32"),
        tensor_of(pattern("random", "bfloat16", 300_001, 3), "bfloat16"),
        tensor_of(pattern("random", "float8_e4m3fn", 600_001, 3), "float8_e4m3fn"),
        tensor_of(pattern("random", "int64", 70_001, 3), "int64"),  # rounded to float64
    ]
    modes = sample((FZ, FZ | FZ16 | DN, RZ, RM, AHP, AHP | DN | FZ | RM | FZ16), 2)
    cases = [Case(x, isa, fpcr=mode, threads=threads) for x in tensors for mode in modes]
    check(cases)
    assert [a.flushed for a in records(cases[: len(modes)])] == [bool(mode & FZ) for mode in modes]


def test_the_extensions_own_kernels_agree() -> None:
    """What neon is held to here is what this machine's fastest kernel gives."""
    x = tensor_of(pattern("random", "float16", 30_001, 1), "float16")
    assert records([Case(x)])[0].record == kernel(x), _kernels.cpu_isa()
