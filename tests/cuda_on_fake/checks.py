"""Records in slots of the fake device, held to the CPU's byte for byte."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import torch

import fake_device
from fastcheck import _C
from helpers import assert_same, even, tensor_of
from reference import DEPTHS, DTYPES, RECORD_BYTES
from vectors import pattern

fake: Any = fake_device.load()
NAME = fake.name()


def slots_for(count: int, index: int = 0) -> torch.Tensor:
    return torch.full((count, RECORD_BYTES), 0xA5, dtype=torch.uint8, device=f"{NAME}:{index}")


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


def spent(call: Callable[[], object]) -> tuple[Any, list[str]]:
    """What one call asks of the device, and the names of its launches."""
    before = fake.counters()
    with fake.recorded_launches() as names:
        call()
    return fake.counters() - before, [name.partition(" ")[2] for name in names]
