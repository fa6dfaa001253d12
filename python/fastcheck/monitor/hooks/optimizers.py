"""Process-wide hooks on optimizers, GradScaler, backward and clipping, for all installed monitors.

Connected while at least one monitor is installed. Optimizers have global hooks in torch; GradScaler
has none, nor have schedulers of learning rates, so their methods, and those of the classes made
from them that replace them, are wrapped at class level and put back when the last is gone.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Callable, Optional, Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fastcheck.utils.torch.own_operators import unread
from fastcheck.utils.torch.patching import Listeners, WrappedMethods
from fastcheck.utils.torch.versions import GradScaler

from .functions import wrap_backward, wrap_clipping
from .step_watcher import StepWatcher

_handles: list[Any] = []
# What is called before an evaluation of a closure, and after it.
_at_evaluations: list[Callable[[torch.optim.Optimizer], None]] = []
_methods = WrappedMethods()


def _begin() -> None:
    # Of an optimizer whose step is compiled they break the graph, before it and after it.
    eager: Any = torch.compiler.disable  # untyped
    _handles.append(register_optimizer_step_pre_hook(eager(_before_update)))
    _handles.append(register_optimizer_step_post_hook(eager(_after_update)))
    _at_evaluations[:] = eager(_evaluation_began), eager(_evaluation_ended)
    _wrap_scaler()
    for kind in _kinds(LRScheduler):
        _methods.wrap(kind, "step", _schedule)
    wrap_backward(_methods, _backward_began, _backward_ended, _backward_left)
    wrap_clipping(_methods, _before_clipping, _after_clipping)


def _end() -> None:
    for handle in _handles:
        handle.remove()
    _handles.clear()
    _methods.restore()


#: Told from connect() on, until disconnect() or until they are gone.
watchers: Listeners[StepWatcher] = Listeners(_begin, _end)


class _StepEnd(Protocol):
    def step_ended(self) -> None: ...


#: Told after all watchers were, when an optimizer or a scaler is done, or monitor.step(): may
#: install a monitor and remove one.
step_ends: Listeners[_StepEnd] = Listeners(lambda: None, lambda: None)


def tell_step_end() -> None:
    """Every watcher has acted on what may have ended a step."""
    for listener in step_ends:
        listener.step_ended()


def _tell(what: str, method: Callable[..., bool], *args: Any) -> None:
    for watcher in watchers:
        watcher.guarded(what, method, *args)


def _before_update(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    """The arguments of an optimizer's step, where they are others from now on."""
    has_closure = _closure_of(args, kwargs) is not None
    _tell("optimizer steps", StepWatcher.before_update, optimizer, has_closure)
    if not has_closure:
        return None
    return _with_watched_closure(optimizer, args, kwargs, *_at_evaluations)


