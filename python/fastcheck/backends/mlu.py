"""Cambricon's MLU, through torch_mlu: what is known of the device, whichever kernels read it.

Its streams, events and pinned memory are those of any PrivateUse1 device (``_device``). No public
document says what its arithmetic does to a result that does not fit, nor how to ask the device: NaN
and infinities are found by their bits, and every record says that the mode is unknown.
"""

from __future__ import annotations

import dataclasses

import torch

from .._record import DeviceMode
from .entry import Backend

__all__ = ["completed"]


def completed(kernels: Backend, device: torch.device) -> Backend:
    """The table's entry for an MLU whose tensors ``kernels`` read."""
    return dataclasses.replace(kernels, device_mode=DeviceMode.UNKNOWN)
