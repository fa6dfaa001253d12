"""observe(): reads a tensor of user code under a name. Without a monitor it returns at once."""

from __future__ import annotations

import itertools
import threading
from contextlib import ExitStack
from typing import Optional

import torch

from fastcheck.calls.module_calls import Call, ModuleNode, new_call
from fastcheck.errors import ConfigError, warn
from fastcheck.monitor.hooks.compiled import define_ops, integers, is_available, keep_out
from fastcheck.monitor.hooks.module_observer import GradientHook, ModuleObserver, last_pass
from fastcheck.monitor.hooks.traced import Traced, trace_named
from fastcheck.monitor.op_level.hooks import OpModuleObserver
from fastcheck.record.format import Flag
from fastcheck.ring.host import IS_BAD, IS_NEW, SEQ_SHIFT
from fastcheck.utils.torch.memory_ref import held_by
from fastcheck.utils.torch.patching import Listeners
from fastcheck.utils.torch.readable import can_read, hook_gradient, may_be_in_flight
from fastcheck.utils.torch.streams import streams_of
from fastcheck.utils.torch.versions import is_compiling, is_dynamo_compiling
from fastcheck.verdict.entries import Gradient, Named, NamedResult

# Readings whose gradients may still come; those of older readings pass unread.
_MAX_READINGS = 16384

_lock = threading.Lock()
_waiting: dict[int, list[GradientHook]] = {}
_next_number = 0
_library: Optional[torch.library.Library] = None


def _define() -> bool:
    """Defines the ops of compiled code. False where this torch can't."""
    global _library
    if is_available() and _library is None:
        schema = "(Tensor(a!) order, Tensor tensor, str name, int bits, bool grad) -> Tensor"
        _library = define_ops(
            (f"named_tensor{schema}", _read_in_graph, 1),
            ("named_gradient(Tensor number, Tensor gradient) -> ()", _gradient, 0),
        )
    return is_available()


def _number_of(gradients: list[GradientHook]) -> torch.Tensor:
    """The number by which the gradient will find them; -1: none is waited for."""
    global _next_number
    number = -1
    if gradients:
        with _lock:
            number, _next_number = _next_number, _next_number + 1
            _waiting[number] = gradients
            if len(_waiting) > _MAX_READINGS:
                del _waiting[next(iter(_waiting))]
    return integers(number)


def _gradient(number: torch.Tensor, gradient: torch.Tensor) -> None:
    for hook in _waiting.get(int(number), ()):
        hook(gradient)


# A name that holds the number of the step would never come again.
_MAX_NAMES = 4096

_numbers = itertools.count()

# The object that the nodes of names refer to, in the place of a module.
_NO_MODULE = torch.nn.Identity()


