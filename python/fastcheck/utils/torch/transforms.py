"""Detects functorch's transforms (vmap, grad, jvp, ...), and unwraps the tensors in them."""

from __future__ import annotations

import contextlib
from typing import Any, Callable

import torch

_functorch: Any = torch._C._functorch


#: Returns the innermost transform that this thread runs within; None: it runs within none.
innermost_transform: Callable[[], Any] = _functorch.peek_interpreter_stack


def untransformed() -> contextlib.AbstractContextManager[None]:
    """Within it operators are not transformed; what they are given has to be unwrapped."""
    disabled: contextlib.AbstractContextManager[None] = torch._C._DisableFuncTorch()
    return disabled


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in all levels of wrappers: under vmap it has the mapped dimension too."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor
