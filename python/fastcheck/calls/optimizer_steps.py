"""The steps of all optimizers, for those who ask while one is under way.

torch goes through its global hooks as they lie: one that is registered, or removed, within a step
ends that step in an error. So these are registered once, for all listeners.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fastcheck.utils.torch.patching import Listeners


class OptimizerListener(Protocol):
    """Is told of every step of an optimizer."""

    def before_update(self, optimizer: torch.optim.Optimizer) -> None: ...

    def after_update(self) -> None: ...


class NoOptimizerListener:
    """While it is connected, others may connect and disconnect within an optimizer's step."""

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        pass

    def after_update(self) -> None:
        pass


_handles: list[Any] = []


def _begin() -> None:
    _handles.append(register_optimizer_step_pre_hook(_before_update))
    _handles.append(register_optimizer_step_post_hook(_after_update))


def _end() -> None:
    for handle in _handles:
        handle.remove()
    _handles.clear()


#: Told from connect() on, until disconnect() or until they are gone.
optimizer_listeners: Listeners[OptimizerListener] = Listeners(_begin, _end)


def _before_update(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for listener in optimizer_listeners:
        listener.before_update(optimizer)


def _after_update(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for listener in optimizer_listeners:
        listener.after_update()
