"""Hooks on the whole process: optimizers and GradScalers tell the watchers of live monitors what
they do.

Connected while at least one monitor is installed. Optimizers have global hooks in torch; GradScaler
has none, so three methods of it, and of the classes made from it that replace them, are wrapped at
class level and put back by the last disconnect().
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Callable, Optional

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ._compat import GradScaler
from ._steps import StepWatcher

__all__ = ["connect", "disconnect"]

# Reentrant: the garbage collector may call _release() in the middle of anything.
_lock = threading.RLock()
_watchers: weakref.WeakSet[StepWatcher] = weakref.WeakSet()
_handles: list[Any] = []
_originals: dict[tuple[Any, str], Callable[..., Any]] = {}


def connect(watcher: StepWatcher) -> None:
    """From now on ``watcher`` is told, until disconnect() or until it is gone."""
    with _lock:
        _watchers.add(watcher)
        if not _handles:
            # Of an optimizer whose step is compiled they break the graph, before it and after it.
            eager: Any = torch.compiler.disable  # untyped
            _handles.append(register_optimizer_step_pre_hook(eager(_before_update)))
            _handles.append(register_optimizer_step_post_hook(eager(_after_update)))
            _wrap_scaler()
    # A monitor whose model was deleted goes without remove().
    weakref.finalize(watcher, _release)


def disconnect(watcher: StepWatcher) -> None:
    """The opposite of connect(); does nothing the second time."""
    with _lock:
        _watchers.discard(watcher)
    _release()


def _release() -> None:
    with _lock:
        # Not len(): it still counts the watcher whose finalizer this is.
        if any(True for _ in _watchers) or not _handles:
            return
        # Taken out first: the collector may call this again in its middle.
        handles = _handles.copy()
        _handles.clear()
        for handle in handles:
            handle.remove()
        _unwrap_scaler()


def _tell(what: str, method: Callable[..., bool], *args: Any) -> None:
    for watcher in list(_watchers):
        watcher.guarded(what, method, *args)


@contextlib.contextmanager
def _unread() -> Iterator[None]:
    """Within it no watcher reads the ops of this thread."""
    with contextlib.ExitStack() as stack:
        for watcher in list(_watchers):
            stack.enter_context(watcher.session.unread())
        yield


def _before_update(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    _tell("optimizer steps", StepWatcher.before_update, optimizer, _has_closure(args, kwargs))


def _after_update(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    _tell("optimizer steps", StepWatcher.after_update, optimizer, _has_closure(args, kwargs))


def _has_closure(args: Any, kwargs: Any) -> bool:
    # args[0] is the optimizer itself.
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    return callable(closure)


def _wrap_scaler() -> None:
    """Those of torch and, of the classes made from it until now, those that replace a method, with
    or without asking torch's (FSDP's sharded one and torch_npu's do not).
    """
    for kind in _kinds(GradScaler):
        for name, wrap in (("scale", _scale), ("step", _step), ("update", _update)):
            original = vars(kind).get(name)
            if original is not None and not hasattr(original, "_fastcheck"):
                _originals[kind, name] = original
                wrapper: Any = wrap(original)
                # Tells our wrapper from the original, and from another's.
                wrapper._fastcheck = True
                setattr(kind, name, wrapper)


def _kinds(kind: Any) -> Iterator[Any]:
    yield kind
    for other in kind.__subclasses__():
        yield from _kinds(other)


def _unwrap_scaler() -> None:
    originals = _originals.copy()
    _originals.clear()
    for (kind, name), original in originals.items():
        # Someone may have wrapped it after us: then theirs stays, and ours inside it tells nobody.
        if getattr(vars(kind).get(name), "_fastcheck", False):
            setattr(kind, name, original)


class _Running(threading.local):
    """The calls of scalers' methods that this thread has told of: scaler and name."""

    def __init__(self) -> None:
        self.calls: set[tuple[int, str]] = set()


_running = _Running()


@contextlib.contextmanager
def _told(scaler: Any, name: str) -> Iterator[bool]:
    """Whether this call is to be told of: the scaler is in use, and it is no method of a base class
    within its own.
    """
    key = (id(scaler), name)
    if not scaler.is_enabled() or key in _running.calls:
        yield False
        return
    _running.calls.add(key)
    try:
        yield True
    finally:
        _running.calls.discard(key)


def _scale(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def scale(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _told(self, "scale") as is_told:
            if not is_told:
                return original(self, *args, **kwargs)
            _tell("loss scaling", StepWatcher.scaling, self)
            # A loss that overflows when it is scaled is no event: the scaler sees to its gradients.
            with _unread():
                result = original(self, *args, **kwargs)
                outputs = args[0] if args else kwargs.get("outputs")
                _tell("loss scaling", StepWatcher.scaled, self, outputs)
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
                with _unread():  # for every watcher: one keeps what another would see
                    _tell("loss scaling", StepWatcher.scaler_step_ended, self, optimizer, found)
            finally:
                for watcher in list(_watchers):
                    watcher.scaler_step_left(optimizer)
            return result

    return step


def _update(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _told(self, "update") as is_told:
            result = original(self, *args, **kwargs)
            if is_told:
                _tell("loss scaling", StepWatcher.scaler_updated, self)
            return result

    return update


def _found_inf(scaler: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """What the scaler found, one word per device; empty when torch no longer tells."""
    state: Optional[dict[str, Any]] = getattr(scaler, "_per_optimizer_states", {}).get(
        id(optimizer)
    )
    return list((state or {}).get("found_inf_per_device", {}).values())
