"""Records what every operator reads and writes (``level="op"``): PythonOpCalls in Python;
RecordedOpCalls in C++, where nothing but records is wanted, the same bytes in less time.
"""

from __future__ import annotations

from types import MethodType
from typing import Any, Optional

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastcheck.calls.modes import PLAIN_DISPATCH, ApiCalls, OpMode, is_fake, is_passed_by
from fastcheck.calls.module_calls import ModuleNode
from fastcheck.calls.namer import CallNamer, recomputes
from fastcheck.calls.selection import Selection
from fastcheck.calls.tracker import CallListener, ModuleTracker, Running
from fastcheck.dump.storage.files import json_text
from fastcheck.record.format import Flag
from fastcheck.record.site import OUTSIDE, Site
from fastcheck.utils.torch.memory_ref import WeakStorage, storage_of
from fastcheck.utils.torch.operators import (
    describe_tensor,
    inputs_of,
    op_info,
    others_of,
    outputs_of,
    plain_value,
)

from .dump_writer import DumpSession, module_line
from .reference import OpCall, Reference


class FreshMemory:
    """Storages by the address of their StorageImpl, which is held weakly: no other gets it."""

    def __init__(self) -> None:
        # Bytes that were not written yet, by storage.
        self._left: dict[int, int] = {}
        self._references: dict[int, WeakStorage] = {}

    def add(self, tensor: torch.Tensor) -> None:
        """``tensor`` was allocated."""
        storage = storage_of(tensor)
        if storage is None or not storage.nbytes():
            return
        key = int(storage._cdata)
        self._left[key] = storage.nbytes()
        if key not in self._references:
            self._references[key] = WeakStorage(storage)

    def is_fresh(self, tensor: torch.Tensor) -> bool:
        """True if a part of the tensor's storage may be uninitialised."""
        if not self._left:
            return False
        storage = storage_of(tensor)
        return storage is not None and int(storage._cdata) in self._left

    def wrote(self, tensor: torch.Tensor, is_overwriting: bool) -> None:
        """Notes that an op has written to the whole tensor, or to a part of it."""
        if not self._left:
            return
        storage = storage_of(tensor)
        key = -1 if storage is None else int(storage._cdata)
        if key not in self._left:
            return
        if is_overwriting:
            self._left[key] -= tensor.numel() * tensor.element_size()
        # A partial write is taken as intentional: the storage no longer counts as uninitialised.
        if not is_overwriting or self._left[key] <= 0:
            del self._left[key]

    def clear(self) -> None:
        self._left.clear()
        self._references.clear()


class OpCalls(CallListener):
    """A dump of calls of operators: what the recorder in C++ and the way in Python share."""

    def __init__(self, session: DumpSession, selection: Selection) -> None:
        self.session = session
        self._selection = selection

    def mode(self) -> Any:
        """The mode of torch's dispatcher that sees the operators."""
        raise NotImplementedError

    def forget(self) -> None:
        """Discards cached readings: an unobserved operator may have written to any tensor."""

    def close(self) -> None:
        """Releases everything that was kept for later calls."""

    def entered(self, running: Running, inputs: list[tuple[str, torch.Tensor]], args: Any) -> None:
        """Records the inputs of a root module: the batch."""
        if not running.is_root or not self._selection.is_all:
            return
        line = module_line(running.node.path, running.node.type_name, "forward", running.call)
        line["in"] = self.session.entries(running, "input", inputs)
        self.session.add_call(line)

    def pass_by(self, func: object) -> None:
        """Counts a higher-order operator as left out."""
        why = "a higher-order operator: what it runs is not seen"
        self.session.guarded("an operator", self._leave_out, func, why)

    def pass_by_fake(self, func: object) -> None:
        """Counts an operator on FakeTensors as left out."""
        self.session.guarded("an operator", self._leave_out, func, "fake tensors have no values")

    def _leave_out(self, func: object, why: str) -> None:
        with self.session.lock:
            self.session.leave_out(str(func), why)
            self.forget()


