"""Wraps functions and methods that their framework has no hooks for; keeps scalars for loggers that
accept calls from the training thread only.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Optional

from fastcheck.errors import warn
from fastcheck.monitor.hooks.flat_optimizer import FlatOptimizer, GradientParts
from fastcheck.monitor.monitor import Monitor


class WaitingRows:
    """A sink that keeps the youngest row until write() is called.

    Args:
        targets: functions that take the scalars and, as ``step``, their step. A function that fails
            is left out from then on, with a warning.
    """

    def __init__(self, targets: Sequence[Callable[..., object]]) -> None:
        self._targets = list(targets)
        self._row: Optional[tuple[dict[str, float], int]] = None

    def end_with(self, monitor: Monitor) -> None:
        """The last row is written when the monitor is removed and its sinks are closed."""
        ends = monitor.at_end
        earlier = ends.pop_all()  # what was added last is called first
        ends.callback(self.write)
        ends.push(earlier)

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self._row = dict(scalars), step

    def write(self) -> None:
        """Writes the row that came last, unless that was done."""
        row, self._row = self._row, None
        if row is None:
            return
        for target in list(self._targets):
            try:
                target(row[0], step=row[1])
            except Exception as error:
                self._targets.remove(target)
                name = getattr(target, "__qualname__", repr(target))
                warn(f"fastcheck no longer calls {name}: {type(error).__name__}: {error}")


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
) -> FlatOptimizer:
    """Makes each call of ``optimizer.step()`` close a step, until ``monitor.remove()``. What is
    returned lives as long as that.

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

    monitor.at_end.callback(replace(optimizer, "step", make))
    return around