class NamedTensors:
    """The tensors that observe() names, of one monitor."""

    def __init__(self, observer: ModuleObserver) -> None:
        self.observer = observer
        #: Counts up with each monitor.
        self.number = next(_numbers)
        self.session = observer.session
        # The last tensor of each name, by the path of the module that runs and by the name.
        self._nodes: dict[tuple[str, str], ModuleNode] = {}
        self._last: dict[str, ModuleNode] = {}
        self._off: set[str] = set()

    @property
    def is_running(self) -> bool:
        """True if a module of this monitor is running in this thread."""
        return not self.session.removed and bool(self.observer.running)

    def is_repeated(self, name: str) -> bool:
        """True if this may be a recomputation, in which no module is called."""
        return name in self._last and _is_in_backward()

    def read(
        self, name: str, tensor: torch.Tensor, traced: Optional[Traced]
    ) -> Optional[GradientHook]:
        """Reads the tensor, unless the step passes unread. Raises a stop that is due, and nothing
        else. ``traced``: within compiled code; then what has to be called with the gradient is
        returned.
        """
        session, hook = self.session, None
        if session.removed or name in self._off:
            return None
        try:
            with session.lock:
                if not session.removed and self._is_readable(name, held_by(tensor)):
                    hook = self._read(name, tensor, traced)
                    if session.rings.settles_calls:
                        session.settle_call()
        except Exception as error:
            self._off.add(name)
            session.report_internal_error(f"observe({name!r})", error)
        if session.event_store.due:
            try:
                self.observer.deliver()
            except BaseException:
                if traced is not None:
                    self.observer.abandon_traced()
                raise
        return hook

    def _is_readable(self, name: str, tensor: torch.Tensor) -> bool:
        problem = ""
        if may_be_in_flight(tensor):
            problem = "pinned memory, to which a copy from a device may be under way, is not read"
        elif not can_read(tensor):
            problem = f"a {type(tensor).__name__} without memory of its own is not read"
        elif not tensor.is_cpu and streams_of(tensor.device) is None:
            problem = f"{tensor.device.type} has no streams and events"
        elif name not in self._last and len(self._last) >= _MAX_NAMES:
            problem = f"there are {_MAX_NAMES} other names already"
            warn(f"observe({name!r}): {problem}. Give a tensor the same name in each step")
        if problem:
            self._off.add(name)
            if len(self._off) <= _MAX_NAMES:
                self.session.faults.notes[f"observe({name!r}): {problem}"] = None
        return not problem

    def _read(
        self, name: str, tensor: torch.Tensor, traced: Optional[Traced]
    ) -> Optional[GradientHook]:
        session, stack = self.session, self.observer.running
        if not stack and not _is_in_backward():
            if session.passes.are_paused:
                return None
            self.observer.begin_pass()
        if not session.is_active:
            return None
        parent = stack[-1] if stack else None
        call = self._call(name, None if parent is None else parent.node, parent)
        flags = int(Flag.RECOMPUTE) if call.is_recompute else 0
        site = call.node.site("output", "output", 0)
        held = held_by(tensor)
        code = session.level.read(held, site, call.index, flags, True)
        if code < 0:
            return None
        seq = tensor_seq = code >> SEQ_SHIFT
        is_bad = None if session.rings.is_deferred else bool(code & IS_BAD)
        if code & IS_NEW:
            call.add_output(tensor_seq)
            session.step.calls.append(call)
        else:  # a module has returned it, say: once more, under this name
            seq, is_bad = session.level.observe(held, site, call.index, flags)
        session.level.saw(Named(seq, call, session.follows_gap, session.level.has_excluded), is_bad)
        return self._watch(tensor, call, tensor_seq, traced)

    def _call(self, name: str, module: Optional[ModuleNode], parent: Optional[Call]) -> Call:
        session, in_backward = self.session, _is_in_backward()
        step = session.step.index
        node = self._last.get(name) if module is None and in_backward else None
        if node is None:
            node = self._node("" if module is None else module.path, name)
        self._last[name] = node
        repeated = node.recomputed_call(step) if in_backward else None
        return new_call(
            node,
            node.next_call(step) if repeated is None else repeated,
            parent,
            threading.get_ident(),
            session.next_seq,
            repeated is not None or (parent is not None and parent.is_recompute),
        )

    def _node(self, path: str, name: str) -> ModuleNode:
        node = self._nodes.get((path, name))
        if node is None:
            full = f"{path}.{name}" if path else name
            node = ModuleNode(full, _NO_MODULE, self.session.sites, is_primary=False)
            node.type_name = "observe"
            self._nodes[path, name] = node
        return node

    # Gradients

    def _watch(
        self, tensor: torch.Tensor, call: Call, tensor_seq: int, traced: Optional[Traced]
    ) -> Optional[GradientHook]:
        needs = tensor.requires_grad if traced is None else traced.needs_gradient(0)
        if not needs or isinstance(tensor, torch.nn.Parameter):
            return None
        site = call.node.site("grad_output", "output", 0)
        hook = GradientHook(self, call, "grad_output", site, tensor_seq)
        if traced is None:
            handle = hook_gradient(tensor, hook)
            if handle is not None:
                self.session.step.leaf_handles.append(handle)
        return hook

    def deliver(self) -> None:
        """Carries out pending stops and actions. May raise."""
        self.observer.deliver()

    def gradient(self, hook: GradientHook, gradient: torch.Tensor) -> None:
        """The gradient of a named tensor is complete."""
        session = self.session
        session.begin_step_if_closed()
        held = held_by(gradient)
        if session.is_active and can_read(held):
            self._read_gradient(hook, held)
            if session.rings.settles_calls:
                session.settle_call()

    def _read_gradient(self, hook: GradientHook, gradient: torch.Tensor) -> None:
        session = self.session
        flags, call = self._gradient_flags(hook), hook.call.index
        code = session.level.read(gradient, hook.site, call, flags)
        if code < 0:
            return
        seq, is_bad = code >> SEQ_SHIFT, None if session.rings.is_deferred else bool(code & IS_BAD)
        session.step.gradients[hook.tensor_seq] = seq
        if not code & IS_NEW:
            seq, is_bad = session.level.observe(gradient, hook.site, call, flags)
        scaled = session.is_scaled
        session.level.saw(Gradient(seq, hook.call, "grad_output", hook.tensor_seq, scaled), is_bad)

    def _gradient_flags(self, hook: GradientHook) -> int:
        flags = int(Flag.SCALED) if self.session.is_scaled else 0
        return flags | (int(Flag.RECOMPUTE) if hook.call.is_recompute else 0)


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class OpNamedTensors(NamedTensors):
    """The record of a name comes besides that of the operator, which events go by."""

    observer: OpModuleObserver

    @property
    def is_running(self) -> bool:
        return not self.session.removed and bool(self.observer.modules)

    def _read(
        self, name: str, tensor: torch.Tensor, traced: Optional[Traced]
    ) -> Optional[GradientHook]:
        session, modules = self.session, self.observer.modules
        if not modules and not _is_in_backward():
            if session.passes.are_paused:
                return None
            session.begin_step_if_closed()
            session.apply_pause()
        module = modules[-1] if modules else None
        is_left_out = (
            session.config.include is not None if module is None else not module.is_selected
        )
        if not session.is_active or is_left_out:
            return None
        call = self._call(name, module, None)
        if self._is_wanted("output"):
            flags = int(Flag.RECOMPUTE) if call.is_recompute else 0
            self._read_again(tensor, call.node.site("output", "output", 0), call.index, flags)
        if self._is_wanted("grad_output"):
            return self._watch(tensor, call, -1, traced)
        return None

    def _read_gradient(self, hook: GradientHook, gradient: torch.Tensor) -> None:
        self._read_again(gradient, hook.site, hook.call.index, self._gradient_flags(hook))

    def _is_wanted(self, role: str) -> bool:
        roles = self.session.config.filter.roles
        return not roles or role in roles

    def _read_again(self, tensor: torch.Tensor, site: int, call: int, flags: int) -> None:
        session = self.session
        role = session.sites[site].role
        seq, is_bad, source = self.observer.level.read_again(tensor, site, call, flags)
        session.level.saw(NamedResult(seq, role, source, session.is_scaled), is_bad)


