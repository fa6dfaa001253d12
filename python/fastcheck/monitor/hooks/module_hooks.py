"""ForwardPreHook, ForwardHook and GradientHook, which are registered on modules and tensors.

A copy of one (deepcopy, pickle) does nothing, whatever it is called with. Each passes its call to
the recorder in C++ first, and to the ModuleObserver (``module_observer.py``) where the recorder has
left it undone.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from multiprocessing.context import get_spawning_popen
from typing import Any, Callable, Optional, Protocol

import torch

from fastcheck.calls.module_calls import Call, ModuleNode, ModuleRecorder
from fastcheck.monitor.session.config import Config
from fastcheck.monitor.session.session import Session
from fastcheck.utils.torch.flatten import flatten, flatten_arguments
from fastcheck.utils.torch.sparse import values_of
from fastcheck.utils.torch.transforms import in_transform, untransformed, unwrapped
from fastcheck.utils.torch.versions import is_compiling, is_dynamo_compiling

from .hook_support import look_again, warn_of_copy
from .traced import Traced, trace_enter, trace_leave


class CallObserver(Protocol):
    """What a hook needs of the ModuleObserver."""

    @property
    def session(self) -> Session: ...

    def enter(
        self, node: ModuleNode, inputs: list[tuple[str, torch.Tensor]], traced: Optional[Traced], /
    ) -> Any: ...

    def leave(
        self, node: ModuleNode, outputs: list[tuple[str, torch.Tensor]], traced: Optional[Traced], /
    ) -> Any: ...

    def failed(self, node: ModuleNode, error: Exception, /) -> None: ...

    def deliver(self) -> None: ...

    def gradient_came(self, hook: GradientHook, gradient: torch.Tensor, /) -> None: ...


class _ModuleHook:
    """What a module holds. A copy of the module (deepcopy, pickle) holds one that does nothing."""

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
        observer: Optional[CallObserver] = None,
        node: Optional[ModuleNode] = None,
        recorder: Optional[ModuleRecorder] = None,
    ) -> None:
        self._observer = observer
        self._node = node
        self._recorder = recorder
        # How compiled code finds the two; None: it is not observed.
        self.address: Optional[torch.Tensor] = None
        self.is_outermost = False
        # Whether another module calls it too.
        self.was_carried = False
        # The process that sent it to this one, which it started; 0: none did.
        self.came_from = 0

    def __deepcopy__(self, memo: Mapping[int, Any]) -> _ModuleHook:
        return type(self)()

    def __reduce__(self) -> tuple[Any, ...]:
        # A process that is being started may train its copy; a file is loaded for anything.
        is_sent = get_spawning_popen() is not None
        return _unpickled, (type(self), os.getpid() if is_sent else 0)

    def is_of(self, config: Config) -> bool:
        """Whether it belongs to a monitor with these options that was not removed."""
        observer = self._observer
        if observer is None or observer.session.removed:
            return False
        return observer.session.config == config

    def _is_carried(self, module: torch.nn.Module) -> bool:
        """Whether ``module``, which has called it without kwargs, is another than the one that it
        was registered on: ``torch.ao.quantization`` registers the hooks of a module anew, and
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
        """Has the observer do it, where the recorder does not."""
        observer, node = self._observer, self._node
        if observer is None or node is None or not node.enabled or is_compiling():
            if self.came_from and not is_compiling():
                warn_of_copy(self.came_from)
            return
        try:
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

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...] = (), *rest: Any) -> None:
        """``rest``: kwargs and the output, or the output alone."""
        if len(rest) < 2 and self._is_carried(module):
            return
        output = rest[-1] if rest else None
        if is_dynamo_compiling():
            if self.address is not None:
                trace_leave(self.address, args, rest[0] if len(rest) > 1 else {}, output)
            return
        recorder = self._recorder
        if recorder is None or not recorder.leave(output):
            self._attend(_leave, output)


def _enter(
    observer: CallObserver, node: ModuleNode, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    _pass(observer.enter, node, flatten_arguments(args, kwargs))


def _leave(observer: CallObserver, node: ModuleNode, output: Any) -> None:
    _pass(observer.leave, node, flatten(output, "output"))


def _pass(
    method: Callable[..., Any], node: ModuleNode, tensors: list[tuple[str, torch.Tensor]]
) -> None:
    if in_transform():
        with untransformed():
            plain = [(label, unwrapped(tensor)) for label, tensor in tensors]
            method(node, plain, None)
    elif any(tensor.layout is not torch.strided for _, tensor in tensors):
        # Under another name: the recorder has no site for the tensor itself, and leaves it to us.
        method(node, [_values_of(label, tensor) for label, tensor in tensors], None)
    else:
        method(node, tensors, None)


def _values_of(label: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """What a sparse tensor holds; any other as it is."""
    values = values_of(tensor)
    return (label, tensor) if values is None else (f"{label}.values", values)


class GradientHook:
    """What the autograd graph of an observed tensor holds; does nothing once the monitor is gone or
    removed.
    """

    __slots__ = ("_observer", "call", "role", "site", "token")

    def __init__(
        self, observer: CallObserver, call: Call, role: str, site: int, token: int
    ) -> None:
        self._observer = weakref.ref(observer)
        self.call = call
        self.role = role
        self.site = site
        self.token = token

    def __call__(self, gradient: torch.Tensor) -> None:
        observer = self._observer()
        if observer is not None:
            observer.gradient_came(self, gradient)
