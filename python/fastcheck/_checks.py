"""Whether what came can be read, said before anything is."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ._errors import ConfigError, UnsupportedTensorError
from ._extension import status
from ._readable import unreadable_reason

__all__ = ["check", "check_devices", "check_list", "not_a_tensor"]


def not_a_tensor(x: object, expected: str = "a torch.Tensor") -> UnsupportedTensorError:
    return UnsupportedTensorError(f"expected {expected}, came {type(x).__name__}")


def check(x: torch.Tensor) -> None:
    if status.error is ConfigError:  # an instruction set was asked for that this machine lacks
        raise status.error(status.problem)
    reason = unreadable_reason(x)
    if reason is not None:
        raise UnsupportedTensorError(reason)


def check_list(tensors: Sequence[object]) -> None:
    if status.error is ConfigError:
        raise status.error(status.problem)
    for number, x in enumerate(tensors):
        reason = unreadable_reason(x) if isinstance(x, torch.Tensor) else str(not_a_tensor(x))
        if reason is not None:
            raise UnsupportedTensorError(f"item {number}: {reason}")
    check_devices(tensors)


def check_devices(tensors: Sequence[object]) -> None:
    devices = [x.device for x in tensors if isinstance(x, torch.Tensor)]
    for number, device in enumerate(devices):
        if device != devices[0] and device.type != "meta":
            raise UnsupportedTensorError(
                f"item {number}: expected a tensor on {devices[0]}, where the first one is, came "
                f"one on {device}; read the tensors of each device in a call of their own"
            )