# Flags: there is a monitor, and compiled code can call it. Dynamo takes both for constants, and
# compiles again when they change.
_is_on = False
_is_traced = False


def observe(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Reads ``tensor`` as a site of its own, and its gradient when it comes; returns ``tensor``
    itself, so that it may stand within an expression: ``softmax(fastcheck.observe("logits", x))``.

    The record belongs to the module whose forward is running: its path is that of the module and
    ``name``, its role ``output``, that of the gradient ``grad_output``. Outside of all observed
    modules (a part of the loss, a reward) the path is ``name`` alone. A NaN in it is an event, as
    in what a module returns. Of several monitors those read whose module is running in this thread;
    where none is, the monitor that was installed, or whose model was called, last in it.

    Does nothing where no monitor is installed, in a step that is not observed, or while a monitor
    is paused. Draws no random number and adds no node to autograd's graph. A tensor that has no
    memory of its own (sparse, meta, DTensor) is named in ``summary()`` and not read, nor is the
    gradient of a parameter, which the optimizer's step has read. Inside ``torch.compile`` without a
    graph break (docs/torch-compile.md).

    Args:
        name: printable, without spaces, and with parts divided by single dots: ``"attn.logits"``.
            The same in each call: a monitor reads 4096 different names at most.
        tensor: of any dtype and device; integers are read too.

    Raises:
        ConfigError: ``name`` is no such name, or ``tensor`` is no tensor.
        OverflowDetected: as a module's hook does.

    Synchronises nothing. One pass over the tensor, also where a module has read it before.
    """
    if (
        not isinstance(name, str)
        or not name.isprintable()
        or " " in name
        or not all(name.split("."))
        or not isinstance(tensor, torch.Tensor)
    ):
        raise _error(name, tensor)
    if not _is_on:
        return tensor
    if is_dynamo_compiling():
        if _is_traced:
            trace_named(name, tensor)
    elif not is_compiling():
        for reader in _reading(name):
            reader.read(name, tensor, None)
    return tensor


def _error(name: object, tensor: object) -> ConfigError:
    if isinstance(tensor, torch.Tensor):
        what = "this can't be the name of an observed tensor"
        expected = 'printable text, no spaces, its parts divided by single dots: "attn.logits"'
        return ConfigError(what, expected=expected, got=repr(name))
    got = f"observe({type(name).__name__}, {type(tensor).__name__})"
    hint = "the name comes first" if isinstance(name, torch.Tensor) else ""
    what, expected = "observe() was not given a tensor", 'observe("attn.logits", tensor)'
    return ConfigError(what, expected=expected, got=got, hint=hint)


def _reading(name: str) -> list[NamedTensors]:
    readers = list(_readers)
    running = [reader for reader in readers if reader.is_running]
    if running or not readers:
        return running
    # A recomputation in backward that calls no module belongs to the reader of the first run.
    repeated = [reader for reader in readers if reader.is_repeated(name)]
    last = last_pass.observer()
    return (
        repeated
        or [reader for reader in readers if reader.observer is last]
        or [max(readers, key=lambda reader: reader.number)]
    )


def _read_in_graph(
    order: torch.Tensor, tensor: torch.Tensor, name: str, bits: int, grad: bool
) -> torch.Tensor:
    traced = Traced([0], [bits], grad)
    hooks = (reader.read(name, tensor, traced) for reader in _reading(name))
    return _number_of([hook for hook in hooks if hook is not None])


def _begin(at_end: ExitStack) -> None:
    global _is_on, _is_traced
    _is_traced = _define()
    if _is_traced:
        keep_out(observe)
    _is_on = True
    at_end.callback(_end)


def _end() -> None:
    global _is_on
    _is_on = False


_readers: Listeners[NamedTensors] = Listeners(_begin)


def reader_for(observer: ModuleObserver) -> NamedTensors:
    """Reads for this observer, from connect() on."""
    return (OpNamedTensors if isinstance(observer, OpModuleObserver) else NamedTensors)(observer)


def connect(reader: NamedTensors) -> None:
    """Lets observe() read with this reader too, until disconnect() or until it is freed."""
    _readers.connect(reader)
    last_pass.observer = reader.observer.own_ref


def disconnect(reader: NamedTensors) -> None:
    """The opposite of connect(). Idempotent."""
    _readers.disconnect(reader)
