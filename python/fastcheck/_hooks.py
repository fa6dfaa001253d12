"""The hooks on modules and tensors: read what a module takes and returns, and the gradients that
come back.

The healthy path is this file, the ring and the kernel, nothing else. What a module holds of a
monitor are the two hook objects; what a tensor's graph holds is a GradientHook, which knows the
monitor weakly.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Mapping
from types import FrameType
from typing import Any, Optional

import torch

from ._calls import Call, ModuleNode
from ._flatten import flatten, flatten_arguments
from ._readable import can_hold_nonfinite, can_read
from ._record import Flag
from ._session import Session
from ._state import StateReader

__all__ = ["ForwardHook", "ForwardPreHook", "GradientHook", "ModuleObserver"]

_CALL_CODE = torch.nn.Module._call_impl.__code__

# What SeenTensors knows a tensor by that could not be read.
_NO_TOKEN = 2**62


class _ThreadState(threading.local):
    """The calls that are running in this thread, outermost first."""

    def __init__(self) -> None:
        self.stack: list[Call] = []
        self.calls_before = 0
        self.ident = threading.get_ident()


class ModuleObserver:
    """Observes the calls of modules, and the gradients of what they return, for one session."""

    def __init__(self, session: Session, state: StateReader) -> None:
        self.session = session
        self._state = state
        self._local = _ThreadState()
        self._has_stored = False
        self.unread_devices: dict[str, None] = {}

    # Forward

    def enter(self, node: ModuleNode, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A module is called: reads the arguments that nobody has read yet."""
        session, local = self.session, self._local
        in_backward = torch._C._current_graph_task_id() != -1
        if local.stack and local.stack[0].node is node and self._was_interrupted():
            local.stack.clear()
        is_entry = not local.stack and not in_backward
        with session.lock:
            if is_entry:
                session.begin_pass()
                local.calls_before = len(session.calls)
            if not session.is_active:
                return
            repeated = node.recomputed_call(session.step) if in_backward else None
            call = Call(
                node,
                node.next_call(session.step) if repeated is None else repeated,
                local.stack[-1] if local.stack else None,
                local.ident,
                len(session.judge.findings),
                repeated is not None,
            )
            local.stack.append(call)
            session.calls.add(call)
            if not self._has_stored:
                self._has_stored = True
                self._state.read_stored()
            for position, (label, tensor) in enumerate(flatten_arguments(args, kwargs)):
                self._read_input(call, label, position, tensor, is_entry)

    def leave(self, node: ModuleNode, output: Any) -> None:
        """A module has returned, or raised (then ``output`` is None)."""
        session, stack = self.session, self._local.stack
        # Calls above this one were ended by a KeyboardInterrupt that the model itself caught.
        while stack and stack[-1].node is not node:
            stack.pop()
        if not stack:
            return
        call = stack[-1]
        with session.lock:
            try:
                self._read_outputs(call, output)
            finally:
                stack.pop()
            if not stack:
                session.judge.pass_ends[node.path] = len(session.judge.findings)
                if not torch.is_grad_enabled():
                    session.calls.forget_from(self._local.calls_before)

    def _was_interrupted(self) -> bool:
        """Whether the outermost call, whose module is called again, is over, and not recursive.

        No hook runs when a KeyboardInterrupt ends a forward; the interpreter's stack knows. Asked
        only when a module is called within itself.
        """
        node = self._local.stack[0].node
        module = node.module()
        frame: Optional[FrameType] = sys._getframe()
        running = 0
        while frame is not None:
            if frame.f_code is _CALL_CODE and frame.f_locals.get("self") is module:
                running += 1
            frame = frame.f_back
        noted = sum(call.node is node for call in self._local.stack)
        return running <= noted  # the call that is beginning runs, and is not noted yet

    def abandon(self, node: ModuleNode) -> None:
        """Forgets a running call of a module that is not observed any longer."""
        stack = self._local.stack
        if stack and stack[-1].node is node:
            stack.pop()

    def _read_input(
        self, call: Call, label: str, position: int, tensor: torch.Tensor, is_entry: bool
    ) -> None:
        # An integer can't be non-finite: the batch's are read for their checksum, the others are
        # not worth it.
        if not (can_hold_nonfinite(tensor) or is_entry) or not self._can_read(tensor):
            return
        site = call.node.site("input", label, position)
        token, is_new, is_bad = self._read(tensor, site, call, 0)
        if token < 0:
            return
        call.inputs.append(token)
        call.input_sites.append(site)
        if is_bad:
            session = self.session
            finding = session.found(token, "input", call)
            if call.is_recompute:
                session.judge.recomputed(finding, call)
            elif call.parent is not None:
                session.judge.inner_input(
                    finding,
                    call.parent,
                    after_gap=session.config.every > 1 and session.step > 0,
                )
            else:
                is_data = call.node.is_primary
                if torch.is_grad_enabled():
                    is_data = tensor.grad_fn is None
                session.judge.batch(
                    finding, call.node, is_data=is_data, excluded=session.has_excluded
                )
            session.take_changes()
        if is_new and tensor.requires_grad:
            self._watch(tensor, call, "grad_input", label, position, token)

    def _read_outputs(self, call: Call, output: Any) -> None:
        session = self.session
        outputs = flatten(output, "output")
        is_finite = bool(outputs)
        for position, (label, tensor) in enumerate(outputs):
            if not can_hold_nonfinite(tensor) or not self._can_read(tensor):
                continue
            site = call.node.site("output", label, position)
            token, is_new, is_bad = self._read(tensor, site, call, 0)
            if token < 0:
                is_finite = False
                continue
            call.outputs.append(token)
            if is_bad:
                judge = session.judge.recomputed if call.is_recompute else session.judge.output
                judge(session.found(token, "output", call), call)
                session.take_changes()
            is_finite = is_finite and not session.judge.is_finding(token)
            if is_new and tensor.requires_grad:
                self._watch(tensor, call, "grad_output", label, position, token)
        if session.judge.findings:
            session.judge.call_ended(call, is_finite)

    def _read(
        self, tensor: torch.Tensor, site: int, call: Call, flags: int
    ) -> tuple[int, bool, bool]:
        """(token, whether this is the first reading of it, whether that found anything non-finite).

        The token is -1 where the kernel refuses the tensor (its memory was freed, say).
        """
        session = self.session
        seq = session.ring.next_seq
        is_off = site in session.off_sites
        token = session.seen.add(tensor, _NO_TOKEN if is_off else seq)
        if is_off or token == _NO_TOKEN:
            return -1, False, False
        if token >= 0:
            return token, False, False
        if call.is_recompute:
            flags |= int(Flag.RECOMPUTE)
        try:
            is_bad = session.ring.observe(tensor, site, call.index, session.step, flags)
        except Exception as error:
            # It is remembered under the number that the next record will have.
            session.seen.clear()
            session.seen.add(tensor, _NO_TOKEN)
            session.switch_off(site, error)
            return -1, False, False
        return seq, True, is_bad

    def _can_read(self, tensor: torch.Tensor) -> bool:
        if can_read(tensor):
            return True
        if not tensor.is_cpu:
            self.unread_devices[tensor.device.type] = None
        return False

    # Backward

    def _watch(
        self, tensor: torch.Tensor, call: Call, role: str, label: str, position: int, token: int
    ) -> None:
        if isinstance(tensor, torch.nn.Parameter):
            return  # its gradient is read before the optimizer uses it
        site = call.node.site(role, label, position)
        watch: Any = tensor.register_hook  # torch leaves it untyped
        handle = watch(GradientHook(self, call, role, site, token))
        if tensor.is_leaf:
            # A leaf outlives the step and would gather one hook per step.
            self.session.leaf_handles.append(handle)

    def gradient(self, hook: GradientHook, gradient: torch.Tensor) -> None:
        """The gradient of an observed tensor is complete."""
        session = self.session
        with session.lock:
            session.begin_step_if_closed()
            if not session.is_active:
                return
            if not can_hold_nonfinite(gradient) or not self._can_read(gradient):
                return
            flags = int(Flag.SCALED) if session.is_scaled else 0
            token, _, is_bad = self._read(gradient, hook.site, hook.call, flags)
            if token < 0:
                return
            session.gradients[hook.token] = token
            if is_bad:
                finding = session.found(token, hook.role, hook.call)
                session.judge.gradient(finding, hook.token, scaled=session.is_scaled)
                session.take_changes()


