"""Module hooks at op level: they track the running module on each thread, and have parameters and
buffers read once, by name.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Callable, Optional

import torch

from fastcheck.calls.module_calls import Call, ModuleNode, new_call
from fastcheck.calls.stored import buffers_of
from fastcheck.extension import extension
from fastcheck.monitor.hooks.module_observer import (
    ForwardHook,
    ForwardPreHook,
    Given,
    ModuleObserver,
    last_pass,
)
from fastcheck.monitor.hooks.state_reader import StateReader
from fastcheck.monitor.hooks.step_watcher import StepWatcher
from fastcheck.monitor.hooks.traced import Traced
from fastcheck.monitor.session.session import Session
from fastcheck.utils.torch.frames import call_frames
from fastcheck.utils.torch.readable import are_on_host, can_hold_nonfinite
from fastcheck.verdict.entries import Moment, OpStored

from .level import OpLevel


class _Stack(threading.local):
    def __init__(self) -> None:
        self.nodes: list[ModuleNode] = []


def _is_called(node: ModuleNode, entering: ModuleNode) -> bool:
    """True if a call of ``node`` is under way on this thread, besides a call that begins now."""
    module = node.module()
    calls = sum(frame.f_locals.get("self") is module for frame in call_frames())
    return calls > (node is entering)


class OpModuleObserver(ModuleObserver):
    """Takes the place of a ModuleObserver: hooks call it in the same way."""

    def __init__(
        self,
        session: Session,
        level: OpLevel,
        state: StateReader,
        watcher: StepWatcher,
        stops: Callable[[], None],
        keeps: Sequence[object],
        nodes: Sequence[ModuleNode],
    ) -> None:
        super().__init__(session, state, watcher, stops, keeps)
        self.level = level
        self._stack = _Stack()
        # The observer's number of a node.
        self._numbers = {id(node): number for number, node in enumerate(nodes)}
        self._ops = extension.op_observer()

    @property
    def modules(self) -> list[ModuleNode]:
        """The modules that are running in this thread, outermost first."""
        return self._stack.nodes

    def attach(self, node: ModuleNode) -> tuple[ForwardPreHook, ForwardHook]:
        return ForwardPreHook(self, node), ForwardHook(self, node)

    def enter(
        self,
        node: ModuleNode,
        inputs: list[tuple[str, torch.Tensor]],
        traced: Optional[Traced],
        given: Optional[Given] = None,
    ) -> Optional[Call]:
        stack, session = self._stack.nodes, self.session
        if stack and (session.is_closed or node is stack[0]) and not _is_called(stack[0], node):
            # The calls were left by what is no Exception (KeyboardInterrupt): torch calls no hook
            # then.
            while stack:
                self._leave()
        if not stack and torch._C._current_graph_task_id() == -1:
            with session.lock:
                if session.removed:
                    return None
                last_pass.observer = self.own_ref
                self.level.enters(node.path)
                self.begin_pass()
                if session.is_active:
                    self._begin_pass(node, inputs)
        call = None
        if traced is not None and session.is_active:
            call = self._read_compiled(node, inputs, "input", traced)
        stack.append(node)
        node.counter.total += 1
        self._ops.enter(self._numbers[id(node)])
        return call

    def _begin_pass(self, node: ModuleNode, inputs: list[tuple[str, torch.Tensor]]) -> None:
        if self._stored_step is None:
            self._stored_step = self.session.step.index
            self._state.read_stored()
        roles = self.session.config.filter.roles
        if not node.is_selected or (roles and "input" not in roles):
            return
        for position, (label, tensor) in enumerate(inputs):
            self.level.read_argument(tensor, node.site("input", label, position))

    def leave(
        self, node: ModuleNode, outputs: list[tuple[str, torch.Tensor]], traced: Optional[Traced]
    ) -> Optional[Call]:
        stack, session = self._stack.nodes, self.session
        if node in stack:
            while stack[-1] is not node:
                self._leave()
            self._leave()
        if self.level.has_incidents:
            with session.lock:
                session.collect()
        if node.has_statistics and node.is_selected and session.is_active:
            module = node.module()
            with session.lock:
                if module is not None and module.training and not session.removed:
                    self._state.read_statistics(node)
        call = None
        if traced is not None and session.is_active:
            call = self._read_compiled(node, outputs, "output", traced)
        if not stack and node.is_root and torch._C._current_graph_task_id() == -1:
            with session.lock:
                self.level.returned(node, outputs)
        return call

    def _read_compiled(
        self, node: ModuleNode, tensors: list[tuple[str, torch.Tensor]], role: str, traced: Traced
    ) -> Optional[Call]:
        """Reads what a module takes or returns within compiled code, where few operators are
        called.
        """
        session = self.session
        if not node.is_selected:
            return None
        call = new_call(node, 0, None, threading.get_ident(), session.next_seq, False)
        call.watched = {}
        with session.lock:
            for index, (label, tensor) in enumerate(tensors):
                position = traced.positions[index]
                self.level.read_compiled(tensor, node, node.site(role, label, position), role)
                if traced.needs_gradient(index):
                    back = f"grad_{role}"
                    call.watched[back, label] = node.site(back, label, position), -1
        return call

    def _leave(self) -> None:
        """Leaves the innermost module: in the extension first, so that after an interrupt between
        the two the next pass leaves it again, and is not within it.
        """
        self._ops.leave()
        self._stack.nodes.pop()

    def abandon(self, node: ModuleNode) -> None:
        if self._stack.nodes and self._stack.nodes[-1] is node:
            self._leave()

    def abandon_traced(self) -> None:
        """Compiled modules are known by their own hooks alone."""

    def gradient(self, hook: Any, gradient: torch.Tensor) -> None:
        """Reads a gradient of compiled code; elsewhere gradients are what ops of backward make."""
        if self.session.is_active:
            self.level.read_compiled(gradient, hook.call.node, hook.site, hook.role)


# ---- What modules store --------------------------------------------------------------------------


class OpState(StateReader):
    """Stored tensors are read once: every later change of them is an op, which is read itself."""

    def read_stored(self) -> None:
        """Parameters and buffers of the modules that are not left out."""
        roles = self._session.config.filter.roles
        if roles and "param" not in roles:
            return
        every, self._nodes = self._nodes, [node for node in self._nodes if node.is_selected]
        try:
            super().read_stored()
        finally:
            self._nodes = every

    def read_for_update(
        self,
        optimizer: Optional[torch.optim.Optimizer],
        *,
        gradients: bool = True,
        scaled: bool = False,
    ) -> None:
        session = self._session
        if optimizer is not None:
            self._look_at_update(optimizer, gradients)
        if not scaled and optimizer is not None and gradients:
            session.level.update_uses(optimizer)
        if not scaled:
            session.due(Moment.UPDATE_DUE)
        session.step.update.state_read = True

    def _look_at_update(self, optimizer: torch.optim.Optimizer, gradients: bool) -> None:
        """Looks at what an optimizer is about to use, if it is on the host and there are gradients
        already; and for parameters with a gradient that no optimizer holds, in one update of ten.
        """
        session, stalled_weights = self._session, self.stalled_weights
        look = self.updates.begin(optimizer, session.step)
        if look is None or stalled_weights is None or not session.backwards.owns_gradients:
            return
        look.has_backward = session.backwards.has_begun
        look.without_derivative = self.without_derivative
        _, stored, _ = self._held_by(optimizer)
        parameters = [parameter for _, _, parameter in stored]
        if gradients and are_on_host(parameters):
            sites = [node.site("param", name, 0) for node, name, _ in stored]
            used = [site for site, p in zip(sites, parameters) if p.grad is not None]
            self.updates.look_at_parameters(look, optimizer, stored, sites, used)
            with session.event_store.lock:
                stalled_weights.settle_read(look, parameters, sites)
        if look.has_turn_for_strays:
            every = self.parameters()
            strays = self.updates.unowned_parameters(every)
            replaced = self.updates.replaced(strays, every)
            sites = [node.site("param", name, 0) for node, name, _ in strays]
            with session.event_store.lock:
                parameters = [parameter for _, _, parameter in strays]
                stalled_weights.compare_strays(sites, parameters, replaced)

    def read_statistics(self, node: ModuleNode) -> None:
        """The running statistics of a norm that has just run, where its operator does not show that
        it writes them.
        """
        session = self._session
        for _, name, buffer in buffers_of([node]):
            if can_hold_nonfinite(buffer):
                before = session.next_seq
                seq, is_bad = session.level.observe(buffer, node.site("buffer", name, 0), 0, 0)
                if seq >= before:
                    session.level.saw(OpStored(seq, "buffer"), is_bad)

    def read_gradients(
        self, optimizer: torch.optim.Optimizer, *, scaled: bool, is_early: bool = False
    ) -> None:
        self._session.step.update.state_read = True

    def read_before_clipping(
        self, gradients: Sequence[torch.Tensor], owned: Optional[set[int]], *, scaled: bool
    ) -> bool:
        return False

    def after_backward(self, owned: Optional[set[int]]) -> bool:
        return False

    def were_clipped(self, gradients: Sequence[torch.Tensor]) -> bool:
        """True if these are all gradients, so that their norm is that of the step."""
        if not self._session.backwards.owns_gradients:
            return False
        clipped = {id(gradient) for gradient in gradients}
        own = [p.grad for _, _, p in self.parameters() if p.grad is not None]
        return bool(own) and all(id(gradient) in clipped for gradient in own)

    def read_optimizer_state(
        self, optimizer: torch.optim.Optimizer, *, is_after: bool = True
    ) -> None:
        """The operators that make it are read, from the first update on."""
        if not is_after:
            super().read_optimizer_state(optimizer, is_after=False)
