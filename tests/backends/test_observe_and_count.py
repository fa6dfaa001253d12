"""Record and exponents of a tensor in one pass: both as if each had been made alone."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from fastcheck import _kernels, backends
from fastcheck.backends import table
from fastcheck.backends.backend import arguments_of
from fastcheck.backends.cpu import cpu_backend
from fastcheck.backends.table import backend_for
from support.helpers import ISAS, even, every_isa, tensor_of
from support.records.reference import FLOAT_NAMES, RECORD_BYTES, pattern
from support.records.torch_dtypes import torch_dtype
from support.records.views import LAYOUTS

NATIVE = cpu_backend(_kernels)
TILE = 4096
SIZES = (0, 1, 17, 100, TILE, TILE + 1, 7 * TILE + 333)


def alone(x: torch.Tensor) -> tuple[bytes, list[int]]:
    slots = torch.zeros((1, RECORD_BYTES), dtype=torch.uint8)
    NATIVE.observe(x, slots, 0, 3)
    assert NATIVE.exponents is not None
    return slots.numpy().tobytes(), NATIVE.exponents(x, False).tolist()


def together(x: torch.Tensor, backend: backends.Backend = NATIVE) -> tuple[bytes, list[int]]:
    slots = torch.zeros((3, RECORD_BYTES), dtype=torch.uint8)
    assert backend.observe_and_count is not None
    words = backend.observe_and_count(x, slots, 1)
    assert not slots[0].any() and not slots[2].any()
    return slots[1].numpy().tobytes(), words.tolist()


@pytest.mark.parametrize("name", FLOAT_NAMES)
def test_sizes_and_kernels(name: str) -> None:
    kinds = itertools.cycle(("random", "exponent:-3", "exponent:60"))
    for count in SIZES:
        x = tensor_of(pattern(next(kinds), name, even(count, name), count), name)
        for isa in every_isa(ISAS):
            assert together(x) == alone(x), (count, isa)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_layouts(layout: str) -> None:
    for name in ("float32", "bfloat16", "complex64"):
        x = LAYOUTS[layout](torch.randn(20_000, dtype=torch.float64).to(torch_dtype(name)))
        assert together(x) == alone(x), name


def test_threads_give_the_same() -> None:
    x = torch.randn(3_000_001)
    expected = alone(x)
    given, _ = arguments_of([x])
    for threads in (1, 2, 5, 64):
        record = torch.zeros(RECORD_BYTES, dtype=torch.uint8)
        words = torch.full((len(expected[1]),), -1)
        _kernels.records_and_exponents(
            given, 3, False, threads, record.data_ptr(), words.data_ptr()
        )
        assert (record.numpy().tobytes(), words.tolist()) == expected, threads


def test_a_backend_without_it_reads_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    without = dataclasses.replace(backend_for(torch.device("cpu")), observe_and_count=None)
    monkeypatch.setattr(table, "backend_for", lambda device: without)
    x = torch.randn(5000)
    slots = torch.zeros((1, RECORD_BYTES), dtype=torch.uint8)
    words = table.observe_and_count(x, slots, 0)
    assert (slots.numpy().tobytes(), words.tolist()) == alone(x)
