"""What the tests of a device's backend do alike on the fake accelerator and on a GPU: records in
its slots held to the CPU's byte for byte, work in several threads, training under install().
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Callable, Optional

import torch
from torch import nn

import fastcheck
from fastcheck import _C
from helpers import assert_same, even, tensor_of
from reference import DEPTHS, DTYPES, RECORD_BYTES
from training import Apply, batches, poison, stopped, where
from vectors import pattern

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


# --- install() -----------------------------------------------------------------------------------


def deep(layers: int) -> nn.Sequential:
    """Linear layers and activations, and a hole at the end into which a test puts a fault."""
    model = nn.Sequential()
    for index in range(layers):
        model.add_module(f"layer{index}", nn.Linear(8, 8))
        model.add_module(f"act{index}", nn.Tanh())
    model.add_module("tail", Apply())
    return model


def without_waiting(model: nn.Module, data: Sequence[torch.Tensor]) -> Callable[[], None]:
    """A step for each of ``data``, which are on the model's device; reads nothing back."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train() -> None:
        for x in data:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    return train


def assert_stops_with_the_culprit(device: str, sync: Any) -> None:
    """A NaN made in the eighth of twenty steps."""
    model = deep(3).to(device)
    fastcheck.install(model, sync=sync)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loop() -> None:
        for step, x in enumerate(batches(20)):
            model.tail.function = poison if step == 7 else Apply().function
            optimizer.zero_grad()
            model(x.to(device)).square().mean().backward()
            optimizer.step()

    stop = stopped(loop)
    assert where(stop.culprit) == ("tail", "output", "output", "origin")
    assert stop.step == 7
    assert stop.culprit.record["nan_count"] == 1
