"""Wraps functions and methods that their framework has no hooks for."""

from __future__ import annotations

import functools
from typing import Any, Callable

from fastcheck.monitor.hooks.flat_optimizers import FlatOptimizer, GradientParts
from fastcheck.monitor.monitor import Monitor

__all__ = ["replace", "wrap_step"]


def replace(
    owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], None]:
    """Puts ``make(original)`` in the place of ``owner.name``, a method of an object or a function
    of a module. What is returned puts the original back.
    """
    original = getattr(owner, name)
    wrapper = functools.wraps(original)(make(original))

    def restore() -> None:
        if vars(owner).get(name) is wrapper:  # else another wrapper is around it, and calls it
            setattr(owner, name, original)

    setattr(owner, name, wrapper)
    return restore


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
    around = FlatOptimizer(monitor._watcher, gradients, rates)

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            around.before()
            result = original(*args, **kwargs)
            around.after(was_skipped(result))
            then()
            return result

        return step

    monitor._boundary.at_end.callback(replace(optimizer, "step", make))
