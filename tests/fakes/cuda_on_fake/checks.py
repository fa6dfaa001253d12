"""Helpers of the tests of the CUDA backend on the fake accelerator: the device's slots, and the
launches, allocations and waits of a call.
"""

from __future__ import annotations

import threading
from typing import Any, Callable

import torch

from fakes import fake_device
from support.devices import on_device

fake: Any = fake_device.load()
NAME = fake.name()


def slots_for(count: int, index: int = 0) -> torch.Tensor:
    return on_device.slots_for(count, f"{NAME}:{index}")


def spent(call: Callable[[], object]) -> tuple[Any, list[str]]:
    """What one call asks of the device from this thread, and the names of its launches."""
    this = threading.current_thread()
    before = fake.counters(this)
    with fake.recorded_launches() as names:
        call()
    return fake.counters(this) - before, [name.partition(" ")[2] for name in names]