def _closure_of(args: Any, kwargs: Any) -> Optional[Callable[..., Any]]:
    """The closure among the arguments of an optimizer's step; ``args[0]`` is the optimizer."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    return closure if callable(closure) else None


def _with_watched_closure(
    optimizer: torch.optim.Optimizer,
    args: Any,
    kwargs: Any,
    began: Callable[[torch.optim.Optimizer], None],
    ended: Callable[[torch.optim.Optimizer], None],
) -> Any:
    """The arguments of its step with a closure that calls ``began`` before each evaluation and
    ``ended`` after it, unless it raised. None: there is no closure, or it is such a one already.
    """
    closure = _closure_of(args, kwargs)
    if closure is None or getattr(closure, "_fastcheck_optimizer", None) == id(optimizer):
        return None

    @functools.wraps(closure)
    def evaluate(*given: Any, **named: Any) -> Any:
        began(optimizer)
        result = closure(*given, **named)
        ended(optimizer)
        return result

    evaluate._fastcheck_optimizer = id(optimizer)  # type: ignore[attr-defined]  # not twice
    if len(args) > 1:
        return (args[0], evaluate, *args[2:]), kwargs
    return args, {**kwargs, "closure": evaluate}


def _evaluation_began(optimizer: torch.optim.Optimizer) -> None:
    _tell("optimizer steps", StepWatcher.evaluation_began, optimizer)


def _evaluation_ended(optimizer: torch.optim.Optimizer) -> None:
    _tell("optimizer steps", StepWatcher.evaluation_ended, optimizer)


def _after_update(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    has_closure = _closure_of(args, kwargs) is not None
    _tell("optimizer steps", StepWatcher.after_update, optimizer, has_closure)
    tell_step_end()


def _backward_began(
    roots: Sequence[torch.Tensor],
    gradients: Sequence[Optional[torch.Tensor]],
    inputs: Optional[Sequence[torch.Tensor]],
) -> None:
    _tell("the loss", StepWatcher.backward_began, roots, gradients, inputs)


def _backward_ended() -> None:
    _tell("the loss", StepWatcher.backward_ended)


def _backward_left() -> None:
    for watcher in watchers:
        watcher.backward_left()


def _before_clipping(gradients: Sequence[torch.Tensor]) -> None:
    _tell("gradient clipping", StepWatcher.before_clipping, gradients)


def _after_clipping(
    gradients: Sequence[torch.Tensor], norm: Optional[torch.Tensor], threshold: object
) -> None:
    _tell("gradient clipping", StepWatcher.after_clipping, gradients, norm, threshold)


def _wrap_scaler() -> None:
    """Wraps the methods of torch's scaler and, of the classes made from it until now, those that
    replace a method, with or without asking torch's (FSDP's sharded one and torch_npu's do not).
    """
    for kind in _kinds(GradScaler):
        for name, wrap in (("scale", _scale), ("step", _step), ("update", _update)):
            _methods.wrap(kind, name, wrap)


def _kinds(kind: Any) -> Iterator[Any]:
    yield kind
    for other in kind.__subclasses__():
        yield from _kinds(other)


class _Running(threading.local):
    """The calls of scalers' methods that this thread has passed on: scaler and name."""

    def __init__(self) -> None:
        self.calls: set[tuple[int, str]] = set()
        self.is_scheduling = False


_running = _Running()


@contextlib.contextmanager
def _told(scaler: Any, name: str) -> Iterator[bool]:
    """Whether to pass this call on: the scaler is in use, and the call is not that of a base class
    within the scaler's own method.
    """
    key = (id(scaler), name)
    if not scaler.is_enabled() or key in _running.calls:
        yield False
        return
    try:
        _running.calls.add(key)
        yield True
    finally:
        _running.calls.discard(key)


def _scale(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def scale(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _told(self, "scale") as is_told:
            if not is_told:
                return original(self, *args, **kwargs)
            outputs = args[0] if args else kwargs.get("outputs")
            _tell("loss scaling", StepWatcher.scaling, self, outputs)
            # A loss that overflows when it is scaled is no event: the scaler sees to its gradients.
            with unread():
                result = original(self, *args, **kwargs)
                _tell("loss scaling", StepWatcher.scaled, self, outputs, result)
            return result

    return scale


def _step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(self: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        with _told(self, "step") as is_told:
            if not is_told:
                return original(self, optimizer, *args, **kwargs)
            _tell("loss scaling", StepWatcher.scaler_step_began, self, optimizer)
            try:
                result = original(self, optimizer, *args, **kwargs)
                found = _found_inf(self, optimizer)
                with unread():  # for every watcher: one keeps what another would see
                    _tell("loss scaling", StepWatcher.scaler_step_ended, self, optimizer, found)
            finally:
                for watcher in watchers:
                    watcher.scaler_step_left(optimizer)
            return result

    return step


def _schedule(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        # One that is made of others steps these.
        is_outermost = not _running.is_scheduling
        _running.is_scheduling = True
        try:
            result = original(self, *args, **kwargs)
        finally:
            _running.is_scheduling = not is_outermost
        if is_outermost:
            _tell("learning rates", StepWatcher.scheduler_stepped, self)
        return result

    return step


def _update(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _told(self, "update") as is_told:
            result = original(self, *args, **kwargs)
            if is_told:
                _tell("loss scaling", StepWatcher.scaler_updated, self)
                tell_step_end()
            return result

    return update


def _found_inf(scaler: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The findings of the scaler, one word per device; empty when torch no longer has them."""
    state: Optional[dict[str, Any]] = getattr(scaler, "_per_optimizer_states", {}).get(
        id(optimizer)
    )
    return list((state or {}).get("found_inf_per_device", {}).values())
