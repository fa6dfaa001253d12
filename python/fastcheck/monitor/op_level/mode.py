"""sync="call" at op level: a dispatch mode in which the operator itself raises the stop."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Optional, Protocol

from torch.utils._python_dispatch import TorchDispatchMode

from fastcheck.utils.torch.transforms import take_off


class Judging(Protocol):
    """The part of op level that the mode uses."""

    @property
    def has_incidents(self) -> bool: ...

    def judge_now(self) -> bool: ...


class Captures(Protocol):
    """Keeps calls for a dump (``dump.captured``)."""

    def begin(self, func: Any, args: Any, kwargs: Any) -> Any: ...

    def end(self, call: Any, result: Any) -> None: ...

    def keep(self) -> None: ...


class CallMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has it untyped
    """A dispatch mode on the stack of the thread that called install(), and of those that run its
    backward, until the monitor is removed. The observer reads the operators as this mode calls
    them; what it finds is judged before they return.
    """

    def __init__(
        self, session: Judging, stops: Callable[[], None], captures: Optional[Captures] = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has it untyped
        # It may stay on the stack of another thread.
        self._session: Optional[weakref.ref[Judging]] = weakref.ref(session)
        self._stops = weakref.ref(stops)
        self._captures = captures

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        captures = self._captures
        call = None if captures is None else captures.begin(func, args, kwargs)
        out = func(*args, **kwargs)
        session = None if self._session is None else self._session()
        if session is not None and session.has_incidents:
            if captures is not None:
                captures.end(call, out)
            stops = self._stops() if session.judge_now() else None
            if stops is not None:
                stops()
            if captures is not None:
                captures.keep()
        return out

    def open(self) -> None:
        """Puts it on this thread's stack."""
        self.__enter__()  # type: ignore[no-untyped-call]  # torch has it untyped

    def close(self) -> None:
        """Takes it off, from under any other; on another thread's stack it stays, and does
        nothing. Idempotent.
        """
        self._session = self._captures = None
        take_off(self)
