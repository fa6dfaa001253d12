"""Observation inside torch.compile: opaque ops that call the ordinary observer at run time.

Nothing that changes from step to step is part of a graph. Which monitor and which module is meant
comes in a small tensor, the *address*; step and call number are the observer's own. So ``every=``
never retraces, and layers that share one compilation share it still.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from types import FunctionType
from typing import Any, Callable, Optional

import torch

from fastcheck.calls.module_calls import Call, ModuleNode
from fastcheck.utils.torch.flatten import arguments_labelled

from . import traced
from .module_observer import ForwardHook, ForwardPreHook, GradientHook, ModuleObserver
from .traced import Traced

# Calls whose gradients may still come; those of older calls pass unread.
_MAX_CALLS = 16384

_SCHEMAS = (
    "module_enter(Tensor(a!) order, Tensor address, Tensor[] tensors, str[] labels, "
    "int[] positions, int[] bits, bool grad) -> Tensor",
    "module_leave(Tensor(a!) order, Tensor address, Tensor[] tensors, str[] labels, "
    "int[] positions, int[] bits, bool grad) -> Tensor",
    "gradient(Tensor call, Tensor gradient, str role, str label) -> ()",
)

_lock = threading.RLock()
_connections: dict[int, Connection] = {}
_library: Optional[torch.library.Library] = None
_is_available: Optional[bool] = None
# The configuration of torch before the first connection.
_before: list[tuple[Any, str, Any]] = []
_next_number = 1


class Connection:
    """The connection of one observer, which compiled code finds by its number."""

    def __init__(
        self,
        number: int,
        observer: ModuleObserver,
        nodes: Sequence[ModuleNode],
        compiled: dict[int, None],
    ) -> None:
        self.number = number
        self.observer = weakref.ref(observer)
        self.nodes = nodes
        # The modules that ran compiled, by their index.
        self.compiled = compiled
        self._calls: dict[int, Call] = {}
        self._next_call = 0
        self._first_runs: dict[tuple[int, int], int] = {}
        self._pending: dict[int, deque[int]] = {}
        self._passed: dict[int, set[tuple[str, str]]] = {}

    def address(self, index: int) -> torch.Tensor:
        """An input of the graphs that the module with this index is part of."""
        return integers(self.number, index)

    @property
    def modules(self) -> list[str]:
        """The names of the modules that ran compiled."""
        return [self.nodes[index].name for index in self.compiled]

    def remember(self, index: int, call: Optional[Call]) -> int:
        """A number that identifies the call for its gradients; -1: there will be none."""
        if call is None:
            return -1
        with _lock:
            if call.is_recompute:
                # Gradients belong to the first run, as they do in eager mode.
                return self._first_runs.get((index, call.index), -1)
            if not call.watched:
                return -1
            last = self._pending.setdefault(index, deque(maxlen=_MAX_CALLS))
            if last and self._calls.get(last[-1]) is call:
                return last[-1]
            number, self._next_call = self._next_call, self._next_call + 1
            self._calls[number] = call
            self._first_runs[index, call.index] = number
            last.append(number)
            if len(self._calls) > _MAX_CALLS:
                oldest = next(iter(self._calls))
                del self._calls[oldest]
                self._passed.pop(oldest, None)
            return number

    def call(self, number: int) -> Optional[Call]:
        """The call with this number."""
        return self._calls.get(number)

    def last_call(self, index: int, role: str, label: str) -> Optional[Call]:
        """The module's last call whose gradient for this tensor has not come: backward goes through
        them last call first.
        """
        with _lock:
            for number in reversed(self._pending.get(index, ())):
                call = self._calls.get(number)
                passed = self._passed.setdefault(number, set())
                if call is not None and (role, label) not in passed:
                    passed.add((role, label))
                    return call
        return None


def connect(
    observer: ModuleObserver, nodes: Sequence[ModuleNode], compiled: dict[int, None]
) -> Optional[Connection]:
    """Lets compiled code find the observer, which is held weakly, until it is gone or ``close()``,
    and add the index of each module that runs in it to ``compiled``.

    None where this torch can't do it: then nothing is observed inside compiled code. What was
    compiled before is compiled again at its next call: it would go on without the hooks.
    """
    global _next_number
    with _lock:
        if not _prepare():
            return None
        # Where a graph breaks, hooks run as other code does, and C++ calls methods of these.
        session = observer.session
        for part in (observer, session, session.level, session.event_store):
            methods = (vars(kind).values() for kind in type(part).__mro__[:-1])
            keep_out(*(f for group in methods for f in group if isinstance(f, FunctionType)))
        number, _next_number = _next_number, _next_number + 1
        connection = _connections[number] = Connection(number, observer, nodes, compiled)
        weakref.finalize(observer, disconnect, number)
        return connection


def is_available() -> bool:
    """True if connect() can serve, and was called."""
    return bool(_is_available)


def disconnect(number: int) -> None:
    """The opposite of connect(); does nothing the second time."""
    with _lock:
        if _connections.pop(number, None) is not None and not _connections:
            while _before:
                config, name, value = _before.pop()
                setattr(config, name, value)


def set_hook_id(handle: Any, number: int) -> None:
    """Exchanges the id of a hook that was registered on a module a moment ago.

    Compiled code is valid for the ids of ``always_call`` hooks only: with one id per module, layers
    of one class could not share their compilation, so all hooks of a monitor get the same. torch's
    own counter is not touched: other threads register hooks meanwhile, and where two of one tensor
    get the same id the second takes the place of the first.
    """
    references = (handle.hooks_dict_ref, *handle.extra_dict_ref)
    for hooks in (reference() for reference in references):
        if hooks is not None and handle.id in hooks:
            hooks[number] = hooks.pop(handle.id)
    handle.id = number


def keep_out(*functions: Callable[..., Any]) -> None:
    """Dynamo does not compile these by themselves, nor what they call. Inlined they still are."""
    from torch._C._dynamo.eval_frame import (
        _FrameAction,
        _FrameExecStrategy,
        set_code_exec_strategy,
    )

    for function in functions:
        skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
        set_code_exec_strategy(function.__code__, skip)


def break_graphs(function: Any) -> Any:
    """Dynamo breaks a graph at calls of ``function``, and compiles neither it nor what it calls:
    torch.compiler.disable(), but that a call takes no longer where nothing is compiled.
    """
    try:
        keep_out(function)
    except ImportError:  # an older torch
        return torch.compiler.disable(function)  # type: ignore[no-untyped-call]  # torch has it untyped
    function._torchdynamo_disable = True
    return function


# ---- While compiled code runs -------------------------------------------------------------------


def integers(*values: int) -> torch.Tensor:
    """A tensor by which a graph passes numbers on."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.int64, device="cpu")


