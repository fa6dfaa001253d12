"""Cambricon's MLU, through torch_mlu: the overflow mode of the device, whichever kernels read it.

No public document specifies how its arithmetic stores a result that is out of range, nor how to
query the device. NaN and infinities are found by their bits, and records have
``DeviceMode.UNKNOWN``.
"""

from __future__ import annotations

import dataclasses

import torch

from fastcheck.record.format import DeviceMode

from .backend import Backend


def mlu_backend(kernels: Backend, device: torch.device) -> Backend:
    """``kernels``, the backend that reads an MLU's tensors, with the MLU's overflow mode."""
    return dataclasses.replace(kernels, device_mode=DeviceMode.UNKNOWN)
