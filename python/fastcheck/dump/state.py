"""What modules store: parameters and buffers before the first call, gradients before an update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch

from .._calls import ModuleNode
from .._inventory import describe_optimizer
from .._readable import can_read, has_memory
from .._shards import local
from .arguments import describe
from .modules import Listener, ModuleTracker
from .selection import CallName, Selection
from .session import DumpSession

__all__ = ["StateReader"]


class StateReader(Listener):
    """Reads the parameters, buffers and gradients of the modules that are dumped."""

    def __init__(self, session: DumpSession, selection: Selection) -> None:
        self._session = session
        self._selection = selection
        self._optimizers: list[dict[str, Any]] = []
        self._met: set[int] = set()
        self._has_gradients = False
        self.tracker: Optional[ModuleTracker] = None

    def met_root(self, nodes: Sequence[ModuleNode]) -> None:
        found: list[tuple[ModuleNode, str, torch.Tensor, str]] = []
        for node in nodes:
            module = node.module()
            if module is None or not self._is_wanted(node):
                continue
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    found.append((node, name, parameter, "param"))
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    found.append((node, name, buffer, "buffer"))
        self._read("stored", found)

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        if id(optimizer) not in self._met:
            self._met.add(id(optimizer))
            names = {id(parameter): name for name, parameter in self._named()}
            self._optimizers.append(describe_optimizer(optimizer, names))
            self._session.add_meta(optimizers=self._optimizers)
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._read_gradients(owned)

    def at_end(self) -> None:
        """The gradients that no optimizer has taken within the dump."""
        if not self._has_gradients:
            self._read_gradients(None)

    def _read_gradients(self, owned: Optional[set[int]]) -> None:
        found: list[tuple[ModuleNode, str, torch.Tensor, str]] = []
        done: set[int] = set()
        for module, node in () if self.tracker is None else self.tracker.nodes:
            if not self._is_wanted(node):
                continue
            for name, parameter in module._parameters.items():
                key = id(parameter)
                if parameter is None or key in done or (owned is not None and key not in owned):
                    continue
                done.add(key)
                gradient = parameter.grad
                if gradient is not None:
                    found.append((node, name, gradient, "param_grad"))
                # Where Megatron's fused kernels add up the gradient of a weight.
                main = getattr(parameter, "main_grad", None)
                if isinstance(main, torch.Tensor) and main is not gradient:
                    found.append((node, f"{name}.main_grad", main, "param_grad"))
        self._has_gradients |= bool(found)
        self._read("gradients", found)

    def _is_wanted(self, node: ModuleNode) -> bool:
        return self._selection.wants_state(CallName("", node.path, 0, "optimizer"))

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        found: list[tuple[str, torch.Tensor]] = []
        for module, node in () if self.tracker is None else self.tracker.nodes:
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    found.append((f"{node.path}.{name}" if node.path else name, parameter))
        return found

    def _read(self, kind: str, found: list[tuple[ModuleNode, str, torch.Tensor, str]]) -> None:
        said = []
        for node, name, tensor, role in found:
            inner = local(tensor)
            if inner.layout is torch.sparse_coo:
                inner = inner._values()
            entry = {"label": f"{node.path}.{name}" if node.path else name, **describe(inner)}
            entry["role"] = role
            if can_read(inner) and has_memory(inner):
                entry.update(self._session.read(inner, node.site(role, name, 0), 0))
            said.append(entry)
        if said:
            self._session.add_call({"kind": kind, "direction": "optimizer", "in": said, "out": []})