def _run(
    is_enter: bool,
    address: torch.Tensor,
    tensors: list[torch.Tensor],
    labels: list[str],
    traced: Traced,
) -> torch.Tensor:
    connection_number, index = address.tolist()
    connection = _connections.get(connection_number)
    observer = None if connection is None else connection.observer()
    if connection is None or observer is None:
        return integers(connection_number, index, -1)
    node, call = connection.nodes[index], None
    if node.enabled:
        connection.compiled[index] = None
        node.ran_compiled = True
        named = list(zip(labels, tensors))
        try:
            given = arguments_labelled(named) if is_enter else None
            held = () if given is None else ((*given, named, traced.is_grad_enabled),)
            call = (observer.enter if is_enter else observer.leave)(node, named, traced, *held)
        except Exception as error:
            node.enabled = False
            if is_enter:
                observer.abandon(node)
            observer.session.report_internal_error(f"the inputs and outputs of {node.name}", error)
    number = connection.remember(index, call)
    if observer.session.event_store.due:
        try:
            observer.deliver()
        except BaseException:
            # An exception raised here ends the compiled code, and none of its modules will return.
            observer.abandon_traced()
            raise
    return integers(connection_number, index, number)


def _module_op(is_enter: bool) -> Callable[..., torch.Tensor]:
    def run(
        order: torch.Tensor,
        address: torch.Tensor,
        tensors: list[torch.Tensor],
        labels: list[str],
        positions: list[int],
        bits: list[int],
        grad: bool,
    ) -> torch.Tensor:
        return _run(is_enter, address, tensors, labels, Traced(positions, bits, grad))

    return run


