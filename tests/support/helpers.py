"""Helpers of several test files: tensors of given bytes, their records, a diff of two records.

With ``FASTCHECK_TEST_DEVICE=fake`` the tensors of the tests that use these go to the fake
accelerator first, and are read there by the portable backend: everything has to be exact there too
but the three sums. With ``FASTCHECK_TEST_KERNELS=cuda`` besides, the CUDA backend reads them
(tests/fakes/cuda_on_fake), and everything has to be exact. ``FASTCHECK_TEST_DEVICE=cuda`` is a GPU.
"""

from __future__ import annotations

import functools
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Sequence

import pytest
import torch

import fastcheck
from fastcheck import _C, _kernels
from fastcheck.backends.table import backend_for
from fastcheck.cli.main import main
from support.records.reference import (
    DEPTHS,
    DTYPES,
    LAYOUT,
    fields,
    pattern,
    record_of_bytes,
)
from support.records.torch_dtypes import torch_dtype
from support.sampling import Case, sample

#: Where tensors are read: "cpu", or the type of another device.
DEVICE = os.environ.get("FASTCHECK_TEST_DEVICE", "cpu")
ON_CPU = DEVICE == "cpu"
if DEVICE not in ("cpu", "cuda"):
    from fakes import fake_device

    if fake_device.load().name() != DEVICE:
        raise ValueError(
            f"FASTCHECK_TEST_DEVICE={DEVICE!r}: expected 'fake', FAKE_DEVICE_NAME's, or 'cuda'"
        )
BACKEND = backend_for(torch.device(DEVICE))

cpu_only = pytest.mark.skipif(not ON_CPU, reason="about the compiled extension, which is the CPU's")
canonical_sums = pytest.mark.skipif(
    BACKEND.determinism != "bitwise", reason="about the order of sums, which is the kernels'"
)

SUMS = ("sum", "abs_sum", "sum_sq")
# Around the ends of a row, of a run, of a tile and of several tiles; 9 tiles make an uneven tree.
SIZES = (0, 1, 2, 63, 64, 65, 1023, 1024, 1025, 4095, 4096, 4097, 3 * 4096 + 1000, 9 * 4096 + 17)
ISAS = (
    tuple(name for name, supported, _ in _kernels.cpu_isas() if supported) if ON_CPU else (DEVICE,)
)


def swept(cases: Iterable[Case], count: int) -> list[Case]:
    """All of the cases, or a sample where a stand-in for a device reads them, which takes long."""
    return list(cases) if DEVICE in ("cpu", "cuda") else sample(cases, count)


def tensor_of(raw: bytes, dtype: str, offset: int = 0) -> torch.Tensor:
    """A 1-d tensor of these bytes that starts ``offset`` bytes after a 64-byte boundary."""
    if not raw:
        return torch.empty(0, dtype=torch_dtype(dtype))
    block = torch.empty(len(raw) + offset + 64, dtype=torch.uint8)
    start = -block.data_ptr() % 64 + offset
    block[start : start + len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    return torch.frombuffer(
        block.numpy().data,
        dtype=torch_dtype(dtype),
        offset=start,
        count=len(raw) // torch_dtype(dtype).itemsize,
    )


def put(x: torch.Tensor, device: str = DEVICE) -> torch.Tensor:
    """The tensor where tests read tensors, with its strides, offset and lazy flags."""
    if x.device.type == device:
        return x
    storage = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).to(device)
    whole = storage[: storage.numel() // x.element_size() * x.element_size()].view(x.dtype)
    there = whole.as_strided(x.shape, x.stride(), x.storage_offset())
    there = there.conj() if x.is_conj() else there
    return torch._neg_view(there) if x.is_neg() else there


def kernel(x: torch.Tensor, depth: str = "full", order: str = "storage") -> bytes:
    """The Record that the extension makes, or that the other device does. Of the CPU the checksum
    has to be the one that is computed alone.
    """
    if ON_CPU:
        made = _C.record(x, DEPTHS[depth], order == "logical").numpy().tobytes()
        if depth == "full":
            assert int.from_bytes(made[104:112], "little") == fastcheck.checksum(x, order=order)
        return made
    return fastcheck.stats(put(x), record=depth, order=order).record.tobytes()


@functools.lru_cache(maxsize=256)
def expected(kind: str, dtype: str, count: int, seed: int = 0, depth: str = "full") -> bytes:
    """The reference's Record of a 1-d tensor given by formula, computed once."""
    return record_of_bytes(pattern(kind, dtype, count, seed), dtype, depth=depth)


def kinds(dtype: str) -> tuple[str, ...]:
    """Formulas (tests/support/records/vectors.py) that reach every branch of this dtype."""
    row = DTYPES[dtype]
    if row.kind != "float":
        return ("random",)
    if row.itemsize == 1:
        return ("random", f"exponent:{-7 if dtype == 'float8_e4m3fn' else -9}")
    if row.itemsize == 2 and row.exponent_bits == 5:
        return ("random", "exponent:-8")
    return ("random", "exponent:-8", "exponent:-60", "exponent:55")


def even(count: int, dtype: str) -> int:
    """``count`` components, or one more where elements are pairs."""
    return count + count % DTYPES[dtype].components


def is_close(name: str, got: float, want: dict[str, float]) -> bool:
    """Whether a sum is as near to the reference's as a backend of determinism "sums" guarantees."""
    if name == "sum_sq":
        return got == want[name] or abs(got - want[name]) <= 1e-6 * want[name]
    # Where sums overflow, the canonical order may make a NaN of what another one adds up.
    return (
        got == want[name]
        or (math.isinf(want["abs_sum"]) and not math.isnan(got))
        or (abs(got - want[name]) <= 1e-6 * want["abs_sum"])
    )


def assert_same(
    actual: bytes, wanted: bytes, note: object = "", determinism: str = BACKEND.determinism
) -> None:
    """Fails with the fields that differ, and their bytes (a NaN or a -0.0 shows only there)."""
    if actual == wanted:
        return
    got, want = fields(actual), fields(wanted)
    differing = []
    for name, (start, code) in LAYOUT.items():
        end = start + struct.calcsize(code)
        if actual[start:end] == wanted[start:end]:
            continue
        if determinism == "sums" and name in SUMS and is_close(name, got[name], want):
            continue
        if name == "device_mode" and got[name] == BACKEND.device_mode:
            continue  # the reference's is that of the CPU
        differing.append(
            f"{name}: got {got[name]!r} ({actual[start:end].hex()}),"
            f" expected {want[name]!r} ({wanted[start:end].hex()})"
        )
    if differing:
        raise AssertionError(f"{note}\n" + "\n".join(differing))
    reserved = LAYOUT["device_mode"][0] + 1
    assert actual[reserved:] == wanted[reserved:], f"{note}\nreserved bytes differ"


def every_isa(names: Sequence[str] = ISAS) -> Iterator[str]:
    """Switches to each instruction set in turn, and back at the end; another device has one."""
    if not ON_CPU:
        yield from names
        return
    before = _kernels.cpu_isa()
    try:
        for name in names:
            _kernels.set_cpu_isa(name)
            assert _kernels.cpu_isa() == name
            yield name
    finally:
        _kernels.set_cpu_isa(before)


def doctors_row(name: str, capsys: pytest.CaptureFixture[str]) -> tuple[bool, str]:
    """Whether ``fastcheck doctor`` finds this backend usable, and why."""
    assert main(["doctor", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["backends"]
    (row,) = (row for row in rows if row["name"] == name)
    return row["usable"], row["reason"]
