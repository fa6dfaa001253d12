"""Records the inputs, outputs and gradients of every module: ``Dumper(level="module")``."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Optional

import torch

from fastcheck.calls.selection import CallName, Selection
from fastcheck.calls.tracker import CallListener, Running
from fastcheck.record.format import Flag
from fastcheck.utils.torch.operators import plain_value
from fastcheck.utils.torch.own_operators import is_unobserved
from fastcheck.utils.torch.readable import hook_gradient

from .dump_writer import DumpSession, module_line


class ModuleCalls(CallListener):
    def __init__(self, session: DumpSession, selection: Selection) -> None:
        self._session = session
        self._selection = selection
        self._handles: list[Any] = []

    def entered(self, running: Running, inputs: list[tuple[str, torch.Tensor]], args: Any) -> None:
        is_wanted = self._selection.wants(self._call_name(running, "forward"))
        running.is_within = self._selection.is_within
        self._take(running, "input", inputs, is_wanted, args)

    def left(self, running: Running, outputs: list[tuple[str, torch.Tensor]]) -> None:
        self._take(running, "output", outputs, self._is_wanted(running, "forward"))

    def stop(self) -> None:
        """Removes the hooks from leaf tensors, which outlive the step."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _is_wanted(self, running: Running, direction: str) -> bool:
        return running.is_within and self._selection.lists(self._call_name(running, direction))

    def _take(
        self,
        running: Running,
        role: str,
        tensors: list[tuple[str, torch.Tensor]],
        is_wanted: bool,
        given: Optional[tuple[tuple[Any, ...], Mapping[str, Any]]] = None,
    ) -> None:
        if self._is_wanted(running, "backward"):
            for position, (label, tensor) in enumerate(tensors):
                if tensor.requires_grad and not isinstance(tensor, torch.nn.Parameter):
                    self._watch(tensor, running, f"grad_{role}", label, position)
        if not is_wanted or (role == "output" and not tensors):
            return
        flags = int(Flag.RECOMPUTE) if running.is_recompute else 0
        line = self._line(running, "forward")
        place = "in" if role == "input" else "out"
        line[place] = self._session.entries(running, role, tensors, flags)
        arguments = _plain_arguments(given)
        if arguments:
            line["args"] = arguments
        if running.is_recompute:
            line["recompute"] = True
        self._session.add_call(line)

    def _watch(
        self, tensor: torch.Tensor, running: Running, role: str, label: str, position: int
    ) -> None:
        reference = weakref.ref(self)

        def hook(gradient: torch.Tensor) -> None:
            calls = reference()
            if calls is not None and calls._session.is_on and not is_unobserved():
                calls._session.guarded(
                    "a gradient", calls._gradient, running, role, label, position, gradient
                )

        handle = hook_gradient(tensor, hook)
        if handle is not None:
            self._handles.append(handle)

    def _gradient(
        self, running: Running, role: str, label: str, position: int, gradient: torch.Tensor
    ) -> None:
        session = self._session
        with session.lock:
            if not session.is_on:
                return
            site = running.node.site(role, label, position)
            line = self._line(running, "backward")
            # Backward reads the gradients of the outputs of forward.
            place = "in" if role == "grad_output" else "out"
            line[place] = [session.entry(label, gradient, site, running.call)]
            session.add_call(line)

    def _line(self, running: Running, direction: str) -> dict[str, Any]:
        return module_line(running.node.path, running.node.type_name, direction, running.call)

    def _call_name(self, running: Running, direction: str) -> CallName:
        return CallName("", running.node.path, running.call, direction)


def _plain_arguments(given: Optional[tuple[tuple[Any, ...], Mapping[str, Any]]]) -> dict[str, Any]:
    """The arguments that neither are nor hold tensors."""
    if given is None:
        return {}
    args, kwargs = given
    named = [(f"input[{position}]", value) for position, value in enumerate(args)]
    named += [(f"input.{name}", value) for name, value in kwargs.items()]
    return {
        label: plain_value(value) for label, value in named if not isinstance(value, torch.Tensor)
    }
