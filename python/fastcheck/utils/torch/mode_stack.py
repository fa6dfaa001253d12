"""Takes a mode off this thread's stack, wherever it lies on it."""

from __future__ import annotations

from typing import Any

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
    if not any(one is mode for one in stack):
        return
    above: list[Any] = []
    while (one := _pop_mode()) is not mode:
        above.append(one)
    for one in reversed(above):
        _push_mode(one)
