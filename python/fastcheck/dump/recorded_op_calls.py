"""RecordedOpCalls: records all operators of a block in C++, where nothing but records is wanted. It
writes the same bytes as PythonOpCalls, in less time.
"""

from __future__ import annotations

from types import MethodType
from typing import Any, Optional

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastcheck.calls.modes import PLAIN_DISPATCH, is_fake, is_passed_by
from fastcheck.calls.module_calls import ModuleNode
from fastcheck.calls.namer import recomputes
from fastcheck.calls.selection import Selection
from fastcheck.dump.storage.files import json_text
from fastcheck.record.site import OUTSIDE, Site
from fastcheck.utils.torch.operators import describe_tensor, plain_value

from .dump_writer import DumpSession
from .python_op_calls import OpCalls


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has it untyped
    """A dispatch mode whose __torch_dispatch__ is the recorder's dispatch()."""

    supports_higher_order_operators = True

    def __init__(self, recorder: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has it untyped
        # Not a method of the class: torch would wrap it in a frame of Dynamo's, which takes longer
        # than all that the recorder does beside reading. Bound, because torch asks whose it is;
        # mypy expects a method of the class.
        self.__torch_dispatch__ = MethodType(recorder.dispatch, self)  # type: ignore[method-assign]  # torch looks it up on the instance: no Python frame for each operator


class RecordedOpCalls(OpCalls):
    """Dumps all calls of operators, by the recorder in C++; ``make()`` returns an instance."""

    @classmethod
    def make(cls, session: DumpSession, selection: Selection) -> Optional[RecordedOpCalls]:
        """A recorder of this dump; None where only Python can do it."""
        if not selection.is_all:
            return None
        fallback = _PythonFallback(session)
        recorder = session.op_recorder(fallback)
        if recorder is None:
            return None
        fallback.calls = cls(session, selection, recorder)
        return fallback.calls

    def __init__(self, session: DumpSession, selection: Selection, recorder: Any) -> None:
        super().__init__(session, selection)
        self._recorder = recorder

    def mode(self) -> Any:
        return _Mode(self._recorder)

    def moved(self, node: Optional[ModuleNode], is_recompute: bool, is_in_optimizer: bool) -> None:
        self._recorder.move(node, is_recompute, is_in_optimizer)

    def forget(self) -> None:
        self._recorder.forget()

    def close(self) -> None:
        with self.session.lock:
            self.session.reused_count = self._recorder.reused
            # Cleared at once: what is left of the storages would lie scattered in what training
            # allocates next.
            self._recorder.clear()


class _PythonFallback:
    """The calls that the recorder leaves to Python (csrc/torch/dump/module.h)."""

    def __init__(self, session: DumpSession) -> None:
        self.session = session
        self.calls: Optional[RecordedOpCalls] = None

    recomputes = staticmethod(recomputes)
    plain_dispatch = PLAIN_DISPATCH

    def operator(self, func: Any) -> Any:
        if not isinstance(func, torch._ops.OpOverload):
            return None
        if is_passed_by(func):
            return func
        schema = func._schema
        try:  # what only subclasses are asked (aten::sym_size) is known to Python alone
            torch._C._dispatch_find_schema_or_throw(schema.name, schema.overload_name)
        except RuntimeError:
            return func
        is_plain = type(func) is torch._ops.OpOverload
        return schema.name, schema.overload_name, func._op if is_plain else func

    def pass_by(self, func: Any) -> None:
        assert self.calls is not None
        self.calls.pass_by(str(func))

    is_fake = staticmethod(is_fake)

    def pass_by_fake(self, func: Any) -> None:
        assert self.calls is not None
        self.calls.pass_by_fake(str(func))

    def add_line(self, text: str) -> None:
        self.session.add_line(text)

    def failed(self, error: Exception) -> None:
        self.session.failed("an operator", error)

    def module_text(self, node: Any) -> tuple[str, str]:
        if node is None:
            return json_text(""), json_text(OUTSIDE)
        return json_text(node.path), json_text(node.type_name)

    def site(self, node: Any, op: str, direction: str, role: str, index: int, label: str) -> int:
        path, kind = ("", OUTSIDE) if node is None else (node.path, node.type_name)
        return self.session.sites.intern(Site(path, kind, direction, role, index, label, op))

    def plain_text(self, value: Any) -> str:
        return json_text(plain_value(value))

    def tensor_text(self, tensor: torch.Tensor) -> str:
        return _within(describe_tensor(tensor))

    def read_text(self, tensor: torch.Tensor, site: int, call: int, flags: int) -> str:
        return _within(self.session.read(tensor, site, call, flags))


def _within(fields: dict[str, Any]) -> str:
    """The JSON text of an object, without its braces."""
    return json_text(fields)[1:-1]