def _gradient(call: torch.Tensor, gradient: torch.Tensor, role: str, label: str) -> None:
    """``call`` is what the enter or leave op returned, or the address alone: the last call."""
    connection_number, index, *number = call.tolist()
    connection = _connections.get(connection_number)
    observer = None if connection is None else connection.observer()
    if connection is None or observer is None:
        return
    module_call = connection.call(*number) if number else connection.last_call(index, role, label)
    watched = None if module_call is None else (module_call.watched or {}).get((role, label))
    if module_call is not None and watched is not None:
        GradientHook(observer, module_call, role, *watched)(gradient)


# ---- Preparing torch ----------------------------------------------------------------------------


def _prepare() -> bool:
    global _is_available
    if _is_available is None:
        try:
            _define()
            keep_out(ForwardPreHook.__call__, ForwardHook.__call__)
            _is_available = True
        except Exception:  # an older torch, or a Python for which it can't compile
            _is_available = False
    if _is_available and not _before:
        _configure()
    return _is_available


def _define() -> None:
    global _library
    # A hook on a tensor that is made inside a graph breaks the graph if the second is missing.
    import torch._dynamo
    import torch._higher_order_ops.register_hook
    import torch._inductor.config

    dynamo: Any = torch._dynamo  # untyped
    dynamo.assume_constant_result(traced.scope)
    enter, leave, gradient = _SCHEMAS
    _library = define_ops(
        (enter, _module_op(True), 3), (leave, _module_op(False), 3), (gradient, _gradient, 0)
    )


def define_ops(*ops: tuple[str, Callable[..., Any], int]) -> torch.library.Library:
    """Defines ops that call back into Python: the schema of each, the function that it calls, and
    how many integers it returns in a tensor. The last integer belongs to the backward graph.
    """
    from torch._higher_order_ops.effects import _EffectType

    make: Any = torch.library.Library  # untyped
    library = make("fastcheck", "FRAGMENT")
    # A CUDA graph would replay everything else without it.
    tags = [tag for tag in (getattr(torch.Tag, "cudagraph_unsafe", None),) if tag is not None]
    for schema, implementation, count in ops:
        name = library.define(schema, tags=tags)
        library.impl(name, implementation, "CompositeExplicitAutograd")
        library.impl(name, torch.library.fallthrough_kernel, "Autograd")
        fake = functools.partial(_result, count)
        torch.library.register_fake(f"fastcheck::{name}", fake, lib=library)
    # The backward graph has nothing that it could write, but must keep it all the same.
    torch.library._register_effectful_op(f"fastcheck::{name}", _EffectType.ORDERED)
    made: torch.library.Library = library
    return made


def _result(count: int, *args: Any) -> Optional[torch.Tensor]:
    """A result without values, for what traces an op."""
    return torch.empty((count,), dtype=torch.int64, device="cpu") if count else None


def _configure() -> None:
    """Sets the options of torch.compile, from the first connection to the end of the last."""
    dynamo: Any = torch._dynamo.config
    inductor: Any = torch._inductor.config
    for config, name in (
        # Code that was compiled without hooks is not used for a module that has some.
        (dynamo, "skip_nnmodule_hook_guards"),
        # A tensor is known by its memory. Inductor would write another into it, unnoticed.
        (inductor, "inplace_buffers"),
        (inductor, "allow_buffer_reuse"),
    ):
        _before.append((config, name, getattr(config, name)))
        setattr(config, name, False)
    torch._dynamo.reset_code_caches()
