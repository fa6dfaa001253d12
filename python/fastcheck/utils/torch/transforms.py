"""Detects functorch's transforms (vmap, grad, jvp, ...), and unwraps the tensors in them."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

_functorch: Any = torch._C._functorch


def in_transform() -> bool:
    """Whether this thread runs within a transform."""
    return _functorch.peek_interpreter_stack() is not None


def untransformed() -> contextlib.AbstractContextManager[None]:
    """Within it operators are not transformed; what they are given has to be unwrapped."""
    disabled: contextlib.AbstractContextManager[None] = torch._C._DisableFuncTorch()
    return disabled


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in all levels of wrappers: under vmap it has the mapped dimension too."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor
