"""Tracks the running module and the optimizer's steps with global hooks, without the model.

Hooks on all modules of the process, while a dump is under way. A module that is called while none
runs is a root; its submodules are named by their paths in it. The first root is the model; the
names of further roots (a criterion) begin with their class name, as with ``install()``.

The hooks on optimizers' steps are for all listeners, and registered once: torch goes through its
global hooks as they lie, and a hook that is registered, or removed, within a step ends that step in
an error.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Callable, Optional, Protocol

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from fastcheck.record.site import SiteTable
from fastcheck.utils.torch.flatten import flatten, flatten_arguments
from fastcheck.utils.torch.optimizer_steps import around_steps
from fastcheck.utils.torch.own_operators import is_unobserved, unobserved
from fastcheck.utils.torch.patching import Listeners
from fastcheck.utils.torch.versions import is_compiling, is_wrapper

from .module_calls import ModuleNode


class OptimizerListener:
    """Callbacks around every step of an optimizer, which do nothing here. While an object is
    connected, others may connect and disconnect within an optimizer's step.
    """

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's step begins, in this thread."""

    def after_update(self) -> None:
        """The step of an optimizer is over, in this thread."""


def _begin(at_end: ExitStack) -> None:
    around_steps(at_end, _before_update, _after_update)


#: Told from connect() on, until disconnect() or until they are gone.
optimizer_listeners: Listeners[OptimizerListener] = Listeners(_begin)


