"""What the tests of the CUDA backend on the fake accelerator share: the device between tests, its
slots, and what a call asks of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Callable

import pytest
import torch

import cuda_on_fake
import fake_device
import on_device
from fastcheck import backends

fake: Any = fake_device.load()
NAME = fake.name()


@contextmanager
def fresh_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CUDA backend reads the device's tensors; afterwards nothing is left to run there."""
    monkeypatch.setattr(backends, "_of_type", backends._of_type)  # put back as it is now
    cuda_on_fake.use()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    fake.release()
    fake.set_device(0)
    for index in range(fake.device_count()):
        fake.synchronize(index)


def slots_for(count: int, index: int = 0) -> torch.Tensor:
    return on_device.slots_for(count, f"{NAME}:{index}")


def spent(call: Callable[[], object]) -> tuple[Any, list[str]]:
    """What one call asks of the device, and the names of its launches."""
    before = fake.counters()
    with fake.recorded_launches() as names:
        call()
    return fake.counters() - before, [name.partition(" ")[2] for name in names]
