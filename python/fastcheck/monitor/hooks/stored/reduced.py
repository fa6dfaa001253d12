"""Of a gradient whose turn it is: what of it is compared, before and after its reduction."""

from __future__ import annotations

from typing import Callable, Optional, Protocol

import torch

from fastcheck.utils.torch.own_operators import unobserved
from fastcheck.utils.torch.readable import can_read, has_memory
from fastcheck.utils.torch.streams import streams_of

__all__ = ["ReducedGradient", "StepOf", "is_readable", "norm_of", "wide"]

#: The index of the step whose gradients are read; None: they are not read now.
StepOf = Callable[[], Optional[int]]


class ReducedGradient(Protocol):
    """A parameter that has its turn, in one step."""

    def before_forward(self) -> None:
        """A module is about to run that may have the parameter."""

    def norms(self, step: int) -> Optional[tuple[torch.Tensor, torch.Tensor]]:
        """A backward pass of this step is over: the norm of this rank's gradient, and of what the
        reduction has made of it. None: they were not read.
        """

    def close(self) -> None:
        """Takes the hook away."""


def is_readable(tensor: torch.Tensor) -> bool:
    """Whether it has elements of floating point that can be read without a wait of the host."""
    is_dense = tensor.layout is torch.strided and tensor.dtype.is_floating_point
    is_known = tensor.is_cpu or streams_of(tensor.device) is not None
    return is_dense and is_known and can_read(tensor) and has_memory(tensor) and tensor.numel() > 0


def norm_of(part: torch.Tensor) -> torch.Tensor:
    """float32 or float64, on its device."""
    with torch.no_grad(), unobserved():
        norm: torch.Tensor = torch.linalg.vector_norm(part, dtype=wide(part))
        return norm


def wide(part: torch.Tensor) -> torch.dtype:
    """The dtype in which its elements are added up."""
    return torch.float64 if part.dtype is torch.float64 else torch.float32