def _before_update(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for listener in optimizer_listeners:
        listener.before_update(optimizer)


def _after_update(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for listener in optimizer_listeners:
        listener.after_update()


@dataclass(eq=False)
class Running:
    """A call of a module that is under way; ``is_recompute``: it began within a backward.
    ``is_within``: it lies between the names that first= and last= give.
    """

    module: torch.nn.Module
    node: ModuleNode
    call: int
    is_recompute: bool
    is_root: bool
    is_within: bool = True


class _ThreadStack(threading.local):
    def __init__(self) -> None:
        self.stack: list[Running] = []
        self.optimizers = 0


class CallListener:
    """Callbacks of the tracker, called with the session's lock held."""

    def met_root(self, nodes: Sequence[ModuleNode]) -> None:
        """A root is about to be called for the first time."""

    def entered(self, running: Running, inputs: list[tuple[str, torch.Tensor]], args: Any) -> None:
        """``args``: (args, kwargs)."""

    def left(self, running: Running, outputs: list[tuple[str, torch.Tensor]]) -> None:
        """``outputs`` is empty where the call has raised."""

    def moved(self, node: Optional[ModuleNode], is_recompute: bool, is_in_optimizer: bool) -> None:
        """ModuleTracker.current has changed."""

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's step begins."""


class TrackerOwner(Protocol):
    """The part of a session that the tracker needs: of a dump's, or of an override's."""

    lock: Any  # a reentrant lock
    sites: SiteTable
    step: int

    @property
    def is_on(self) -> bool: ...

    def guarded(self, what: str, method: Callable[..., Any], *args: Any) -> Any: ...


@dataclass(eq=False)
class ModuleTracker(OptimizerListener):
    """Tells ``listeners`` what modules and optimizers do, in order."""

    _session: TrackerOwner
    _given: Sequence[torch.nn.Module]
    _listeners: Sequence[CallListener]
    _on_modules: Callable[[Sequence[str]], None]

    def __post_init__(self) -> None:
        self._local = _ThreadStack()
        self._known: dict[int, tuple[torch.nn.Module, ModuleNode]] = {}
        self._roots = 0
        self._at_end = ExitStack()

    def start(self) -> None:
        with self._session.lock:
            for model in self._given:
                self._add_root(model)
        before = register_module_forward_pre_hook(self._before_call)
        after = register_module_forward_hook(self._after_call, always_call=True)
        self._at_end.callback(before.remove)
        self._at_end.callback(after.remove)
        optimizer_listeners.connect(self)

    def stop(self) -> None:
        optimizer_listeners.disconnect(self)
        self._at_end.close()

    @property
    def current(self) -> tuple[Optional[ModuleNode], bool, bool]:
        """The state of this thread: the innermost module that runs; whether that is run again,
        within a backward; whether an optimizer is at work.
        """
        local = self._local
        if not local.stack:
            return None, False, local.optimizers > 0
        running = local.stack[-1]
        return running.node, running.is_recompute, local.optimizers > 0

    def _moved(self) -> None:
        current = self.current
        with self._session.lock:
            for listener in self._listeners:
                listener.moved(*current)

    @property
    def nodes(self) -> list[tuple[torch.nn.Module, ModuleNode]]:
        """The known modules, in the order in which they were first seen."""
        return list(self._known.values())

    # Hooks

    def _before_call(self, module: torch.nn.Module, args: Any) -> None:
        if is_compiling() or is_unobserved() or not self._session.is_on or is_wrapper(module):
            return
        frame = sys._getframe(1)
        # Hooks on all modules are not given the keywords; the call that runs them has them.
        kwargs = frame.f_locals.get("kwargs")
        self._session.guarded("a module's inputs", self._enter, module, args, kwargs or {})

    def _enter(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        with self._session.lock:
            stack = self._local.stack
            known = self._known.get(id(module))
            if known is None and not stack:
                self._add_root(module)
                known = self._known.get(id(module))
            if known is None:
                # Created while its parent runs: its name is its type, below the parent.
                parent = stack[-1].node.path
                path = ".".join(filter(None, (parent, type(module).__name__)))
                known = self._add(module, path, is_primary=False)
            node = known[1]
            in_backward = torch._C._current_graph_task_id() != -1
            step = self._session.step
            repeated = node.recomputed_call(step) if in_backward else None
            call = node.next_call(step) if repeated is None else repeated
            running = Running(
                module, node, call, is_recompute=in_backward, is_root=not stack and not in_backward
            )
            stack.append(running)
            self._moved()
            inputs = flatten_arguments(args, kwargs)
            with unobserved():
                for listener in self._listeners:
                    listener.entered(running, inputs, (args, kwargs))

    def _after_call(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if is_compiling() or is_unobserved():
            return
        stack = self._local.stack
        if not any(running.module is module for running in stack):
            return
        # Calls above this call were ended by an interrupt that the model itself has caught.
        while stack[-1].module is not module:
            stack.pop()
        running = stack.pop()
        if self._session.is_on:
            self._session.guarded("a module's end", self._moved)
            self._session.guarded("a module's outputs", self._leave, running, output)

    def _leave(self, running: Running, output: Any) -> None:
        outputs = flatten(output, "output")
        with self._session.lock, unobserved():
            for listener in self._listeners:
                listener.left(running, outputs)

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's step begins, in this thread."""
        self._local.optimizers += 1
        self._session.guarded("an optimizer's step", self._moved)
        if self._session.is_on and not is_unobserved():
            self._session.guarded("an optimizer's gradients", self._update, optimizer)

    def _update(self, optimizer: torch.optim.Optimizer) -> None:
        with self._session.lock, unobserved():
            for listener in self._listeners:
                listener.before_update(optimizer)

    def after_update(self) -> None:
        """The step of an optimizer is over, in this thread."""
        self._local.optimizers = max(0, self._local.optimizers - 1)
        self._session.guarded("an optimizer's step", self._moved)

    # Names

    def _add_root(self, root: torch.nn.Module) -> None:
        prefix = type(root).__name__ if self._roots else ""
        taken = {node.path for _, node in self._known.values()}
        number = 2
        while prefix and prefix in taken:
            prefix, number = f"{type(root).__name__}_{number}", number + 1
        is_primary = not self._roots
        self._roots += 1
        added = []
        for path, module in root.named_modules():
            if id(module) not in self._known and not is_wrapper(module):
                parts = [prefix, *(part for part in path.split(".") if part != "_orig_mod")]
                full = ".".join(part for part in parts if part)
                added.append(self._add(module, full, is_primary)[1])
        self._on_modules([node.path for node in added])
        with unobserved():
            for listener in self._listeners:
                listener.met_root(added)

    def _add(
        self, module: torch.nn.Module, path: str, is_primary: bool
    ) -> tuple[torch.nn.Module, ModuleNode]:
        node = ModuleNode(path, module, self._session.sites, is_primary=is_primary)
        # Held, so that no other module gets its id while the dump is under way.
        entry = self._known[id(module)] = (module, node)
        return entry
