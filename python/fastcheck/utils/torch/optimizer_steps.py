"""Hooks around the steps of all optimizers of the process."""

from __future__ import annotations

import sys
import threading
from contextlib import ExitStack
from typing import Any, Callable

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

# An optimizer, and the arguments and named arguments of its step.
_Hook = Callable[[torch.optim.Optimizer, Any, Any], Any]


class _SteppingOptimizers(threading.local):
    """The optimizers that step in this thread, each with how many steps run within its own."""

    def __init__(self) -> None:
        self.inner: dict[int, int] = {}


def around_steps(
    at_end: ExitStack, before: _Hook, after: _Hook, wrap: Callable[[_Hook], _Hook] = lambda h: h
) -> None:
    """Calls ``before`` and ``after`` around each step of an optimizer until ``at_end`` is closed,
    but not around one that runs within a step of the same optimizer, as super().step() does.
    """
    running = _SteppingOptimizers()

    def begins(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        key = id(optimizer)
        # A step that raised has not come to its end.
        if key in running.inner and _steps_of(optimizer) > 1:
            running.inner[key] += 1
            return None
        running.inner[key] = 0
        return before(optimizer, args, kwargs)

    def ends(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        key = id(optimizer)
        inner = running.inner.pop(key, 0)
        if inner:
            running.inner[key] = inner - 1
            return
        after(optimizer, args, kwargs)

    at_end.callback(register_optimizer_step_pre_hook(wrap(begins)).remove)
    at_end.callback(register_optimizer_step_post_hook(wrap(ends)).remove)


def _steps_of(optimizer: torch.optim.Optimizer) -> int:
    """The number of steps of an optimizer that this thread is in, by torch's own frames."""
    count, frame = 0, sys._getframe(1)
    while frame is not None:
        is_torch = frame.f_globals.get("__name__") == torch.optim.Optimizer.__module__
        if is_torch and frame.f_code.co_name == "wrapper":
            count += frame.f_locals.get("self") is optimizer
        frame = frame.f_back  # type: ignore[assignment]  # None: the outermost
    return count
