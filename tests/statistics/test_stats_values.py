"""Every value field against the reference: dtype x size x alignment x layout x ISA x threads."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fastcheck import _kernels
from support.helpers import (
    ISAS,
    SIZES,
    assert_same,
    cpu_only,
    even,
    every_isa,
    expected,
    kernel,
    kinds,
    swept,
    tensor_of,
)
from support.processes import run_code
from support.records.reference import (
    DEPTHS,
    DTYPES,
    FLOAT_NAMES,
    VALUE_BYTES,
    dtype_of,
    fields,
    is_dense,
    pattern,
    record,
    record_of_bytes,
)
from support.records.torch_dtypes import torch_dtype
from support.records.views import LAYOUTS

pytestmark = [pytest.mark.fake_statistics, pytest.mark.fake_cuda]


LARGE = (1 << 20) + 4096 + 77
ALL = sorted(DTYPES)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ALL)
def test_sizes(dtype: str, isa: str) -> None:
    for kind in kinds(dtype):
        for size in swept(SIZES, 6):
            count = even(size, dtype)
            x = tensor_of(pattern(kind, dtype, count, size), dtype)
            for name in every_isa([isa]):
                assert_same(kernel(x), expected(kind, dtype, count, size), (name, kind, count))


@pytest.mark.parametrize("dtype", ALL)
def test_depths(dtype: str) -> None:
    for count in (0, 2, 4098, 9000):
        raw = pattern("random", dtype, count, 4)
        x = tensor_of(raw, dtype)
        full = kernel(x)
        for isa in every_isa():
            for depth in DEPTHS:
                actual = kernel(x, depth)
                assert_same(actual, record_of_bytes(raw, dtype, depth=depth), (isa, depth, count))
                end = {"health": 64, "stats": 104, "full": 112}[depth]
                assert actual[:end] == full[:end]
                assert actual[end:VALUE_BYTES] == bytes(VALUE_BYTES - end)


@pytest.mark.parametrize("dtype", ALL)
def test_alignment(dtype: str) -> None:
    count = even(4096 + 333, dtype)
    for kind in kinds(dtype)[:2]:
        raw = pattern(kind, dtype, count, 21)
        wanted = expected(kind, dtype, count, 21)
        for offset in swept(
            (*range(17), 31, 33, 63), 6
        ):  # odd ones: not even aligned to the component
            x = tensor_of(raw, dtype, offset)
            assert x.data_ptr() % 64 == offset
            for isa in every_isa():
                assert_same(kernel(x), wanted, (isa, kind, offset))


@pytest.mark.parametrize(
    "dtype",
    ["float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "complex64", "int8", "int64"],
)
def test_threads(dtype: str, torch_threads: None) -> None:
    count = even(LARGE, dtype)
    kind = kinds(dtype)[-1]
    x = tensor_of(pattern(kind, dtype, count, 5), dtype)
    wanted = expected(kind, dtype, count, 5)
    for threads in swept((1, 2, 3, 7), 1):
        torch.set_num_threads(threads)
        for isa in every_isa():
            assert_same(kernel(x), wanted, (isa, threads))


@cpu_only
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads in /proc")
def test_threads_are_torchs_own() -> None:
    """A large tensor starts torch's pool, and the pool is then the one that torch goes on with."""
    code = """
import os, torch, fastcheck
torch.set_num_threads(3)
threads = lambda: len(os.listdir("/proc/self/task"))
small = torch.frombuffer(bytearray(4000), dtype=torch.float32)
large = torch.frombuffer(bytearray(16 << 20), dtype=torch.float32)
fastcheck.stats(small)
before = threads()
fastcheck.stats(large)
after = threads()
large.sum()
print(after - before, threads() - after)
"""
    done = run_code(code)
    assert (done.returncode, done.stdout) == (0, "2 0\n"), done.stderr


