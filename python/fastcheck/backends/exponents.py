"""Counts the exponents of a tensor on its device."""

from __future__ import annotations

import torch

from .portable.exponents import count_exponents
from .table import backend_for

_FULL = 3


def exponent_words(tensor: torch.Tensor, logical: bool = False) -> torch.Tensor:
    """int64 (328,) on the tensor's device (``docs/record-format.md``, section 10). The tensor is
    readable, of a floating-point or complex dtype. Without synchronisation, outside of autograd.
    """
    count = backend_for(tensor.device).exponents or count_exponents
    return count(tensor, logical)


def observe_and_count(tensor: torch.Tensor, slots: torch.Tensor, index: int) -> torch.Tensor:
    """Writes ``slots[index]`` as ``Backend.observe`` at full depth, and returns the tensor's
    ``exponent_words``: in one pass over its memory where the backend has that.
    """
    backend = backend_for(tensor.device)
    if backend.observe_and_count is not None:
        return backend.observe_and_count(tensor, slots, index)
    backend.observe(tensor, slots, index, _FULL)
    return exponent_words(tensor)
