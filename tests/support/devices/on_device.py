"""Checks shared by the tests of a device's backend, on the fake accelerator and on a GPU: records
equal the CPU's byte for byte, and work in several threads.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Callable, Optional

import torch

from fastcheck import _C
from support.helpers import assert_same, even, tensor_of
from support.records.reference import DEPTHS, DTYPES, RECORD_BYTES, pattern

# --- records -------------------------------------------------------------------------------------


def slots_for(count: int, device: str) -> torch.Tensor:
    """Slots that were used before."""
    return torch.full((count, RECORD_BYTES), 0xA5, dtype=torch.uint8, device=device)


def rows(slots: torch.Tensor) -> list[bytes]:
    return [row.numpy().tobytes() for row in slots.cpu()]


def of_cpu(
    tensors: Sequence[torch.Tensor], depth: str = "full", order: str = "storage"
) -> list[bytes]:
    return rows(_C.record_list(tensors, DEPTHS[depth], order == "logical"))


def assert_all_same(slots: torch.Tensor, wanted: Sequence[bytes], note: object = "") -> None:
    got = rows(slots)
    assert len(got) == len(wanted)
    for i, (left, right) in enumerate(zip(got, wanted)):
        assert_same(left, right, (note, i), determinism="bitwise")


def random(dtype: str, count: int, seed: int = 0) -> torch.Tensor:
    count = even(count * DTYPES[dtype].components, dtype)
    return tensor_of(pattern("random", dtype, count, seed), dtype)


def many(count: int) -> list[torch.Tensor]:
    """Tensors of a dtype that has to travel in a table from the 33rd on, some not aligned."""
    return [random("bfloat16", 41 * i + 1, i)[i % 2 :] for i in range(count)]


# --- threads -------------------------------------------------------------------------------------


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """work(0) to work(count - 1) at the same time; fails with what any of them raised."""
    errors: list[Optional[BaseException]] = [None] * count

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors[number] = error

    threads = [threading.Thread(target=run, args=(k,)) for k in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [None] * count
