"""``level="op"``: what every operator reads and makes, by a mode of torch's dispatcher.

The mode sees the operators of the thread that entered it, and of backward wherever that runs:
autograd hands its thread's modes on to the threads of devices. Other threads of the program are not
seen.

Names are those of ``install(level="op")``: an operator of backward goes by the operator of the
forward pass that it is the backward of, told by the sequence number of autograd's node.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any, Optional

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .._calls import ModuleNode
from .._naming import OUTSIDE
from .._record import Flag
from .._site import Site
from .api_calls import ApiCalls
from .arguments import describe, inputs_of, others_of, outputs_of
from .fresh_memory import FreshMemory
from .modules import Listener, ModuleTracker, Running
from .op_info import OpInfo, op_info
from .records import is_quiet
from .reference import Reference
from .selection import CallName, Selection
from .session import DumpSession

__all__ = ["OpCalls", "OpMode"]

_PLAIN_DISPATCH = torch.Tensor.__torch_dispatch__
_DETACH = torch.ops.aten.detach.default
_current_node: Any = getattr(torch._C, "_current_autograd_node", lambda: None)
_next_sequence: Any = getattr(torch.autograd, "_get_sequence_nr", lambda: 0)
# Whoever runs a checkpointed function again has set hooks on what it saves.
_saved_tensor_hooks: Any = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignore: None
)


class OpMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands every operator to ``calls``; the operator itself runs as if nobody looked."""

    # What these run inside is not seen, but without this they would refuse to run.
    supports_higher_order_operators = True

    def __init__(self, calls: OpCalls) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        calls = self._calls
        if is_quiet() or not calls.session.is_on:
            return func(*args, **kwargs)
        if not isinstance(func, torch._ops.OpOverload):
            calls.session.guarded("an operator", calls.pass_by, str(func))
            return func(*args, **kwargs)
        for kind in types:
            if kind.__torch_dispatch__ is not _PLAIN_DISPATCH:
                # It calls the operator again for the plain tensors below, which is what to see.
                return NotImplemented
        if func is _DETACH or func.namespace == "profiler":
            # What autograd does to each tensor that it keeps, and marks in somebody's timeline.
            return func(*args, **kwargs)
        call = calls.session.guarded("an operator", calls.begin, func, args, kwargs)
        result = func(*args, **kwargs)
        if call is not None:
            calls.session.guarded("an operator", calls.end, call, args, kwargs, result)
        return result


