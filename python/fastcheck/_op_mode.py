"""sync="call" at op level: a dispatch mode, under which a stop is raised by the very operator."""

from __future__ import annotations

import weakref
from typing import Any, Optional, Protocol

from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

__all__ = ["CallMode"]


class Judging(Protocol):
    """The session, as far as the mode knows it."""

    @property
    def has_incidents(self) -> bool: ...

    def judge_now(self) -> None: ...


class CallMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """On the stack of the thread that called install(), and of those that run its backward, until
    the monitor is removed. The observer reads the operators as this mode calls them; what it finds
    is judged before they return.
    """

    def __init__(self, session: Judging) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._session: Optional[weakref.ref[Judging]] = weakref.ref(session)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        session = None if self._session is None else self._session()
        if session is not None and session.has_incidents:
            session.judge_now()
        return out

    def open(self) -> None:
        """Puts it on this thread's stack."""
        self.__enter__()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def close(self) -> None:
        """Takes it off, from under any other; on another thread's stack it stays, and does
        nothing. Idempotent.
        """
        self._session = None
        stack = _get_current_dispatch_mode_stack()
        if stack and stack[-1] is self:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # the same
            return
        if not any(mode is self for mode in stack):
            return
        above: list[Any] = []
        while (mode := _pop_mode()) is not self:
            above.append(mode)
        for mode in reversed(above):
            _push_mode(mode)
