"""Counts the exponents of a tensor on its device."""

from __future__ import annotations

import torch

from .portable.exponents import count_exponents
from .table import backend_for

__all__ = ["exponent_words"]


def exponent_words(tensor: torch.Tensor, logical: bool = False) -> torch.Tensor:
    """int64 (328,) on the tensor's device (``docs/record-format.md``, section 10). The tensor is
    readable, of a floating-point or complex dtype. Without synchronisation, outside of autograd.
    """
    count = backend_for(tensor.device).exponents or count_exponents
    return count(tensor, logical)
