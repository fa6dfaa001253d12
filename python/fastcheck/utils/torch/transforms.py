"""Detects functorch's transforms (vmap, grad, jvp, ...), and unwraps the tensors in them; takes
a dispatch mode off this thread's stack.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)


def take_off(mode: TorchDispatchMode) -> None:
    """Takes it off, from under any other. On another thread's stack it stays."""
    stack = _get_current_dispatch_mode_stack()
    if stack and stack[-1] is mode:
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch has it untyped
        return
    if not any(entry is mode for entry in stack):
        return
    above: list[Any] = []
    while (other := _pop_mode()) is not mode:
        above.append(other)
    for other in reversed(above):
        _push_mode(other)


_functorch: Any = torch._C._functorch


#: True if this thread runs within a transform. Whoever asks for the innermost one makes a state of
#: functorch, which autograd copies for each node from then on.
is_transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active


def untransformed() -> contextlib.AbstractContextManager[None]:
    """A section in which operators are not transformed; what they are given has to be unwrapped."""
    return torch._C._DisableFuncTorch()


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in all levels of wrappers: under vmap it has the mapped dimension too."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor
