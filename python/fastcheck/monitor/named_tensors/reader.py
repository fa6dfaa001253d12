"""Reads the tensors of observe() for one monitor at module level."""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any, Callable, Optional

import torch

from fastcheck.calls.module_calls import Call, ModuleNode, new_call
from fastcheck.errors import warn
from fastcheck.monitor.hooks.module_observer import ModuleObserver
from fastcheck.monitor.hooks.traced import Traced
from fastcheck.record.format import Flag
from fastcheck.ring.reader import IS_BAD, IS_NEW, TOKEN_SHIFT
from fastcheck.utils.torch.readable import can_read, may_be_in_flight
from fastcheck.utils.torch.streams import streams_of
from fastcheck.verdict.entries import Gradient, Named

# A name that holds the number of the step would never come again.
_MAX_NAMES = 4096

_numbers = itertools.count()

# What the nodes of names refer to, in the place of a module.
_NO_MODULE = torch.nn.Identity()


class NamedTensors:
    """The tensors that observe() names, of one monitor."""

    def __init__(self, observer: ModuleObserver) -> None:
        self.observer = observer
        #: Counts up with each monitor.
        self.number = next(_numbers)
        self._session = observer.session
        # By the path of the module that runs and by the name; the last one of each name.
        self._nodes: dict[tuple[str, str], ModuleNode] = {}
        self._last: dict[str, ModuleNode] = {}
        self._off: set[str] = set()
        self.on_close: Callable[[NamedTensors], None] = lambda reader: None

    def close(self) -> None:
        """The monitor is removed."""
        self.on_close(self)

    @property
    def is_running(self) -> bool:
        """Whether a module of this monitor is running in this thread."""
        return not self._session.removed and bool(self.observer.running)

    def is_repeated(self, name: str) -> bool:
        """Whether this may be a recomputation, in which no module is called."""
        return name in self._last and _is_in_backward()

    def read(
        self, name: str, tensor: torch.Tensor, traced: Optional[Traced]
    ) -> Optional[NamedGradient]:
        """Reads the tensor, unless the step passes unread. Raises a stop that is due, and nothing
        else. ``traced``: within compiled code; then what has to be called with the gradient is
        returned.
        """
        session, found = self._session, None
        if session.removed or name in self._off:
            return None
        try:
            with session.lock:
                if not session.removed and self._is_readable(name, tensor):
                    found = self._read(name, tensor, traced)
                    if session.settles_calls:
                        session.settle_call()
        except Exception as error:
            self._off.add(name)
            session.report_internal_error(f"observe({name!r})", error)
        if session.event_store.due:
            try:
                session.deliver()
            except BaseException:
                if traced is not None:
                    self.observer.abandon_traced()
                raise
        return found

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
                self._session.notes[f"observe({name!r}): {problem}"] = None
        return not problem

    def _read(
        self, name: str, tensor: torch.Tensor, traced: Optional[Traced]
    ) -> Optional[NamedGradient]:
        session, stack = self._session, self.observer.running
        if not stack and not _is_in_backward():
            if session.is_paused:
                return None
            session.begin_pass()
        if not session.is_active:
            return None
        parent = stack[-1] if stack else None
        call = self._call(name, None if parent is None else parent.node, parent)
        flags = int(Flag.RECOMPUTE) if call.is_recompute else 0
        site = call.node.site("output", "output", 0)
        code = session.read(tensor, site, call.index, flags, True)
        if code < 0:
            return None
        seq = token = code >> TOKEN_SHIFT
        is_bad = None if session.is_deferred else bool(code & IS_BAD)
        if code & IS_NEW:
            call.add_output(token)
            session.step.calls.add(call)
        else:  # a module has returned it, say: once more, under this name
            seq, is_bad = session.observe(tensor, site, call.index, flags)
        session.saw(Named(seq, call, session.follows_gap, session.has_excluded), is_bad)
        return self._watch(tensor, call, token, traced)

    def _call(self, name: str, module: Optional[ModuleNode], parent: Optional[Call]) -> Call:
        session, in_backward = self._session, _is_in_backward()
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
            node = ModuleNode(full, _NO_MODULE, self._session.sites, is_primary=False)
            node.type_name = "observe"
            self._nodes[path, name] = node
        return node

    # Gradients

    def _watch(
        self, tensor: torch.Tensor, call: Call, token: int, traced: Optional[Traced]
    ) -> Optional[NamedGradient]:
        needs = tensor.requires_grad if traced is None else traced.needs_gradient(0)
        if not needs or isinstance(tensor, torch.nn.Parameter):
            return None
        hook = NamedGradient(self, call, call.node.site("grad_output", "output", 0), token)
        if traced is None:
            watch: Any = tensor.register_hook  # torch leaves it untyped
            handle = watch(hook)
            if tensor.is_leaf:
                self._session.step.leaf_handles.append(handle)
        return hook

    def gradient_came(self, hook: NamedGradient, gradient: torch.Tensor) -> None:
        """Training goes on whatever happens here, but for a stop."""
        session = self._session
        if session.removed:
            return
        try:
            with session.lock:
                if not session.removed:
                    session.begin_step_if_closed()
                    if session.is_active and can_read(gradient):
                        self._read_gradient(hook, gradient)
                        if session.settles_calls:
                            session.settle_call()
        except Exception as error:
            session.switch_off(hook.site, error)
        if session.event_store.due:
            session.deliver()

    def _read_gradient(self, hook: NamedGradient, gradient: torch.Tensor) -> None:
        session = self._session
        flags, call = self._gradient_flags(hook), hook.call.index
        code = session.read(gradient, hook.site, call, flags)
        if code < 0:
            return
        seq, is_bad = code >> TOKEN_SHIFT, None if session.is_deferred else bool(code & IS_BAD)
        session.step.gradients[hook.token] = seq
        if not code & IS_NEW:
            seq, is_bad = session.observe(gradient, hook.site, call, flags)
        scaled = session.is_scaled
        session.saw(Gradient(seq, hook.call, "grad_output", hook.token, scaled), is_bad)

    def _gradient_flags(self, hook: NamedGradient) -> int:
        flags = int(Flag.SCALED) if self._session.is_scaled else 0
        return flags | (int(Flag.RECOMPUTE) if hook.call.is_recompute else 0)


class NamedGradient:
    """What the autograd graph of a named tensor holds; does nothing once the monitor is gone or
    removed.
    """

    __slots__ = ("_reader", "call", "site", "token")

    def __init__(self, reader: NamedTensors, call: Call, site: int, token: int) -> None:
        self._reader = weakref.ref(reader)
        self.call = call
        self.site = site
        self.token = token

    def __call__(self, gradient: torch.Tensor) -> None:
        reader = self._reader()
        if reader is not None:
            reader.gradient_came(self, gradient)


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
