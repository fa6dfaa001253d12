"""The thread's floating-point modes do not change a Record, and reading does not change a mode."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator

import pytest
import torch

from fastcheck.statistics.functions import crc32
from support.helpers import ON_CPU, assert_same, every_isa, kernel, tensor_of
from support.processes import run_code
from support.records.reference import DTYPES, FLOAT_NAMES, fields, pattern, record

TINY = 1e-41  # a float32 subnormal

host_modes = pytest.mark.skipif(
    not ON_CPU, reason="about floating-point modes of the host's threads, which no device has"
)


def flushes() -> bool:
    """Whether arithmetic on this thread turns subnormals into zero."""
    return float(torch.tensor(TINY) * torch.tensor(1.0)) == 0.0


@pytest.fixture
def ieee_restored() -> Iterator[None]:
    if not torch.set_flush_denormal(False):
        pytest.skip("this CPU has no flush mode")
    yield
    torch.set_flush_denormal(False)


def inputs(dtype: str) -> dict[str, torch.Tensor]:
    row = DTYPES[dtype]
    codes = {"random": tensor_of(pattern("random", dtype, 9000, 3), dtype)}
    if row.kind == "float":
        # subnormals only; beside large ones; sums that are subnormal before they are scaled back
        width = 8 * row.itemsize
        low = torch.arange(9000, dtype=torch.int64) % (1 << min(row.mantissa_bits, 12))
        raw = low.numpy().astype(f"<u{row.itemsize}").tobytes()
        codes["subnormal"] = tensor_of(raw, dtype)
        negative = (low.numpy().astype("<u8") | 1 << (width - 1)).astype(f"<u{row.itemsize}")
        codes["negative subnormal"] = tensor_of(negative.tobytes(), dtype)
        mixed = tensor_of(raw, dtype)
        mixed[::1000] = torch.tensor(1.0).to(mixed.dtype)
        codes["beside one"] = mixed
        if row.exponent_bits == 8:
            huge = tensor_of(pattern("exponent:-60", dtype, 9000, 3), dtype)
            huge[::4000] = 2.0**100  # scaled by 2^-96: most elements become subnormal
            codes["scaled into subnormals"] = huge
            squares = tensor_of(pattern("exponent:-70", dtype, 9000, 3), dtype)
            squares[::64] = 2.0**-39  # not scaled: most squares are subnormal
            squares[1::64] = 0
            codes["squares are subnormal"] = squares
        if dtype == "float64":
            codes["squares are subnormal"] = tensor_of(
                pattern("exponent:-530", dtype, 9000, 3), dtype
            )
    return codes


@host_modes
@pytest.mark.parametrize("dtype", [*FLOAT_NAMES, "int32", "uint64"])
def test_flushing_changes_no_record(dtype: str, ieee_restored: None) -> None:
    cases = inputs(dtype)
    wanted = {name: record(x) for name, x in cases.items()}
    strided = {name: record(x[::2]) for name, x in cases.items()}
    for isa in every_isa():
        for name, x in cases.items():
            torch.set_flush_denormal(False)
            assert_same(kernel(x), wanted[name], (isa, name, "ieee"))
            assert not flushes()
            torch.set_flush_denormal(True)
            assert flushes()
            actual, every_second = kernel(x), kernel(x[::2])
            assert flushes()  # the caller's mode is back
            torch.set_flush_denormal(False)
            assert_same(actual, wanted[name], (isa, name, "flushing"))
            assert_same(every_second, strided[name], (isa, name, "flushing, strided"))


def test_the_inputs_would_show_it() -> None:
    """Guards the test above: with subnormals flushed these values do change."""
    x = inputs("float32")["subnormal"]
    got = fields(kernel(x))
    assert got["subnormal_count"] > 8000 and got["sum"] > 0 and got["sum_sq"] > 0
    squares = fields(kernel(inputs("float32")["squares are subnormal"]))
    assert squares["sum_sq"] > 0


@host_modes
def test_flushing_on_pool_threads() -> None:
    """Pool threads inherit the mode of the thread that starts them: set it before there are any."""
    code = """
import torch
torch.set_num_threads(3)
assert torch.set_flush_denormal(True)
from support.helpers import *
x = tensor_of(pattern("counter", "float32", 1 << 20, 1), "float32")
y = torch.ones(1 << 20) * 2.0  # the pool runs
assert float((x[1000:1001] * torch.ones(1))) == 0.0
records = [(name, kernel(x), kernel(x[::2]), kernel(x, "stats")) for name in every_isa()]
for _ in range(3):
    pooled = (x * 1.0).count_nonzero().item()
assert pooled == 0, pooled  # every thread of the pool still flushes
torch.set_flush_denormal(False)
for name, dense, strided, stats in records:
    assert_same(dense, expected("counter", "float32", 1 << 20, 1), name)
    assert_same(stats, expected("counter", "float32", 1 << 20, 1, "stats"), name)
    assert_same(strided, record(x[::2]), name)
print("same")
"""
    code = code.replace(
        "from support.helpers import *",
        "from support.helpers import *\nfrom support.records.reference import record",
    )
    done = run_code(code)
    assert (done.returncode, done.stdout) == (0, "same\n"), done.stderr


@host_modes
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the codes are x86's")
@pytest.mark.parametrize("mode", [0x400, 0x800, 0xC00], ids=["down", "up", "to zero"])
def test_rounding_modes(mode: int) -> None:
    """fenv.h's modes, as a library that does interval arithmetic may leave them."""
    libm = ctypes.CDLL(None)
    x = tensor_of(pattern("exponent:-8", "float32", 9000, 3), "float32")
    y = tensor_of(pattern("random", "int64", 9000, 3), "int64")
    wanted = [kernel(x), kernel(y), record(x), record(y)]
    assert wanted[:2] == wanted[2:]
    for isa in every_isa():
        assert libm.fesetround(mode) == 0
        try:
            actual = [kernel(x), kernel(y)]
            assert libm.fegetround() == mode
        finally:
            libm.fesetround(0)
        assert actual == wanted[:2], isa


@host_modes
def test_public_functions_under_flushing(ieee_restored: None) -> None:
    import fastcheck

    x = torch.full((5000,), TINY)
    plain = (fastcheck.stats(x).record.tobytes(), fastcheck.checksum(x), crc32(x))
    torch.set_flush_denormal(True)
    flushed = (fastcheck.stats(x).record.tobytes(), fastcheck.checksum(x), crc32(x))
    torch.set_flush_denormal(False)
    assert plain == flushed