def test_several_callers_at_once() -> None:
    """The extension lets go of the interpreter while it reads: callers overlap. Elsewhere they
    share the constants kept on the device.
    """
    inputs = [
        (dtype, 40000 + 1000 * k) for k in range(4) for dtype in ("float32", "bfloat16", "int64")
    ]
    tensors = [tensor_of(pattern("random", dtype, count, 3), dtype) for dtype, count in inputs]
    wanted = [expected("random", dtype, count, 3) for dtype, count in inputs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            for actual, whole in zip(pool.map(kernel, tensors), wanted):
                assert_same(actual, whole)


@cpu_only
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux")
def test_strided_tensors_are_not_copied() -> None:
    code = """
import resource, torch, fastcheck
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
x = torch.ones(4096, 4096)
fastcheck.stats([x, x[:, :64], x[:8, ::2]])
before = peak()
for view in (x[:, ::2], x[:, 1:], x.t()[:, ::2], x[0].expand(4096, 4096), x.t()):
    for order in ("storage", "logical"):
        assert fastcheck.stats(view, order=order).sum == view.numel()
print(peak() - before < 24 * 1024)  # the smallest copy has 32 MiB
"""
    done = run_code(code)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stdout + done.stderr


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_tiles_whose_scale_is_not_that_of_the_tiles_before(dtype: str) -> None:
    """Tiles are added up with the scale of the two before them, before their own is known."""
    tiny, huge, plain = 2.0**-60, 2.0**80, 1.0
    generator = torch.Generator().manual_seed(5)
    order = [plain, tiny, tiny, tiny, tiny, huge, tiny, huge, huge, huge, huge, plain, plain]
    order += [0.0, tiny, tiny, tiny, 0.0, 0.0, tiny, plain, tiny, plain, tiny, tiny]
    components = 2 if dtype.startswith("complex") else 1
    scales = torch.tensor(order, dtype=torch.float64).repeat_interleave(4096)
    values = torch.randn(len(scales), generator=generator, dtype=torch.float64) * scales
    for bad in (None, 3 * 4096 + 17, 8 * 4096):
        for count in (len(values), 4 * 4096 + 778, 24 * 4096 + 70):
            x = values[:count].to(torch.bfloat16 if dtype == "bfloat16" else torch.float32)
            if bad is not None and bad < count:
                x[bad] = float("nan")
            x = torch.view_as_complex(x.view(-1, 2)) if components == 2 else x
            wanted = record(x)
            for isa in every_isa():
                assert_same(kernel(x), wanted, (isa, bad, count))


@pytest.mark.parametrize("dtype", FLOAT_NAMES)
def test_tiles_with_zeros_behind_tiles_without(dtype: str) -> None:
    """Zeros are counted while a tile is read where the tile before has some, else behind it."""
    limits = torch.finfo(torch_dtype(dtype))
    generator = torch.Generator().manual_seed(11)
    kinds_of_tile = ["none", "half", "half", "none", "minus", "half", "all", "all", "one", "one"]
    kinds_of_tile += ["half", "subnormal", "half", "half", "largest", "half", "nan", "half", "tiny"]
    kinds_of_tile += ["tiny", "tiny", "half", "none", "none", "subnormal", "minus", "minus", "half"]
    tiles = []
    for kind in kinds_of_tile:
        x = torch.randn(4096, generator=generator, dtype=torch.float64)
        x = torch.where(x.abs() < 0.1, 0.5, x)  # no subnormals of 8 bits but those put there
        if kind == "tiny":
            x *= 2.0**-60 if limits.tiny < 2.0**-64 else 1.0
        if kind == "all":
            x *= 0.0
        elif kind == "one":
            x[77] = 0.0
        elif kind != "none":
            x = x.relu() if kind in ("half", "tiny") else x * (x > 0)
        if kind == "subnormal":
            x[5] = -limits.smallest_normal / 2
        elif kind == "largest":
            x[6] = -limits.max
        elif kind == "nan":
            x[7] = float("nan")
        tiles.append(x)
    values = torch.cat(tiles)
    counts = (len(values), 2 * 4096 + 777, 20 * 4096 + 70)
    cases = [x for count in counts for x in (values[:count], values[:count].relu())]
    subnormal = tiles[0].abs().clamp(max=float(limits.smallest_normal) / 2)
    cases.append(torch.cat([subnormal, tiles[1], tiles[1], tiles[0].abs()]))
    for x in cases:
        x = x.to(torch_dtype(dtype))
        wanted = record(x)
        for isa in every_isa():
            assert_same(kernel(x), wanted, (isa, len(x)))


def test_tiles_of_float8_with_large_values_behind_tiles_without() -> None:
    """Values from 32 on are added up apart; the smallest magnitude is found where signs agree."""
    generator = torch.Generator().manual_seed(3)
    small, all_finite, any_bits, below_one = 0x60, 0x7F, 0x80, 0x38
    tiles = []
    for most in (small, all_finite, small, any_bits, small, below_one, all_finite, any_bits):
        tiles.append(torch.randint(0, most, (4096,), generator=generator))
    tiles += [torch.full((4096,), 0x7E), torch.full((4096,), 0x7F), torch.full((4096,), 1)]
    magnitudes = torch.cat(tiles)
    signs = {
        "none": 0,
        "all": 0x80,
        "half": torch.randint(0, 2, (len(magnitudes),), generator=generator) << 7,
    }
    for name, sign in signs.items():
        for bits in (magnitudes, magnitudes.flip(0), magnitudes % 0x7E + 1):
            x = (bits | sign).to(torch.uint8).view(torch.float8_e4m3fn)
            wanted = record(x)
            for isa in every_isa():
                assert_same(kernel(x), wanted, (isa, name))


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_layouts(layout: str) -> None:
    for dtype in swept(ALL, 5):
        kind = kinds(dtype)[min(1, len(kinds(dtype)) - 1)]
        x = LAYOUTS[layout](tensor_of(pattern(kind, dtype, even(26001, dtype), 8), dtype))
        for order in ("storage", "logical"):
            wanted = record(x, order=order)
            for isa in every_isa():
                assert_same(kernel(x, order=order), wanted, (isa, dtype, order))
        # the rule that was used is in the record
        assert fields(kernel(x))["order"] == (0 if is_dense(x) else 1)
        assert fields(kernel(x, order="logical"))["order"] == 1


def test_layouts_reach_both_rules() -> None:
    x = torch.zeros(26001)
    dense = {name for name, view in LAYOUTS.items() if is_dense(view(x))}
    assert {"transposed", "permuted", "channels_last", "size_one_dimensions"} <= dense
    assert {"columns", "expanded_rows", "overlapping", "diagonal", "every_second"}.isdisjoint(dense)


def test_a_large_strided_tensor_on_threads(torch_threads: None) -> None:
    base = tensor_of(pattern("exponent:-8", "float32", 1300 * 1024, 2), "float32").view(1300, 1024)
    for view in (base[:, 1:], base[::2].t(), base[:, ::2], base[0].expand(700, 1024)):
        wanted = record(view, order="logical")
        for threads in swept((1, 2, 5), 1):
            torch.set_num_threads(threads)
            for isa in every_isa():
                assert_same(kernel(view, order="logical"), wanted, (isa, threads, view.stride()))


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_lazy_conjugate_and_negation_are_applied(dtype: str) -> None:
    x = tensor_of(pattern("exponent:-8", dtype, 9000, 3), dtype)
    conjugate, imaginary = x.conj(), x.conj().imag
    assert conjugate.is_conj() and imaginary.is_neg()
    assert_same(kernel(conjugate), record(conjugate.resolve_conj()))
    assert kernel(conjugate)[:VALUE_BYTES] != kernel(x)[:VALUE_BYTES]
    assert_same(kernel(imaginary), record(imaginary))
    assert kernel(imaginary)[:VALUE_BYTES] != kernel(x.imag)[:VALUE_BYTES]


def test_bool_bytes_other_than_one() -> None:
    x = torch.frombuffer(bytearray(bytes(range(256)) * 20), dtype=torch.bool)
    for isa in every_isa():
        assert_same(kernel(x), record(x), isa)
    got = fields(kernel(x))
    assert (got["zero_count"], got["sum"], got["min"], got["max"]) == (20, 5100.0, 0, 1)


@pytest.mark.parametrize("dtype", FLOAT_NAMES)
def test_nonfinite_elements_do_not_poison_the_others(dtype: str) -> None:
    component = torch_dtype({"complex64": "float32", "complex128": "float64"}.get(dtype, dtype))
    clean = torch.linspace(-4, 4, 8192, dtype=torch.float32).to(component)
    dirty = clean.clone()
    at = torch.arange(0, 8192, 91)
    bad = (
        [float("nan"), float("inf"), float("-inf")]
        if dtype != "float8_e4m3fn"
        else [float("nan")] * 3
    )
    dirty[at] = torch.tensor(bad, dtype=torch.float32).repeat(31)[: at.numel()].to(component)
    clean[at] = torch.zeros((), dtype=component)
    if DTYPES[dtype].components == 2:
        clean, dirty = (t.view(torch_dtype(dtype)) for t in (clean, dirty))
    for isa in every_isa():
        got, want = fields(kernel(dirty)), fields(kernel(clean))
        assert_same(kernel(dirty), record(dirty), isa)
        for name in ("sum", "abs_sum", "sum_sq"):
            assert got[name] == want[name]
        assert got["nan_count"] + got["posinf_count"] + got["neginf_count"] == at.numel()
        assert got["flags"] & 1 and not want["flags"] & 1


@cpu_only  # elsewhere the fake device would fill and copy every byte of it: test_values.py
def test_more_than_2_31_elements() -> None:
    count = (1 << 31) + 4096 + 5
    x = torch.zeros(count, dtype=torch.int8)  # untouched pages: almost no memory is taken
    x[-1], x[-4096], x[3] = 7, -128, 127
    got = fields(kernel(x))
    assert got["numel"] == count
    assert got["zero_count"] == count - 3
    assert (got["min"], got["max"], got["negative_count"], got["saturated_count"]) == (
        -128,
        127,
        1,
        2,
    )
    assert (got["sum"], got["abs_sum"], got["sum_sq"]) == (6.0, 262.0, 49.0 + 128**2 + 127**2)
    # every byte past 2^31 is reached by the checksum
    x[-1] = 8
    assert fields(kernel(x))["checksum"] != got["checksum"]


@cpu_only
@pytest.mark.parametrize("isa", ISAS)
def test_the_environment_variable_chooses(isa: str) -> None:
    code = (
        "from support.helpers import *\n"
        "from fastcheck import _kernels\n"
        "assert _kernels.cpu_isa() == %r, _kernels.cpu_isa()\n"
        "for dtype in ('float32', 'bfloat16', 'int16', 'float64'):\n"
        "    x = tensor_of(pattern('random', dtype, 9000, 1), dtype)\n"
        "    assert_same(kernel(x), expected('random', dtype, 9000, 1), dtype)\n"
        "print('same')\n"
    )
    done = run_code(code % isa, env={"FASTCHECK_CPU_ISA": isa})
    assert (done.returncode, done.stdout) == (0, "same\n"), done.stderr


@cpu_only
def test_a_bad_environment_variable_is_an_error() -> None:
    done = run_code(
        "import torch, fastcheck; fastcheck.stats(torch.ones(3)).sum",
        env={"FASTCHECK_CPU_ISA": "avx1024"},
    )
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "avx1024" in done.stderr and "FASTCHECK_CPU_ISA" in done.stderr, last
    assert "scalar" in done.stderr  # what would have been accepted


@cpu_only
def test_a_bad_instruction_set_name_is_an_error() -> None:
    before = _kernels.cpu_isa()
    with pytest.raises(Exception, match="avx1024"):
        _kernels.set_cpu_isa("avx1024")
    assert _kernels.cpu_isa() == before


def test_dtype_table_covers_the_parameters() -> None:
    assert {str(getattr(torch, name)) for name in ALL} == {f"torch.{name}" for name in ALL}
    for name in ALL:
        assert dtype_of(torch.empty(0, dtype=torch_dtype(name))).name == name
