"""The portable backend on plain CPU tensors: whole records, which tensors it reads, and in which
chunks.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch

import fastcheck
from fastcheck.backends.complete_records import record as whole_record
from fastcheck.backends.portable import checksum as sum64
from fastcheck.backends.portable import many
from fastcheck.backends.portable import one as portable_one
from fastcheck.backends.portable.backend import any_nonfinite
from fastcheck.backends.portable.constants import constant
from fastcheck.backends.portable.formats import FORMATS
from fastcheck.backends.portable.traversal import dtype_and_order
from fastcheck.utils.torch.readable import unreadable_reason
from support.helpers import assert_same
from support.records.portable import ALL, SMALL, check, observed, observed_list
from support.records.reference import DEPTHS, LAYOUT, VALUE_BYTES, dtype_of, record
from support.records.torch_dtypes import torch_dtype
from support.records.unreadable import UNREADABLE, quiet

CPU = torch.device("cpu")


def test_whole_records() -> None:
    for x in (torch.tensor([1.0, math.nan]), torch.ones(60, 70).t()[::2], torch.arange(5)):
        for depth in DEPTHS:
            for logical in (False, True):
                row = whole_record(x, DEPTHS[depth], logical)
                wanted = record(x, depth=depth, order="logical" if logical else "storage")
                assert_same(row.numpy().tobytes(), wanted, determinism="sums")


def test_nothing_of_the_tensor_changes() -> None:
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *arguments: Any, **options: Any) -> Any:
            raise AssertionError("an operation went through the subclass")

    x = torch.randn(5000, requires_grad=True)
    y = x * 2
    before, rng = y.detach().clone(), torch.get_rng_state()
    for depth in DEPTHS:
        check(observed(y, depth), record(before, depth=depth))
        check(observed_list([y, x], depth)[0], record(before, depth=depth))
    assert float(any_nonfinite([y, x])) == 0.0
    assert y._version == 0 and torch.equal(y, before)
    assert torch.equal(rng, torch.get_rng_state())
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, torch.full((5000,), 2.0))
    loud = before.as_subclass(Loud)
    check(observed(loud), record(before))
    with torch.inference_mode():
        check(observed(before * 1), record(before))
    check(observed(before), record(before))


@pytest.mark.parametrize("case", sorted(UNREADABLE))
def test_why_a_tensor_is_not_read(case: str) -> None:
    """The errors of Python and of the extension are the same up to the semicolon."""
    make, _ = UNREADABLE[case]
    x = quiet(make)
    reason = unreadable_reason(x)
    assert reason is not None
    with pytest.raises(fastcheck.UnsupportedTensorError) as error:
        fastcheck.stats(x)
    said = str(error.value).split(";")[0]
    if case not in ("sparse", "sparse_csr", "jagged", "mkldnn"):  # layouts are spelt otherwise
        assert reason.split(";")[0].lower() == said.lower()
    assert reason.startswith("expected") and "got" in reason and ";" in reason


def test_readable_tensors_have_no_reason() -> None:
    for dtype in ALL:
        x = torch.zeros(6, dtype=torch_dtype(dtype))
        for y in (x, x.view(2, 3).t(), x[:0], x[2], x[:1].expand(9), torch.nn.Parameter(x, False)):
            assert unreadable_reason(y) is None
            assert dtype_of(y).code == dtype_and_order(y)[0]


def test_the_bound_decides_how_much_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above cross the ends of chunks only if a small bound makes small chunks."""
    seen: list[int] = []
    count = portable_one.values.count

    def spy(chunk: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        seen.append(chunk.numel())
        return count(chunk, *arguments, **options)

    monkeypatch.setattr(portable_one.values, "count", spy)
    x = torch.ones(200_000)
    observed(x, "health")
    assert seen == [200_704]  # with padding
    seen.clear()
    observed(x, "health", temporary_bytes=SMALL)
    assert len(seen) > 5 and max(seen) <= SMALL // 17
    seen.clear()
    observed_list([x[:15000], x[:15000]], "health", temporary_bytes=SMALL)
    assert len(seen) == 2
    assert many.values is portable_one.values


def test_no_chunk_has_chains_on_both_sides_of_2_32(monkeypatch: pytest.MonkeyPatch) -> None:
    """As every chunk starts at a multiple of its own number of chains, a power of two."""
    seen: list[tuple[int, int]] = []
    start = sum64.start

    def spy(numbers: torch.Tensor, origin: int) -> torch.Tensor:
        seen.append((origin, numbers.numel()))
        return start(numbers, origin)

    monkeypatch.setattr(sum64, "start", spy)
    for dtype in (torch.float32, torch.float16, torch.float64, torch.uint8):
        for bound in (SMALL, 3 * SMALL, 5 * SMALL):
            seen.clear()
            x = torch.zeros(2_000_000, dtype=torch.uint8).view(dtype)
            observed(x, temporary_bytes=bound)
            chains = seen[0][1]
            assert len(seen) > 1 and chains & (chains - 1) == 0
            assert [origin for origin, _ in seen] == [chains * k for k in range(len(seen))]


def test_all_threads_get_the_same_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that ask for it at the same time: none may be freed while it is read."""
    together, make = threading.Barrier(2), torch.tensor

    def make_late(*args: Any, **options: Any) -> torch.Tensor:
        together.wait()
        return make(*args, **options)

    monkeypatch.setattr(torch, "tensor", make_late)
    found: list[torch.Tensor] = []
    threads = [
        threading.Thread(target=lambda: found.append(constant((3, 5, 8), torch.int64, CPU)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] is found[1] is constant((3, 5, 8), torch.int64, CPU)


def test_every_dtype_has_a_format() -> None:
    assert sorted(form.info.name for form in FORMATS.values()) == ALL
    start, _ = LAYOUT["checksum"]
    assert len(observed(torch.ones(3))) == VALUE_BYTES == start + 8