class _Forward:
    """What backward has to know of a call of the forward pass."""

    __slots__ = ("_made", "_task", "name", "node", "was_within")

    def __init__(self, name: CallName, node: Optional[ModuleNode], was_within: bool) -> None:
        self.name = name
        self.node = node
        self.was_within = was_within
        self._task = self._made = -1

    def next_made(self) -> int:
        """Numbers what one run of its backward makes."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task, self._made = task, -1
        self._made += 1
        return self._made


class OpCall:
    """A call that is under way."""

    __slots__ = (
        "flags",
        "forward",
        "func",
        "info",
        "inputs",
        "is_wanted",
        "name",
        "node",
        "skipped",
    )

    def __init__(self, func: Any, info: OpInfo, name: CallName) -> None:
        self.func = func
        self.info = info
        self.name = name
        self.node: Optional[ModuleNode] = None
        self.forward: Optional[_Forward] = None
        self.flags = 0
        self.is_wanted = True
        self.inputs: list[dict[str, Any]] = []
        # Why the reference can't take it.
        self.skipped = ""


class _Local(threading.local):
    sequence = -1
    is_first = False


class OpCalls(Listener):
    def __init__(
        self,
        session: DumpSession,
        selection: Selection,
        tracker: ModuleTracker,
        apis: Optional[ApiCalls],
        reference: Optional[Reference],
    ) -> None:
        self.session = session
        self._selection = selection
        self._tracker = tracker
        self._apis = apis
        self._reference = reference
        self._fresh = FreshMemory()
        self._counts: dict[str, Counter[str]] = {
            direction: Counter() for direction in ("forward", "backward", "optimizer")
        }
        self._forwards: dict[int, _Forward] = {}
        self._sites: dict[tuple[object, ...], int] = {}
        self._local = _Local()
        # Nodes that are there already belong to nothing that was seen.
        self._oldest = self._local.sequence = _next_sequence() - 1
        self._local.is_first = True

    def close(self) -> None:
        self._fresh.clear()

    def entered(self, running: Running, inputs: list[tuple[str, torch.Tensor]], args: Any) -> None:
        """What a root takes is what the step was given."""
        if not running.is_root or not self._selection.is_all:
            return
        said = []
        for position, (label, tensor) in enumerate(inputs):
            entry = {"label": label, **describe(tensor)}
            site = running.node.site("input", label, position)
            entry.update(self.session.read(tensor, site, running.call))
            said.append(entry)
        self.session.add_call(
            {
                "kind": "module",
                "module": running.node.path,
                "type": running.node.type_name,
                "direction": "forward",
                "call": running.call,
                "in": said,
                "out": [],
            }
        )

    def pass_by(self, name: str) -> None:
        """A higher-order operator runs."""
        with self.session.lock:
            self.session.leave_out(name, "a higher-order operator: what it runs is not seen")

    # One operator

    def begin(self, func: Any, args: Any, kwargs: Any) -> Optional[OpCall]:
        """It is about to run: None when it is not dumped."""
        info = op_info(func)
        with self.session.lock:
            call = self._identify(func, info)
            was_within = None if call.forward is None else call.forward.was_within
            is_wanted = self._selection.wants(call.name, was_within)
            if call.name.direction == "forward":
                self._register(call)
            if not is_wanted:
                # What it does to fresh memory counts all the same.
                call.is_wanted = False
                return call if info.is_allocation or info.written else None
            self._read_inputs(call, args, kwargs)
            return call

    def _identify(self, func: Any, info: OpInfo) -> OpCall:
        running = self._tracker.innermost
        node = None if running is None else running.node
        direction, flags = "forward", 0
        forward: Optional[_Forward] = None
        if torch._C._current_graph_task_id() != -1:
            again = (running is not None and running.is_recompute) or (
                torch.is_grad_enabled() and _saved_tensor_hooks(True) is not None
            )
            if again:
                flags = int(Flag.RECOMPUTE)
            else:
                direction = "backward"
                graph_node = _current_node()
                if graph_node is not None:
                    forward = self._forwards.get(graph_node._sequence_nr())
                node = None if forward is None else forward.node
        elif self._tracker.is_in_optimizer:
            direction, node = "optimizer", None
        counts = self._counts[direction]
        number = counts[info.name]
        counts[info.name] += 1
        api, api_call = ("", -1) if self._apis is None else self._apis.current
        if forward is not None:
            before = forward.name
            name = CallName(
                before.op,
                before.module,
                before.call,
                "backward",
                before.api,
                before.api_call,
                ran=info.name,
            )
        else:
            path = OUTSIDE if node is None else node.path
            name = CallName(info.name, path, number, direction, api, api_call)
        call = OpCall(func, info, name)
        call.node, call.forward, call.flags = node, forward, flags
        return call

    def _register(self, call: OpCall) -> None:
        """Remembers which of autograd's nodes this call has made, if it has made one: the first
        call that finds a new one is the one that it belongs to.
        """
        newest = _next_sequence() - 1
        is_new = newest > self._local.sequence
        self._local.sequence = newest
        if not is_new or newest <= self._oldest:
            return
        forward = _Forward(call.name, call.node, self._selection.is_within)
        if self._local.is_first:
            self._forwards[newest] = forward
        else:
            # Each thread counts its own nodes: a recompute on a device's thread takes nobody's
            # place.
            self._forwards.setdefault(newest, forward)

    def _read_inputs(self, call: OpCall, args: Any, kwargs: Any) -> None:
        info = call.info
        reads_values = not (info.is_view or info.ignores_values or info.is_allocation)
        is_named = not self._selection.is_all
        for place, label, tensor in inputs_of(info, args, kwargs):
            entry = {"label": label, **describe(tensor)}
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
        """It has returned."""
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
                entry = {"label": label, **describe(tensor)}
                outputs.append(entry)
                if not info.overwrites and self._fresh.is_fresh(tensor):
                    entry["problem"] = "memory that nothing was written to yet"
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
        return self.session.read(tensor, site, name.call, call.flags)

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