class PythonOpCalls(OpCalls):
    """Records calls in Python: values, lists of names and a reference are possible here."""

    def __init__(
        self,
        session: DumpSession,
        selection: Selection,
        tracker: ModuleTracker,
        apis: Optional[ApiCalls],
        reference: Optional[Reference],
    ) -> None:
        super().__init__(session, selection)
        self._namer = CallNamer(tracker, apis)
        self._reference = reference
        self._fresh = FreshMemory()
        self._sites: dict[tuple[object, ...], int] = {}

    def close(self) -> None:
        self._fresh.clear()

    def mode(self) -> OpMode:
        return OpMode(self.run, self.pass_by, self.pass_by_fake)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs the operator and records its inputs and outputs."""
        if not self.session.is_on:
            return func(*args, **kwargs)
        call = self.session.guarded("an operator", self.begin, func, args, kwargs)
        result = func(*args, **kwargs)
        if call is not None:
            self.session.guarded("an operator", self.end, call, args, kwargs, result)
        return result

    def begin(self, func: Any, args: Any, kwargs: Any) -> Optional[OpCall]:
        """Records the inputs before the operator runs; None when the call is not dumped."""
        info = op_info(func)
        with self.session.lock:
            named = self._namer.name(info.name)
            flags = int(Flag.RECOMPUTE) if named.is_recompute else 0
            call = OpCall(func, info, named.name, named.node, named.forward, flags)
            was_within = None if call.forward is None else call.forward.was_within
            is_wanted = self._selection.wants(call.name, was_within)
            if call.name.direction == "forward":
                self._namer.register(named, self._selection.is_within)
            if not is_wanted:
                # The call's writes to uninitialised memory count all the same.
                call.is_wanted = False
                return call if info.is_allocation or info.written else None
            self._read_inputs(call, args, kwargs)
            return call

    def _read_inputs(self, call: OpCall, args: Any, kwargs: Any) -> None:
        info = call.info
        reads_values = not (info.is_view or info.ignores_values or info.is_allocation)
        is_named = not self._selection.is_all
        for place, label, tensor in inputs_of(info, args, kwargs):
            entry = {"label": label, **describe_tensor(tensor)}
            call.inputs.append(entry)
            is_written = place in info.written
            if is_written and info.overwrites:
                entry["is_overwritten"] = True
            elif self._fresh.is_fresh(tensor):
                entry["problem"] = "memory that nothing was written to yet"
                call.skipped = call.skipped or "it reads memory that nothing was written to yet"
            elif reads_values or (is_named and info.is_view):
                entry.update(self._read(call, "input", label, place, tensor))

    def end(self, call: OpCall, args: Any, kwargs: Any, result: Any) -> None:
        """Records the outputs after the operator has run."""
        info = call.info
        with self.session.lock:
            for place, _, tensor in inputs_of(info, args, kwargs) if info.written else ():
                if place in info.written:
                    self._fresh.wrote(tensor, info.overwrites)
            made = outputs_of(info, args, kwargs, result)
            if info.is_allocation:
                for tensor in made:
                    self._fresh.add(tensor)
            if not call.is_wanted:
                return
            outputs = []
            is_view = info.is_view and self._selection.is_all
            for position, tensor in enumerate(made):
                label = "output" if not position else f"output[{position}]"
                entry = {"label": label, **describe_tensor(tensor)}
                outputs.append(entry)
                if not info.overwrites and self._fresh.is_fresh(tensor):
                    entry["problem"] = "memory that nothing was written to yet"
                elif info.is_unfinished:
                    entry["problem"] = "memory that a collective may still write to"
                elif not is_view:
                    entry.update(self._read(call, "output", label, position, tensor))
            number = self.session.add_call(self._line(call, args, kwargs, outputs))
        if self._reference is not None:
            self._reference.take(number, call, args, kwargs, made)

    def _read(
        self, call: OpCall, role: str, label: str, place: int, tensor: torch.Tensor
    ) -> dict[str, Any]:
        name = call.name
        site_role, site_label, index = role, label, place
        if name.direction == "backward":
            site_role = "grad_output" if role == "input" else "grad_input"
            if call.forward is not None:
                if role == "output":
                    index = call.forward.next_made()
                site_label = f"{site_role}[{index}] ({call.info.name})"
        site = self._site(call, site_role, site_label, index)
        return self.session.records.read(tensor, site, name.call, call.flags)

    def _site(self, call: OpCall, role: str, label: str, index: int) -> int:
        node, name = call.node, call.name
        key = (None if node is None else id(node), name.op, name.direction, role, label)
        number = self._sites.get(key)
        if number is None:
            path, kind = ("", OUTSIDE) if node is None else (node.path, node.type_name)
            site = Site(path, kind, name.direction, role, index, label, name.op)
            number = self._sites[key] = self.session.sites.intern(site)
        return number

    def _line(
        self, call: OpCall, args: Any, kwargs: Any, outputs: list[dict[str, Any]]
    ) -> dict[str, Any]:
        node, name, info = call.node, call.name, call.info
        line: dict[str, Any] = {
            "kind": "op",
            "op": name.op,
            "call": name.call,
            "direction": name.direction,
            "module": "" if node is None else node.path,
            "type": OUTSIDE if node is None else node.type_name,
            "in": call.inputs,
            "out": outputs,
        }
        if call.forward is not None:
            line["ran"] = info.name
        if name.api:
            line["api"] = f"{name.api}.{name.api_call}"
        others = others_of(info, args, kwargs)
        if others:
            line["args"] = others
        for word, holds in (
            ("view", info.is_view),
            ("in_place", bool(info.written)),
            ("recompute", bool(call.flags)),
        ):
            if holds:
                line[word] = True
        return line


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
    """Dumps all calls of operators, by the recorder in C++; ``make()`` returns an instance, to
    which the recorder leaves what it can't do (csrc/torch/dump/module.h).
    """

    @classmethod
    def make(cls, session: DumpSession, selection: Selection) -> Optional[RecordedOpCalls]:
        """A recorder of this dump; None where only Python can do it."""
        calls = cls(session, selection) if selection.is_all else None
        return None if calls is None or calls._recorder is None else calls

    def __init__(self, session: DumpSession, selection: Selection) -> None:
        super().__init__(session, selection)
        self._recorder: Any = session.records.op_recorder(self)

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

    # The calls of the recorder

    recomputes = staticmethod(recomputes)
    is_fake = staticmethod(is_fake)
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
        return _within(self.session.records.read(tensor, site, call, flags))


def _within(fields: dict[str, Any]) -> str:
    """The JSON text of an object, without its braces."""
    return json_text(fields)[1:-1]
