"""Dumps parameters and buffers before the first call, and gradients before an update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch

from fastcheck.calls.module_calls import ModuleNode
from fastcheck.calls.selection import CallName, Selection
from fastcheck.calls.stored import StoredTensor, gradients_of, parameter_ids, parameters_of
from fastcheck.calls.tracker import Listener, ModuleTracker
from fastcheck.reproducibility.inventory import describe_optimizer
from fastcheck.utils.torch.operators import describe_tensor
from fastcheck.utils.torch.readable import can_read, has_memory, is_materialised
from fastcheck.utils.torch.sharding import local

from .dump_writer import DumpSession

__all__ = ["DumpedState"]


class DumpedState(Listener):
    """Reads the parameters, buffers and gradients of the modules that are dumped."""

    def __init__(self, session: DumpSession, selection: Selection) -> None:
        self._session = session
        self._selection = selection
        self._optimizers: list[dict[str, Any]] = []
        self._optimizer_ids: set[int] = set()
        self._has_gradients = False
        self.tracker: Optional[ModuleTracker] = None

    def met_root(self, nodes: Sequence[ModuleNode]) -> None:
        found: list[tuple[StoredTensor, str]] = []
        for node in nodes:
            module = node.module()
            if module is None or not self._is_wanted(node):
                continue
            for name, parameter in module._parameters.items():
                if parameter is not None and is_materialised(parameter):
                    found.append(((node, name, parameter), "param"))
            for name, buffer in module._buffers.items():
                if buffer is not None and is_materialised(buffer):
                    found.append(((node, name, buffer), "buffer"))
        self._read("stored", found)

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        if id(optimizer) not in self._optimizer_ids:
            self._optimizer_ids.add(id(optimizer))
            names = {
                id(parameter): _full_name(node, name)
                for module, node in self._nodes()
                for name, parameter in module._parameters.items()
                if parameter is not None
            }
            self._optimizers.append(describe_optimizer(optimizer, names))
            self._session.add_meta(optimizers=self._optimizers)
        self._read_gradients(parameter_ids(optimizer))

    def at_end(self) -> None:
        """The gradients that no optimizer has taken within the dump."""
        if not self._has_gradients:
            self._read_gradients(None)

    def _read_gradients(self, owned: Optional[set[int]]) -> None:
        wanted = [node for _, node in self._nodes() if self._is_wanted(node)]
        gradients = gradients_of(parameters_of(wanted, owned))
        found = [(stored, "param_grad") for stored in gradients]
        self._has_gradients |= bool(found)
        self._read("gradients", found)

    def _is_wanted(self, node: ModuleNode) -> bool:
        return self._selection.wants_state(CallName("", node.path, 0, "optimizer"))

    def _nodes(self) -> list[tuple[torch.nn.Module, ModuleNode]]:
        return [] if self.tracker is None else self.tracker.nodes

    def _read(self, kind: str, found: list[tuple[StoredTensor, str]]) -> None:
        entries = []
        for (node, name, tensor), role in found:
            inner = local(tensor)
            if inner.layout is torch.sparse_coo:
                inner = inner._values()
            entry = {"label": _full_name(node, name), **describe_tensor(inner), "role": role}
            if can_read(inner) and has_memory(inner):
                entry.update(self._session.read(inner, node.site(role, name, 0), 0))
            entries.append(entry)
        if entries:
            self._session.add_call(
                {"kind": kind, "direction": "optimizer", "in": entries, "out": []}
            )


def _full_name(node: ModuleNode, name: str) -> str:
    return f"{node.path}.{name}" if node.path else name
