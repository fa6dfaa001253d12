"""What the tests of the CUDA backend on the fake accelerator share: the device's
slots, and what a call asks of it.
"""

from __future__ import annotations

from typing import Any, Callable

import torch

import fake_device
import on_device

fake: Any = fake_device.load()
NAME = fake.name()


def slots_for(count: int, index: int = 0) -> torch.Tensor:
    return on_device.slots_for(count, f"{NAME}:{index}")


def spent(call: Callable[[], object]) -> tuple[Any, list[str]]:
    """What one call asks of the device, and the names of its launches."""
    before = fake.counters()
    with fake.recorded_launches() as names:
        call()
    return fake.counters() - before, [name.partition(" ")[2] for name in names]
