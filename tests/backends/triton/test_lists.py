"""The Triton kernels that read lists, in Triton's interpreter, against the CPU extension's records:
every dtype that they read, sizes around every boundary, and what a list has no place for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1: make test-triton", allow_module_level=True)

from fastcheck import _C
from fastcheck.backends.portable.traversal import traverse
from fastcheck.backends.triton import backend as triton
from fastcheck.backends.triton import launch
from fastcheck.backends.triton import lists as triton_lists
from support.helpers import assert_same, kinds, tensor_of
from support.records.reference import DEPTHS, DTYPES, VALUE_BYTES, pattern
from support.records.torch_dtypes import torch_dtype
from support.sampling import IS_WHOLE, sample

pytestmark = pytest.mark.triton

READ = [name for name in sorted(DTYPES) if launch.reads(torch_dtype(name))]
FILLED = 0xEE
#: A program reads up to four steps.
TARGET = launch.Target(programs=6, lanes=256, block=4)
SIZES = (1, 3, 65, 4096, 2 * 4096 + 1003)
#: More programs than the fold reads at once: seconds in the interpreter, in whole runs alone.
MANY = 18 * 4096 + 1003


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for table in ("_given_up", "_lists_given_up"):
        monkeypatch.setattr(triton, table, {})
    monkeypatch.setattr(launch, "target_of", lambda device: TARGET)
    yield


def check(
    xs: Sequence[torch.Tensor], depth: str = "full", logical: bool = False, first: int = 1
) -> None:
    slots = torch.full((len(xs) + first + 1, 192), FILLED, dtype=torch.uint8)
    triton.triton_backend("cpu").observe_list(xs, slots, first, DEPTHS[depth], logical=logical)
    for place, x in enumerate(xs):
        wanted = _C.record(x, DEPTHS[depth], logical).numpy().tobytes()
        got = slots[first + place].numpy().tobytes()
        note = place, x.dtype, x.shape
        assert_same(got[:VALUE_BYTES] + wanted[VALUE_BYTES:], wanted, note, determinism="sums")
        assert set(got[VALUE_BYTES:]) == {FILLED}
    assert (slots[[*range(first), -1]] == FILLED).all()
    assert triton.remarks() == []


def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What goes to the kernels from now on: the places of a list, or one tensor's dtype."""
    made: list[Any] = []
    lists, one = triton_lists.launch_records, launch.launch_record

    def several(xs: Any, places: Any, *rest: Any) -> None:
        made.append(tuple(places))
        lists(xs, places, *rest)

    def single(tensor: torch.Tensor, *rest: Any, **more: Any) -> None:
        made.append(tensor.dtype)
        one(tensor, *rest, **more)

    monkeypatch.setattr(triton_lists, "launch_records", several)
    monkeypatch.setattr(launch, "launch_record", single)
    return made


@pytest.mark.parametrize("dtype", sample(READ, 1))
def test_sizes(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = (*SIZES, MANY) if IS_WHOLE and dtype in ("bfloat16", "float32", "int64") else SIZES
    xs = [tensor_of(pattern(kinds(dtype)[0], dtype, n, n), dtype) for n in sizes]
    xs.append(tensor_of(pattern(kinds(dtype)[-1], dtype, 4097, 0), dtype))
    made = launches(monkeypatch)
    check(xs)
    assert made == [tuple(range(len(xs)))]


@pytest.mark.parametrize("depth", ["health", "stats"])
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_depths(dtype: str, depth: str) -> None:
    check([tensor_of(pattern(kinds(dtype)[0], dtype, n, n), dtype) for n in (3, 4097)], depth)


def test_what_a_list_has_no_place_for_is_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(8, 70)
    xs = [
        x,
        x[:, 1:],  # strided
        x.bfloat16().view(-1)[1:],  # not where a word begins
        torch.empty(0),
        x.double(),  # the portable backend's
        torch.arange(70),  # the only one of its dtype
        x.t(),
        x[:5],
    ]
    made = launches(monkeypatch)
    check(xs)
    assert made == [(0, 6, 7), torch.float32, torch.bfloat16, torch.float32, torch.int64]
    made.clear()
    check(xs, logical=True)
    assert made[0] == (0, 7)  # transposed memory is not in row-major order


def test_one_list_after_another() -> None:
    """A plan is kept for the sizes; addresses, values and slots are those of each call."""
    triton_lists._plan.cache_clear()
    for first in (0, 3):
        check([torch.randn(300), torch.randn(500)], first=first)
    assert triton_lists._plan.cache_info()[:2] == (1, 1)
    check([torch.randn(500), torch.randn(300)])
    assert triton_lists._plan.cache_info().misses == 2


def test_a_target_that_follows_no_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    target = launch.Target(programs=3, lanes=256, takes_lists=False)
    monkeypatch.setattr(launch, "target_of", lambda device: target)
    made = launches(monkeypatch)
    check([torch.randn(30), torch.randn(50)])
    assert made == [torch.float32] * 2


def test_lists_that_a_compiler_refuses_are_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("no int_to_ptr\nand a page of the compiler's")

    monkeypatch.setattr(triton_lists, "launch_records", refuse)
    xs = [torch.randn(30), torch.randn(50)]
    slots = torch.zeros(2, 192, dtype=torch.uint8)
    for _ in range(2):
        triton._observe_list(xs, slots, 0, 3)
    for x, slot in zip(xs, slots):
        wanted = _C.record(x, 3, False).numpy().tobytes()
        actual = slot.numpy().tobytes()[:VALUE_BYTES] + wanted[VALUE_BYTES:]
        assert_same(actual, wanted, determinism="sums")
    assert triton.remarks() == [
        "cpu tensors are read one by one by the Triton kernels: lists failed there "
        "(RuntimeError: no int_to_ptr)"
    ]


def test_memory_that_runs_out_says_nothing_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")

    monkeypatch.setattr(triton_lists, "launch_records", fail)
    with pytest.raises(torch.OutOfMemoryError):
        check([torch.randn(30), torch.randn(50)])
    assert triton.remarks() == []


def test_what_a_list_takes() -> None:
    x = torch.zeros(64, dtype=torch.float16)
    assert triton_lists.takes(traverse(x)) and triton_lists.takes(traverse(x[2:]))
    assert not triton_lists.takes(traverse(x[:0]))
    assert not triton_lists.takes(traverse(x[1:]))
    assert not triton_lists.takes(traverse(x[::2]))
    huge = torch.empty(1, dtype=torch.int8).expand(1 << 31)
    assert not triton_lists.takes(traverse(huge))
