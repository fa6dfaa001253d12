"""Calls that make the host wait for a device."""

from __future__ import annotations

from typing import Any, Callable

import torch

from fakes import fake_device

fake: Any = fake_device.load()

WAITS: dict[str, Callable[[Any], Any]] = {
    "item": lambda x: x.sum().item(),
    "data_dependent": lambda x: x.nonzero(),
    "blocking_copy": lambda x: x.cpu(),
    "stream_synchronize": lambda x: fake.current_stream().synchronize(),
    "event_synchronize": lambda x: fake.current_stream().record_event().synchronize(),
    "device_synchronize": lambda x: torch.accelerator.synchronize(),
}
