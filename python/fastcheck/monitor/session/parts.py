"""Parts of what is observed that fail alone."""

from __future__ import annotations

from typing import Any, Callable, Optional

from fastcheck.monitor.session.session import Session


class Parts:
    """Parts that steps do without: where one fails, only it is switched off."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._off: set[str] = set()
        #: All of them are.
        self.are_off = False

    def __call__(self, what: str, method: Callable[..., Optional[bool]], *args: Any) -> bool:
        try:
            return what not in self._off and bool(method(*args))
        except Exception as error:
            self._off.add(what)
            self._session.report_internal_error(what, error)
            return False
