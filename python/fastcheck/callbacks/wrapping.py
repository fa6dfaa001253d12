"""Wraps the step() of an optimizer that is not a torch.optim.Optimizer."""

from __future__ import annotations

import functools
from typing import Any, Callable

from fastcheck.monitor.hooks.flat_optimizers import FlatOptimizer, GradientParts
from fastcheck.monitor.monitor import Monitor

__all__ = ["wrap_step"]


def wrap_step(
    monitor: Monitor,
    optimizer: Any,
    gradients: Callable[[], GradientParts],
    rates: Any,
    was_skipped: Callable[[Any], bool],
    then: Callable[[], None] = lambda: None,
) -> None:
    """From now until ``monitor.remove()`` each call of ``optimizer.step()`` closes a step.

    Args:
        gradients: what the update is about to use, and of which parameters.
        rates: what has the learning rates in ``param_groups``; None: nothing.
        was_skipped: takes what step() has returned; whether loss scaling skipped the update.
        then: called after each step.
    """
    original = optimizer.step
    around = FlatOptimizer(monitor._watcher, gradients, rates)

    @functools.wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        around.before()
        result = original(*args, **kwargs)
        around.after(was_skipped(result))
        then()
        return result

    def restore() -> None:
        if vars(optimizer).get("step") is step:  # else another wrapper is around it, and calls it
            optimizer.step = original

    optimizer.step = step
    monitor._boundary.at_end.callback(restore)
