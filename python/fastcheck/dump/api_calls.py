"""Records what the functions of torch's Python API take and return, with the gradients of it:
``Dumper(level="api")``. A function that another function calls is part of that call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

import torch

from fastcheck.calls.modes import ApiCalls
from fastcheck.calls.namer import recomputes
from fastcheck.calls.selection import CallName, Selection
from fastcheck.calls.tracker import ModuleTracker, Running
from fastcheck.record.site import OUTSIDE, Site, SiteTable
from fastcheck.utils.torch.flatten import flatten, flatten_arguments

from .dump_writer import DumpSession
from .module_calls import ModuleCalls

#: The end of the label of an input that is a parameter.
PARAMETER = " (parameter)"
#: Functions whose results hold no numbers yet.
_EMPTY = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty")
#: Functions that write inputs though their names don't end with "_": running statistics.
_WRITERS = ("batch_norm", "instance_norm", "moving_avg_obs")
_NO_MODULE = torch.nn.Module()

#: The inputs of a call, whether it is selected, and its arguments.
_Given = tuple[list[tuple[str, torch.Tensor]], bool, tuple[Any, Mapping[str, Any]]]


class _Function:
    """A function of the API where it is called: in a module, or by an optimizer. It has what a
    ModuleNode has for the calls of a module.
    """

    def __init__(self, name: str, path: str, kind: str, forward: str, sites: SiteTable) -> None:
        self.name, self.path, self.type_name, self.forward = name, path, kind, forward
        #: The places of the parameters among the inputs of the call that is under way.
        self.parameters: list[int] = []
        self._sites = sites
        self._numbers: dict[tuple[str, str, int], int] = {}

    def site(self, role: str, label: str, index: int) -> int:
        """The number of one of its sites; an input that is a parameter says so."""
        if role == "input" and index in self.parameters:
            label += PARAMETER
        key = role, label, index
        number = self._numbers.get(key)
        if number is None:
            direction = "backward" if role.startswith("grad_") else self.forward
            site = Site(self.path, self.type_name, direction, role, index, label, self.name)
            number = self._numbers[key] = self._sites.intern(site)
        return number


class CallsOfApis(ModuleCalls):
    """Records the calls that ``mode`` sees. Of modules it takes the inputs of the root: the
    batch.
    """

    def __init__(self, session: DumpSession, selection: Selection, tracker: ModuleTracker) -> None:
        super().__init__(session, selection)
        self._tracker = tracker
        self._functions: dict[tuple[str, str, str], _Function] = {}
        self.mode = ApiCalls(listener=self)

    def entered(self, running: Running, inputs: list[tuple[str, torch.Tensor]], args: Any) -> None:
        if running.is_root and self._selection.is_all:
            super().entered(running, inputs, args)

    def left(self, running: Running, outputs: list[tuple[str, torch.Tensor]]) -> None:
        """Reads nothing: a module returns what a function has."""

    def begun(self, name: str, call: int, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Records the inputs of a call; the token for ended(), None of a call that is left out."""
        if not self._session.is_on:
            return None
        return self._session.guarded("a call of the API", self._begin, name, call, args, kwargs)

    def _begin(
        self, name: str, call: int, args: Any, kwargs: Mapping[str, Any]
    ) -> tuple[Running, Optional[_Given]]:
        """The call, and what _end() is to read of it: the inputs of a function that writes none of
        them, which may turn out to return no tensor either, as size() does.
        """
        with self._session.lock:
            node, is_repeated, is_in_optimizer = self._tracker.current
            forward = "optimizer" if is_in_optimizer else "forward"
            path, kind = ("", OUTSIDE) if node is None else (node.path, node.type_name)
            key = name, path, forward
            if (function := self._functions.get(key)) is None:
                function = _Function(name, path, kind, forward, self._session.sites)
                self._functions[key] = function
            in_backward = torch._C._current_graph_task_id() != -1
            is_recompute = in_backward and (is_repeated or recomputes())
            node_of: Any = function  # what is read of a node it has
            running = Running(_NO_MODULE, node_of, call, is_recompute=is_recompute, is_root=False)
            is_wanted = self._selection.wants(self._call_name(running, forward))
            running.is_within = self._selection.is_within
            given = flatten_arguments(args, kwargs), is_wanted, (args, kwargs)
            if not may_write(name, kwargs):
                return running, given
            self._take_inputs(running, given)
            return running, None

    def _take_inputs(self, running: Running, given: _Given) -> None:
        inputs, is_wanted, arguments = given
        function: Any = running.node
        function.parameters = [
            place for place, (_, x) in enumerate(inputs) if isinstance(x, torch.nn.Parameter)
        ]
        self._take(running, "input", inputs, is_wanted, arguments)

    def ended(self, token: Any, result: Any) -> None:
        """Records what the call has returned."""
        self._session.guarded("a call of the API", self._end, *token, result)

    def _end(self, running: Running, given: Optional[_Given], result: Any) -> None:
        with self._session.lock:
            outputs = flatten(result, "output")
            if given is not None:
                if not outputs:
                    return
                self._take_inputs(running, given)
            if running.node.name.rpartition(".")[2] in _EMPTY:
                return
            node: Any = running.node
            is_wanted = self._is_wanted(running, node.forward)
            self._take(running, "output", outputs, is_wanted)

    def _call_name(self, running: Running, direction: str) -> CallName:
        node = running.node
        if not isinstance(node, _Function):
            return super()._call_name(running, direction)
        return CallName("", node.path, running.call, direction, node.name, running.call)

    def _line(self, running: Running, direction: str) -> dict[str, Any]:
        line = super()._line(running, direction)
        if isinstance(running.node, _Function):
            line.update(kind="api", api=f"{running.node.name}.{running.call}")
            if direction == "forward":
                line["direction"] = running.node.forward
        return line


def may_write(name: str, kwargs: Mapping[str, Any]) -> bool:
    """True if a call may write to its inputs: ``__setitem__``, ``__ior__``, ``add_``, a function
    with ``inplace=`` or ``out=``.
    """
    kind, _, function = name.partition(".")
    if function.startswith("__"):
        is_inplace = function[2] == "i" and hasattr(torch.Tensor, f"__{function[3:]}")
        return function == "__setitem__" or is_inplace
    is_writer = function.endswith("_") or any(writer in function for writer in _WRITERS)
    return is_writer or kind in ("Functional", "VF") or kwargs.get("out") is not None