class _ModuleHook:
    """What a module holds. A copy of the module (deepcopy, pickle) holds one that does nothing."""

    def __init__(
        self, observer: Optional[ModuleObserver] = None, node: Optional[ModuleNode] = None
    ) -> None:
        self._observer = observer
        self._node = node

    def __deepcopy__(self, memo: Mapping[int, Any]) -> _ModuleHook:
        return type(self)()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


class ForwardPreHook(_ModuleHook):
    """Registered with ``with_kwargs=True``."""

    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if torch.compiler.is_compiling():
            return
        observer, node = self._observer, self._node
        if observer is None or node is None or not node.enabled:
            return
        try:
            observer.enter(node, args, kwargs)
        except Exception as error:
            node.enabled = False
            observer.abandon(node)
            observer.session.trouble(f"the inputs and outputs of {node.name}", error)
        if observer.session.due:
            observer.session.deliver()


class ForwardHook(_ModuleHook):
    """Registered with ``with_kwargs=True, always_call=True``: the calls that raise have to end
    too.
    """

    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if torch.compiler.is_compiling():
            return
        observer, node = self._observer, self._node
        if observer is None or node is None or not node.enabled:
            return
        try:
            observer.leave(node, output)
        except Exception as error:
            node.enabled = False
            observer.session.trouble(f"the inputs and outputs of {node.name}", error)
        if observer.session.due:
            observer.session.deliver()


class GradientHook:
    """What the autograd graph of an observed tensor holds; does nothing once the monitor is gone or
    removed.
    """

    __slots__ = ("_observer", "call", "role", "site", "token")

    def __init__(
        self, observer: ModuleObserver, call: Call, role: str, site: int, token: int
    ) -> None:
        self._observer = weakref.ref(observer)
        self.call = call
        self.role = role
        self.site = site
        self.token = token

    def __call__(self, gradient: torch.Tensor) -> None:
        observer = self._observer()
        if observer is None or observer.session.removed:
            return
        try:
            observer.gradient(self, gradient)
        except Exception as error:
            observer.session.switch_off(self.site, error)
        if observer.session.due:
            observer.session.deliver()
