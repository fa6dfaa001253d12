"""The CUDA backend of torch tensors, on the fake accelerator with the real kernels
(tests/fakes/cuda_on_fake): its records equal the CPU's byte for byte, and its errors.

These tests cover the code between torch and the kernels: arguments, slots and lists
(test_binding_launches.py covers launches, streams and buffers). test_kernels.py compares the
kernels' own bits with the CPU's.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from backends.cuda.test_kernels import LAYOUTS
from fakes import cuda_on_fake, fake_device
from fakes.cuda_on_fake.checks import slots_for
from fastcheck.backends import table as backends
from support.devices.on_device import assert_all_same, many, of_cpu, random, rows
from support.helpers import SIZES, even, kinds, put, tensor_of
from support.records.reference import DEPTHS, DTYPES, RECORD_BYTES, pattern

fake: Any = fake_device.load()
NAME = fake.name()
CUDA = cuda_on_fake.entry()
ALL = sorted(DTYPES)

pytestmark = [pytest.mark.fake_hooks, pytest.mark.usefixtures("cuda_on_fake_device")]


# --- records -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ALL)
def test_dtypes_and_sizes(dtype: str) -> None:
    """One by one into slots of a ring, in no order, and all of them in one list."""
    hosts = [
        tensor_of(pattern(kind, dtype, even(size, dtype), size), dtype)
        for kind, size in itertools.product(kinds(dtype), SIZES)
    ]
    there = [put(x, NAME) for x in hosts]
    for depth, level in DEPTHS.items():
        wanted = of_cpu(hosts, depth)
        slots = slots_for(len(hosts) + 2)
        for i in reversed(range(len(hosts))):
            CUDA.observe(there[i], slots, i + 1, level)
        assert_all_same(slots[1:-1], wanted, depth)
        assert set(rows(slots[:: len(hosts) + 1])) == {b"\xa5" * RECORD_BYTES}
        slots = slots_for(len(hosts) + 2)
        CUDA.observe_list(there, slots, 2, level)
        assert_all_same(slots[2:], wanted, depth)


@pytest.mark.parametrize("dtype", ALL)
def test_layouts(dtype: str) -> None:
    x = random(dtype, 12000, 8)
    hosts = [layout(x) for layout in LAYOUTS.values()]
    there = [put(x, NAME) for x in hosts]
    for order in ("storage", "logical"):
        slots = slots_for(len(hosts))
        CUDA.observe_list(there, slots, 0, 3, logical=order == "logical")
        assert_all_same(slots, of_cpu(hosts, order=order), order)


@pytest.mark.parametrize("dtype", ALL)
def test_alignments(dtype: str) -> None:
    block = random(dtype, 4096 + 333, 21)
    hosts = [block[i : i + 4200] for i in range(18)]
    slots = slots_for(len(hosts))
    CUDA.observe_list([put(x, NAME) for x in hosts], slots, 0, 3)
    assert_all_same(slots, of_cpu(hosts))


def test_lazy_views() -> None:
    x = random("complex64", 900, 3).view(30, 30)
    hosts = [x.conj(), x.t().conj(), x.imag._neg_view(), x.conj().imag, x[::2].conj()]
    slots = slots_for(len(hosts))
    CUDA.observe_list([put(host, NAME) for host in hosts], slots, 0, 3)
    assert_all_same(slots, of_cpu(hosts))


def test_subclasses_and_gradients() -> None:
    x = random("float32", 5000).nan_to_num(0, 0, 0)
    there = put(x, NAME)
    slots = slots_for(2)
    CUDA.observe(nn.Parameter(there), slots, 0, 3)
    CUDA.observe((nn.Parameter(there) * 1).view(50, 100).t(), slots, 1, 3)
    assert_all_same(slots, of_cpu([x, x]))


@pytest.mark.parametrize("count", [0, 1, 32, 33, 150])
def test_lists(count: int) -> None:
    hosts = many(count)
    mixed = [x for i, x in enumerate(hosts) for x in (x, random("float32", i), x[::3])]
    for xs in (hosts, mixed):
        slots = slots_for(len(xs))
        CUDA.observe_list([put(x, NAME) for x in xs], slots, 0, 3)
        assert_all_same(slots, of_cpu(xs))


@pytest.mark.parametrize("dtype", ALL)
def test_found_nonfinite(dtype: str) -> None:
    clean = [torch.ones(n, dtype=getattr(torch, dtype)) for n in (3, 5000, 0)]
    found = CUDA.found_nonfinite([put(x, NAME) for x in clean])
    assert (found.shape, found.dtype, found.device.type) == ((), torch.float32, NAME)
    assert found.item() == 0.0
    if DTYPES[dtype].kind == "float":
        clean[1][4321] = float("nan")
        assert CUDA.found_nonfinite([put(x, NAME) for x in clean]).item() == 1.0
        assert CUDA.found_nonfinite([put(clean[1][::5], NAME)]).item() == 0.0
        assert CUDA.found_nonfinite([put(clean[1][::4], NAME)]).item() == 0.0
        assert CUDA.found_nonfinite([put(clean[1][1::3], NAME)]).item() == 1.0


def test_found_nonfinite_of_many() -> None:
    hosts = many(100)
    finite = [x.nan_to_num(0.0, 0.0, 0.0) for x in hosts]
    assert CUDA.found_nonfinite([put(x, NAME) for x in finite]).item() == 0.0
    assert CUDA.found_nonfinite([put(x, NAME) for x in [*finite, hosts[-1]]]).item() == 1.0
    assert CUDA.found_nonfinite([]).item() == 0.0


# --- the public functions ------------------------------------------------------------------------


def test_stats_is_the_cpus_record() -> None:
    x = random("float16", 7000)
    for y in (x, x[:6400].view(80, 80).t(), x[::3]):
        for depth, order in itertools.product(DEPTHS, ("storage", "logical")):
            there = fastcheck.stats(put(y, NAME), record=depth, order=order)
            here = fastcheck.stats(y, record=depth, order=order)
            assert there.record.tobytes() == here.record.tobytes()
    assert fastcheck.checksum(put(x, NAME)) == fastcheck.checksum(x)
    assert fastcheck.found_nonfinite([put(x, NAME)]).item() == 1.0


def test_the_entry() -> None:
    assert backends.backend_for(torch.device(NAME, 1)) is CUDA
    assert (CUDA.name, CUDA.determinism) == ("cuda", "bitwise")
    assert CUDA.device_mode == fastcheck.types.DeviceMode.IEEE


# --- errors --------------------------------------------------------------------------------------


def test_errors() -> None:
    x, slots = put(torch.ones(3), NAME), slots_for(2)
    there: Any = CUDA.observe
    with pytest.raises(TypeError, match=rf"expected a {NAME.upper()} tensor, got one on cpu"):
        there(torch.ones(3), slots, 0, 3)
    with pytest.raises(TypeError, match=r"expected a torch.Tensor, got list"):
        there([1.0], slots, 0, 3)
    with pytest.raises(TypeError, match=r"item 1: expected a strided tensor"):
        CUDA.observe_list([x, torch.ones(3).to_sparse()], slots, 0, 3)
    with pytest.raises(ValueError, match=r"expected slots in a contiguous uint8 tensor"):
        there(x, torch.zeros(1, 192, dtype=torch.uint8), 0, 3)
    with pytest.raises(ValueError, match=r"depth 1 \(health\)"):
        there(x, slots, 0, 4)
    with pytest.raises(IndexError, match=r"within a ring of 2, got \[1, 3\)"):
        CUDA.observe_list([x, x], slots, 1, 3)
    with pytest.raises(ValueError, match=rf"all tensors on {NAME}:0, got one on {NAME}:1"):
        CUDA.observe_list([x, x.to(f"{NAME}:1")], slots, 0, 3)
    shrunk = put(torch.ones(100), NAME)
    shrunk.untyped_storage().resize_(0)
    with pytest.raises(TypeError, match=r"storage holds all its elements"):
        there(shrunk, slots, 0, 3)
    assert set(rows(slots)) == {b"\xa5" * RECORD_BYTES}
