"""All operators of a block, recorded in C++: what PythonOpCalls does where nothing but records is
wanted, in a part of the time. The two write the same bytes.
"""

from __future__ import annotations

from typing import Any, Optional

import torch

from .._naming import OUTSIDE
from .._site import Site
from .arguments import describe, plain
from .dispatch import recomputes
from .files import json_text
from .modules import ModuleTracker
from .op_calls import OpCalls
from .op_info import op_info
from .selection import Selection
from .session import DumpSession

__all__ = ["RecordedOpCalls"]


class RecordedOpCalls(OpCalls):
    """For a selection that is all there is. ``make()`` gives one."""

    @classmethod
    def make(
        cls, session: DumpSession, selection: Selection, tracker: ModuleTracker
    ) -> Optional[RecordedOpCalls]:
        """None: this dump is for Python."""
        recorder = session.op_recorder(_Seldom(session)) if selection.is_all else None
        return None if recorder is None else cls(session, selection, tracker, recorder)

    def __init__(
        self, session: DumpSession, selection: Selection, tracker: ModuleTracker, recorder: Any
    ) -> None:
        super().__init__(session, selection)
        self._tracker = tracker
        self._recorder = recorder

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        # In one piece: each frame of Python's counts here, behind an operator that has emptied the
        # caches.
        session, call = self.session, None
        if session.is_closed or session.problem:
            return func(*args, **kwargs)
        try:
            with session.lock:
                call = self._recorder.begin(func, args, kwargs, *self._tracker.whereabouts)
        except Exception as error:
            session.failed("an operator", error)
        result = func(*args, **kwargs)
        if call is None:
            return result
        try:
            with session.lock:
                line = self._recorder.end(call, args, kwargs, result, session.call_count)
                session.add_line(line)
        except Exception as error:
            session.failed("an operator", error)
        return result

    def forget(self) -> None:
        self._recorder.forget()

    def close(self) -> None:
        with self.session.lock:
            self.session.reused_count = self._recorder.reused
            # Now: what is left of the storages lies scattered between what training allocates next.
            self._recorder.clear()


class _Seldom:
    """What the recorder leaves to Python (csrc/torch/dump/module.h)."""

    def __init__(self, session: DumpSession) -> None:
        self._session = session

    op_info = staticmethod(op_info)
    recomputes = staticmethod(recomputes)

    def module_text(self, node: Any) -> tuple[str, str]:
        if node is None:
            return json_text(""), json_text(OUTSIDE)
        return json_text(node.path), json_text(node.type_name)

    def site(self, node: Any, op: str, direction: str, role: str, index: int, label: str) -> int:
        path, kind = ("", OUTSIDE) if node is None else (node.path, node.type_name)
        return self._session.sites.intern(Site(path, kind, direction, role, index, label, op))

    def plain_text(self, value: Any) -> str:
        return json_text(plain(value))

    def tensor_text(self, tensor: torch.Tensor) -> str:
        return _within(describe(tensor))

    def read_text(self, tensor: torch.Tensor, site: int, call: int, flags: int) -> str:
        return _within(self._session.read(tensor, site, call, flags))


def _within(fields: dict[str, Any]) -> str:
    """The JSON of an object without its braces."""
    return json_text(fields)[1:-1]
