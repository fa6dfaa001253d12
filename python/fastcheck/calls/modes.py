"""Dispatch and function modes of torch that see each operator and each call of its Python API."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Callable, Optional, Protocol

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fastcheck.utils.names.api import CALLS_WITHIN, api_of, intern_call
from fastcheck.utils.torch.own_operators import is_unobserved
from fastcheck.utils.torch.versions import is_compiling

#: The method of tensors that are of no subclass.
PLAIN_DISPATCH = torch.Tensor.__torch_dispatch__


_DETACH = torch.ops.aten.detach.default


def is_passed_by(func: Any) -> bool:
    """True if a call is no part of the program: autograd detaches each tensor that it keeps,
    profiler operators mark the timeline, and those of ``prim`` ask a subclass for its device.
    """
    return func is _DETACH or func.namespace in ("profiler", "prim")


def is_fake(types: Iterable[type]) -> bool:
    """True if a FakeTensor is among the types of a call. It has no values, and its handler refuses
    calls as long as its mode is not on top; so a mode calls the operator itself.
    """
    return any(kind.__name__ == "FakeTensor" for kind in types)


class OpMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has it untyped
    """``run(func, args, kwargs)`` is called for every operator in its place.
    ``pass_by(func)`` is called for a higher-order operator; those inside it are not seen.
    ``pass_by_fake(func)`` for an operator that computes with tensors that have no values.
    """

    # The operators inside these are not seen, but without this torch refuses to run them.
    supports_higher_order_operators = True

    def __init__(
        self,
        run: Callable[[Any, Any, Any], Any],
        pass_by: Callable[[Any], None] = lambda func: None,
        pass_by_fake: Callable[[Any], None] = lambda func: None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has it untyped
        self._run = run
        self._pass_by = pass_by
        self._pass_by_fake = pass_by_fake

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_unobserved():
            return func(*args, **kwargs)
        if not isinstance(func, torch._ops.OpOverload):
            self._pass_by(func)
            return func(*args, **kwargs)
        for kind in types:
            if kind.__torch_dispatch__ is not PLAIN_DISPATCH:
                if is_fake(types):
                    self._pass_by_fake(func)
                    return func(*args, **kwargs)
                # It calls the operator again for the plain tensors below, which is what to see.
                return NotImplemented
        if is_passed_by(func):
            return func(*args, **kwargs)
        return self._run(func, args, kwargs)


class _CurrentApi(threading.local):
    def __init__(self) -> None:
        self.current = ("", -1)
        self.counts: Counter[str] = Counter()


class ApiListener(Protocol):
    """Callbacks around each call of the API; ``begun()`` returns what ``ended()`` is given, None of
    a call whose end is not told.
    """

    def begun(self, name: str, call: int, args: Any, kwargs: Mapping[str, Any]) -> Any: ...

    def ended(self, token: Any, result: Any) -> None: ...


class ApiCalls(TorchFunctionMode):
    """Tracks which function of torch's Python API runs, and numbers its calls. A function that
    another function calls is part of that call and has no number.

    A context manager, or open() and close(), which need not nest with other modes. ``set_api``: is
    given the number of each call's name (names.api.intern_call) as it begins, and -1 as it ends.
    """

    def __init__(
        self,
        set_api: Optional[Callable[[int], None]] = None,
        listener: Optional[ApiListener] = None,
    ) -> None:
        super().__init__()
        self._listener = listener
        self._local = _CurrentApi()
        self._set_api = set_api
        self._is_open = True

    @property
    def current(self) -> tuple[str, int]:
        """The name and number of the running call; ("", -1) where none is running."""
        return self._local.current

    def open(self) -> None:
        """Puts the mode on the stack of this thread."""
        self._is_open = True
        self.__enter__()  # type: ignore[no-untyped-call]  # torch has no types

    def close(self) -> None:
        """Takes the mode off the stack; under another mode it stays there and does nothing.
        Idempotent.
        """
        if self._is_open:
            self._is_open = False
            depth = torch._C._len_torch_function_stack()
            if depth and torch._C._get_function_stack_at(depth - 1) is self:
                self.__exit__(None, None, None)

    def reset(self) -> None:
        """Calls are numbered from 0 again, in all threads."""
        self._local = _CurrentApi()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_compiling():  # Dynamo traces this function, and must not find anything in it
            return func(*args, **kwargs)
        name = "" if not self._is_open or is_unobserved() else api_of(func)
        if not name:
            within = CALLS_WITHIN.get(func) if self._is_open and not is_unobserved() else None
            # A class of the program's may have a handler of its own for this method.
            if within is None or any(kind is not torch.Tensor for kind in types):
                return func(*args, **kwargs)
            try:
                with self:
                    return within(*args, **kwargs)
            except TypeError:  # as what wraps it
                return NotImplemented
        local, set_api = self._local, self._set_api
        before = local.current
        try:
            local.current = (name, local.counts[name])
            local.counts[name] += 1
            if set_api is not None:
                set_api(intern_call(*local.current))
            if self._listener is None:
                return func(*args, **kwargs)
            token = self._listener.begun(*local.current, args, kwargs)
            result = func(*args, **kwargs)
            if token is not None:
                self._listener.ended(token, result)
            return result
        finally:
            local.current = before
            if set_api is not None:
                set_api(-1)
