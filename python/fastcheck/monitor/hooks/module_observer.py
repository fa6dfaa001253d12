"""The hooks that are registered on modules and tensors, and ModuleObserver, the work that the C++
recorder leaves to Python.

Each hook passes its call to the recorder in C++ first, and to the ModuleObserver where the recorder
has left it undone. The path of a healthy tensor is this file, the ring and the kernel, nothing
else. A module references a monitor by its two hook objects. A tensor's graph references a
GradientHook, which has a weak reference to the monitor. A copy of a hook (deepcopy, pickle) does
nothing, whatever it is called with.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing.context import get_spawning_popen
from typing import Any, Callable, Optional, Protocol

import torch

from fastcheck.calls.module_calls import Call, ModuleNode, ModuleRecorder, new_call
from fastcheck.calls.recorder import make_module_recorder
from fastcheck.errors import FastcheckError
from fastcheck.extension import status
from fastcheck.monitor.hooks.state_reader import StateReader
from fastcheck.monitor.session.config import Config
from fastcheck.monitor.session.session import Session
from fastcheck.record.format import Flag
from fastcheck.ring.host import IS_BAD, IS_NEW, SEQ_SHIFT
from fastcheck.utils.torch.flatten import flatten, flatten_arguments
from fastcheck.utils.torch.frames import CALL, call_frames
from fastcheck.utils.torch.memory_ref import held_by, name_of_held
from fastcheck.utils.torch.readable import can_hold_nonfinite, can_read, hook_gradient
from fastcheck.utils.torch.streams import streams_of
from fastcheck.utils.torch.transforms import is_transformed, untransformed, unwrapped
from fastcheck.utils.torch.versions import is_compiling, is_dynamo_compiling
from fastcheck.verdict.entries import Batch, Gradient, InnerInput, Output, Recomputed, Seen

from .hook_support import look_again, warn_of_copy
from .step_watcher import StepWatcher
from .traced import Traced, trace_enter, trace_leave

#: The arguments of a call, the tensors among them with their labels, and whether gradients are on.
Given = tuple[tuple[Any, ...], dict[str, Any], list[tuple[str, torch.Tensor]], bool]

_NOT_GIVEN = object()


class _ModuleHook:
    """A hook that a module holds. A copy of the module (deepcopy, pickle) holds a hook that does
    nothing.
    """

    __slots__ = (
        "_node",
        "_observer",
        "_recorder",
        "address",
        "came_from",
        "is_outermost",
        "was_carried",
    )

    def __init__(
        self,
        observer: Optional[ModuleObserver] = None,
        node: Optional[ModuleNode] = None,
        recorder: Optional[ModuleRecorder] = None,
    ) -> None:
        self._observer = observer
        self._node = node
        self._recorder = recorder
        # The address by which compiled code finds the two; None: it is not observed.
        self.address: Optional[torch.Tensor] = None
        self.is_outermost = False
        # True if another module calls it too.
        self.was_carried = False
        # The process that sent it to this process, which it started; 0: none did.
        self.came_from = 0

    @property
    def __name__(self) -> str:
        """The name of a function, for which only torch.jit.script() asks. A hook has none."""
        raise AttributeError(
            "torch.jit.script() can't compile a hook of fastcheck: call it before "
            "fastcheck.install(), or after remove() of the monitor"
        )

    def __deepcopy__(self, memo: Mapping[int, Any]) -> _ModuleHook:
        return type(self)()

    def __reduce__(self) -> tuple[Any, ...]:
        # A process that is being started may train its copy.
        if get_spawning_popen() is not None:
            return _unpickled, (type(self), os.getpid())
        # A file may be loaded where there is no fastcheck: a function that does nothing with any
        # arguments.
        return getattr, (contextlib.nullcontext(), "__exit__")

    def is_of(self, config: Config) -> bool:
        """True if its module is the model of a monitor with these options, not removed."""
        observer, node = self._observer, self._node
        if observer is None or observer.session.removed:
            return False
        return node is not None and node.is_primary and observer.session.config == config

    def _is_carried(self, module: torch.nn.Module) -> bool:
        """True if ``module``, which has called it without kwargs, is another than the module that
        it was registered on: ``torch.ao.quantization`` registers the hooks of a module anew, and
        without this mark, on what the module is converted to.
        """
        node = self._node
        if node is None:
            return False
        if node.module() is module:
            return False
        if not self.was_carried:
            self.was_carried = True
            look_again()
        return True

    def _attend(self, method: Callable[..., Any], *values: Any) -> None:
        """Passes on to the observer what the recorder has not taken."""
        observer, node = self._observer, self._node
        # torch.jit.trace() compares what it has traced with a second trace.
        is_traced = is_compiling() or torch._C._is_tracing()
        if observer is None or node is None or not node.enabled or is_traced:
            if self.came_from and not is_traced:
                warn_of_copy(self.came_from)
            return
        try:
            # The program's own __torch_function__ is not called by what reads its tensors.
            with torch._C.DisableTorchFunction():
                method(observer, node, *values)
        except Exception as error:
            observer.failed(node, error)
        if observer.session.event_store.due:
            observer.deliver()


def _unpickled(kind: type[_ModuleHook], process: int) -> _ModuleHook:
    hook = kind()
    hook.came_from = process
    return hook


class ForwardPreHook(_ModuleHook):
    """Registered with ``with_kwargs=True``."""

    __slots__ = ()

    def __call__(
        self,
        module: torch.nn.Module,
        args: tuple[Any, ...] = (),
        kwargs: Optional[dict[str, Any]] = None,
        *_: Any,
    ) -> None:
        if kwargs is None:
            if self._is_carried(module):
                return
            kwargs = {}
        if is_dynamo_compiling():
            if self.address is not None:
                trace_enter(self.address, args, kwargs, is_outermost=self.is_outermost)
            return
        recorder = self._recorder
        if recorder is None or not recorder.enter(args, kwargs):
            self._attend(_enter, args, kwargs)


class ForwardHook(_ModuleHook):
    """Registered with ``with_kwargs=True, always_call=True``: the calls that raise have to end
    too.
    """

    __slots__ = ()

    def __call__(
        self,
        module: torch.nn.Module,
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
        output: Any = _NOT_GIVEN,
        *_: Any,
    ) -> None:
        """``kwargs``: the output, where there is no fourth argument."""
        if output is _NOT_GIVEN:
            if self._is_carried(module):
                return
            kwargs, output = {}, kwargs
        if is_dynamo_compiling():
            if self.address is not None:
                trace_leave(self.address, args, kwargs, output)
            return
        recorder = self._recorder
        if recorder is None or not recorder.leave(output):
            self._attend(_leave, output)


if status.module is not None:
    status.module.call_in_cpp(ForwardPreHook, ForwardHook)


def _enter(
    observer: ModuleObserver, node: ModuleNode, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    tensors = flatten_arguments(args, kwargs)
    _pass(observer.enter, node, tensors, (args, kwargs, tensors, torch.is_grad_enabled()))


def _leave(observer: ModuleObserver, node: ModuleNode, output: Any) -> None:
    _pass(observer.leave, node, flatten(output, "output"))


def _pass(
    method: Callable[..., Any],
    node: ModuleNode,
    tensors: list[tuple[str, torch.Tensor]],
    *given: Given,
) -> None:
    if is_transformed():
        with untransformed():
            plain = [(label, unwrapped(tensor)) for label, tensor in tensors]
            method(node, plain, None)
        return
    # Under another name: the recorder has no site for the tensor itself, and leaves it to us.
    named = [(label + name_of_held(tensor), tensor) for label, tensor in tensors]
    method(node, named, None, *given)


class GradientReader(Protocol):
    """Reads the gradients of one session that its hooks are given. ``gradient()`` expects the
    session's lock to be held.
    """

    session: Session

    def gradient(self, hook: GradientHook, gradient: torch.Tensor, /) -> None: ...

    def deliver(self) -> None: ...


class GradientHook:
    """A hook that the autograd graph of an observed tensor holds; does nothing once the monitor is
    gone or removed.
    """

    __slots__ = ("call", "reader", "role", "site", "tensor_seq")

    def __init__(
        self, reader: GradientReader, call: Call, role: str, site: int, tensor_seq: int
    ) -> None:
        self.reader = weakref.ref(reader)
        self.call = call
        self.role = role
        self.site = site
        self.tensor_seq = tensor_seq

    def __call__(self, gradient: Optional[torch.Tensor]) -> None:
        reader = self.reader()
        if reader is not None and gradient is not None:  # None: of an output that nothing has used
            _gradient_came(reader, self, gradient)


def _gradient_came(reader: GradientReader, hook: GradientHook, gradient: torch.Tensor) -> None:
    """The hook of a gradient. Training continues whatever happens here, except for a stop."""
    session = reader.session
    if session.removed:
        return
    try:
        with session.lock:
            if not session.removed:
                reader.gradient(hook, gradient)
    except Exception as error:
        session.switch_off(hook.site, error)
    if session.event_store.due:
        reader.deliver()


# ---- What the recorder leaves to Python ----------------------------------------------------------


class _ThreadState(threading.local):
    """The calls that are running in this thread, outermost first."""

    def __init__(self) -> None:
        self.stack: list[Call] = []
        self.calls_before = 0
        self.ident = threading.get_ident()


class _LastPass(threading.local):
    """A weak reference to the observer of the model that was called last in this thread."""

    observer: Callable[[], Optional[object]] = staticmethod(lambda: None)


last_pass = _LastPass()


class ModuleObserver:
    """Observes the calls of modules, and the gradients of what they return, for one session.

    The user need not keep the Monitor, and the process holds what watches optimizers and graphs
    weakly: the hooks on the model reference this observer, and it references all else, what is in
    ``keeps`` too.
    """

    def __init__(
        self,
        session: Session,
        state: StateReader,
        watcher: StepWatcher,
        stops: Callable[[], None],
        keeps: Sequence[object],
    ) -> None:
        self.session = session
        self._state = state
        self._watcher = watcher
        self._stops = stops
        self._keeps = keeps
        self._local = _ThreadState()
        self.own_ref = weakref.ref(self)
        self.recorder = session.recorder
        due = session.event_store.due
        self.recorder.attach(self.own_ref, self._local, due, InnerInput, Output, Gradient)
        # The step in which all that the model stores was read last, before a forward.
        self._stored_step: Optional[int] = None

    @property
    def running(self) -> list[Call]:
        """The calls that are running in this thread, outermost first."""
        return self._local.stack

    def attach(self, node: ModuleNode) -> tuple[ForwardPreHook, ForwardHook]:
        """The hooks for this module."""
        recorder = make_module_recorder(self.recorder, node)
        return ForwardPreHook(self, node, recorder), ForwardHook(self, node, recorder)

    def deliver(self) -> None:
        """Carries out pending stops and actions, outside of all locks. May raise."""
        self._stops()

    # Forward

    def begin_pass(self) -> None:
        """A forward enters the observed modules from outside."""
        if self._watcher.ended_before():
            self.session.close_step()
            self.session.begin_pass()
            self._watcher.read_updated()
        else:
            self.session.begin_pass()

    def enter(
        self,
        node: ModuleNode,
        inputs: list[tuple[str, torch.Tensor]],
        traced: Optional[Traced],
        given: Optional[Given] = None,
    ) -> Optional[Call]:
        """A module is called: reads the arguments that were not read yet. Those of a call from
        outside are kept, which may be run again (``given``).

        ``traced``: the call runs compiled, and this is what tracing knew of the tensors.
        """
        session, local = self.session, self._local
        in_backward = torch._C._current_graph_task_id() != -1
        stack = local.stack
        if stack and stack[0].node is node and self._was_interrupted():
            stack.clear()
        is_entry = not stack and not in_backward
        with session.lock:
            if session.removed:  # while this call was on its way here
                return None
            if is_entry:
                last_pass.observer = self.own_ref
                self.begin_pass()
                local.calls_before = len(session.step.calls)
                if self._state.updates.places:
                    self._state.updates.pass_began()
            if not session.is_active:
                if is_entry:
                    session.rest_recorder()
                return None
            step = session.step
            repeated = node.recomputed_call(step.index) if in_backward else None
            call = new_call(
                node,
                node.next_call(step.index) if repeated is None else repeated,
                stack[-1] if stack else None,
                local.ident,
                session.next_seq,
                repeated is not None,
            )
            if traced is not None:
                call.watched = {}
            stack.append(call)
            step.calls.append(call)
            # Each step begins with what the model stores where a verdict can neither wait for the
            # reading before the update, nor read in its middle.
            if self._stored_step != step.index and (
                self._stored_step is None or session.rings.settles_calls
            ):
                self._stored_step = step.index
                self._state.read_stored()
            for index, (label, tensor) in enumerate(inputs):
                self._read_input(call, index, label, tensor, traced, is_entry)
            if session.rings.settles_calls:
                session.settle_call()
            session.level.open_recorder()
            if given is not None and self._watcher.looks_at_masks:
                self._watcher.called(call, *given[:3])
            if given is not None and call.parent is None:
                args, kwargs, tensors, is_grad_enabled = given
                if is_grad_enabled and session.config.finds_operators and session.tape is None:
                    session.passes.hold(step.index, call, args, kwargs, tensors)
        return call

    def leave(
        self, node: ModuleNode, outputs: list[tuple[str, torch.Tensor]], traced: Optional[Traced]
    ) -> Optional[Call]:
        """A module has returned, or raised (then ``outputs`` is empty)."""
        session, stack = self.session, self._local.stack
        # Calls above this call were ended by a KeyboardInterrupt that the model itself caught.
        while stack and stack[-1].node is not node:
            stack.pop()
        if not stack:
            return None
        call = stack[-1]
        with session.lock:
            try:
                if not session.removed:
                    self._read_outputs(call, outputs, traced)
            finally:
                stack.pop()
            if not stack:
                session.read_waiting()
                self.pass_left(node, session.next_seq, _is_grad_enabled(traced))
            if session.rings.settles_calls:
                session.settle_call()
        return call

    def pass_left(self, node: ModuleNode, next_seq: int, is_grad_enabled: bool) -> None:
        """An outermost call is over, and all that it returned was read."""
        session = self.session
        session.step.pass_ends[node.path] = next_seq
        if self._state.updates.places:
            self._state.updates.pass_ended()
        if not is_grad_enabled:
            session.step.calls.forget_from(self._local.calls_before)
            session.end_pass()
            self._watcher.pass_without_gradients(node)

    def _was_interrupted(self) -> bool:
        """True if the outermost call, whose module is called again, is over, and not recursive.

        No hook runs when a KeyboardInterrupt ends a forward; the interpreter's stack shows
        it. Called only when a module is called within itself.
        """
        node = self._local.stack[0].node
        module = node.module()
        running = sum(frame.f_locals.get("self") is module for frame in call_frames())
        noted = sum(call.node is node for call in self._local.stack)
        return running <= noted  # the call that is beginning runs, and is not noted yet

    def failed(self, node: ModuleNode, error: Exception) -> None:
        """A hook of this module has failed: it is not observed any longer."""
        node.switch_off()
        self.abandon(node)
        self.session.report_internal_error(f"the inputs and outputs of {node.name}", error)

    def abandon(self, node: ModuleNode) -> None:
        """Forgets a running call of a module that is not observed any longer."""
        stack = self._local.stack
        if stack and stack[-1].node is node:
            stack.pop()

    def abandon_traced(self) -> None:
        """Forgets the running calls of compiled code that was ended by an exception."""
        stack = self._local.stack
        while stack and stack[-1].watched is not None:
            stack.pop()

    def _read_input(
        self,
        call: Call,
        index: int,
        label: str,
        tensor: torch.Tensor,
        traced: Optional[Traced],
        is_entry: bool,
    ) -> None:
        # An integer can't be non-finite: the batch's are read for their checksum, the others are
        # not worth it.
        session, node = self.session, call.node
        # The calls of functions count: each step passes here.
        is_ordinary = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        held = tensor if is_ordinary and not tensor.is_nested else held_by(tensor)
        site = node.input_sites.get(label)
        if site is None:
            if not (is_entry or can_hold_nonfinite(held)) or not self._is_readable(held):
                return
            site = node.site("input", label, index if traced is None else traced.positions[index])
        flags = int(Flag.RECOMPUTE) if call.is_recompute else 0
        code = session.level.read(held, site, call.index, flags, is_entry)
        if code < 0:
            return
        tensor_seq = code >> SEQ_SHIFT
        call.add_input(tensor_seq, site)
        if not code & IS_NEW:
            return
        is_bad = None if session.rings.is_deferred else bool(code & IS_BAD)
        if is_bad is not False:
            is_leaf = tensor.grad_fn is None if traced is None else traced.is_leaf(index)
            is_data = is_leaf if _is_grad_enabled(traced) else None
            self._judge_input(tensor_seq, is_bad, call, is_data, tensor.requires_grad)
        if tensor.requires_grad if traced is None else traced.needs_gradient(index):
            position = index if traced is None else traced.positions[index]
            self._watch(tensor, call, "grad_input", label, position, tensor_seq)

    def _judge_input(
        self,
        tensor_seq: int,
        is_bad: Optional[bool],
        call: Call,
        is_data: Optional[bool],
        needs_gradient: bool,
    ) -> None:
        """``is_data``: it was not computed in this step; None: unknown without gradient mode."""
        session = self.session
        entry: Seen
        if call.is_recompute:
            entry = Recomputed(tensor_seq, call, "input")
        elif call.parent is not None:
            entry = InnerInput(tensor_seq, call, session.follows_gap)
        else:
            node = call.node
            if is_data is None:
                is_data = node.is_primary
            since, excluded = session.step.pass_ends.get(node.path, 0), session.level.has_excluded
            entry = Batch(tensor_seq, call, since, is_data, excluded, needs_gradient)
        session.level.saw(entry, is_bad)

    def _read_outputs(
        self, call: Call, outputs: list[tuple[str, torch.Tensor]], traced: Optional[Traced]
    ) -> None:
        session, node = self.session, call.node
        is_complete = bool(outputs)
        flags = int(Flag.RECOMPUTE) if call.is_recompute else 0
        for index, (label, tensor) in enumerate(outputs):
            held = held_by(tensor)
            position = index if traced is None else traced.positions[index]
            site = node.output_sites.get(label)
            if site is None:
                if not can_hold_nonfinite(tensor):
                    continue
                if not self._is_readable(held):
                    is_complete = False
                    continue
                site = node.site("output", label, position)
            code = session.level.read(held, site, call.index, flags)
            if code < 0:
                is_complete = is_complete and not can_hold_nonfinite(tensor)
                continue
            tensor_seq = code >> SEQ_SHIFT
            call.add_output(tensor_seq)
            if not code & IS_NEW:
                continue
            if session.rings.is_deferred or code & IS_BAD:
                recomputed = call.is_recompute
                entry = (
                    Recomputed(tensor_seq, call, "output")
                    if recomputed
                    else Output(tensor_seq, call)
                )
                session.level.saw(entry, None if session.rings.is_deferred else True)
            if tensor.requires_grad if traced is None else traced.needs_gradient(index):
                self._watch(tensor, call, "grad_output", label, position, tensor_seq)
        if session.rings.is_deferred or session.step.findings.all:
            error = None if outputs or call.parent is not None else _raised_here()
            if not isinstance(error, FastcheckError):  # a stop cuts nothing off
                ended_by = "" if error is None else type(error).__name__
                session.call_ended(call, is_complete, ended_by)

    def _is_readable(self, tensor: torch.Tensor) -> bool:
        """Called before a tensor is given a site. The reader checks it again at each reading."""
        if not tensor.is_cpu and streams_of(tensor.device) is None:
            self.session.faults.unread_devices[tensor.device.type] = None
            return False
        return can_read(tensor)

    # Backward

    def _watch(
        self,
        tensor: torch.Tensor,
        call: Call,
        role: str,
        label: str,
        position: int,
        tensor_seq: int,
    ) -> None:
        if isinstance(tensor, torch.nn.Parameter):
            # The parameter's gradient is read before the optimizer uses it.
            self.session.step.given[id(tensor)] = tensor_seq
            return
        site = call.node.site(role, label, position)
        if call.watched is not None:
            call.watched[role, label] = site, tensor_seq
            return
        handle = hook_gradient(tensor, GradientHook(self, call, role, site, tensor_seq))
        if handle is not None:
            self.session.step.leaf_handles.append(handle)

    def gradient_came(self, hook: GradientHook, gradient: torch.Tensor) -> None:
        """A hook of the extension leaves its work to Python."""
        _gradient_came(self, hook, gradient)

    def gradient(self, hook: GradientHook, gradient: torch.Tensor) -> None:
        """The gradient of an observed tensor is complete."""
        session = self.session
        session.begin_step_if_closed()
        if not session.is_active:
            return
        flags = int(Flag.SCALED) if session.is_scaled else 0
        if hook.call.is_recompute:
            flags |= int(Flag.RECOMPUTE)
        code = session.level.read(held_by(gradient), hook.site, hook.call.index, flags)
        if code < 0:
            return
        seq = code >> SEQ_SHIFT
        session.step.gradients[hook.tensor_seq] = seq
        if code & IS_NEW and (code & IS_BAD or session.rings.is_deferred):
            entry = Gradient(seq, hook.call, hook.role, hook.tensor_seq, session.is_scaled)
            session.level.saw(entry, None if session.rings.is_deferred else True)
        if session.rings.settles_calls:
            session.settle_call()
        session.level.open_recorder()


def _raised_here() -> Optional[BaseException]:
    """The exception that leaves the module whose hook runs."""
    error = sys.exc_info()[1]
    at = None if error is None else error.__traceback__
    return error if at is not None and at.tb_frame.f_code is CALL else None


def _is_grad_enabled(traced: Optional[Traced]) -> bool:
    return torch.is_grad_enabled() if traced is None else traced.is_grad_enabled
