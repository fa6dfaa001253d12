"""Reads what a model stores: parameters, their gradients and buffers, in one list call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, Optional

import torch

from ._calls import ModuleNode
from ._finding import Finding
from ._movement import Movement
from ._readable import can_read, has_memory
from ._record import Depth, Flag, nonfinite
from ._session import Session
from ._shards import local
from ._step import Step
from ._updates import StoredTensor, UpdateWatcher, parameter_ids
from ._verdict import Judge

__all__ = ["StateReader"]


class _Batch:
    """Tensors to be read in one call, with their sites and roles."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.sites: list[int] = []
        self.roles: list[str] = []

    def add(self, tensor: torch.Tensor, site: int, role: str) -> None:
        tensor = local(tensor)
        if tensor.layout is torch.sparse_coo:
            tensor = tensor._values()
        if can_read(tensor) and has_memory(tensor):
            self.tensors.append(tensor)
            self.sites.append(site)
            self.roles.append(role)


class StateReader:
    """Reads the stored tensors of the observed modules. Every method expects the session's lock to
    be held.
    """

    def __init__(self, session: Session, nodes: Sequence[ModuleNode]) -> None:
        self._session = session
        self._nodes = nodes
        self._node_of = {id(node.module()): node for node in nodes}
        #: None where records have no checksum.
        self.movement: Optional[Movement] = None
        if session.config.depth is Depth.FULL:
            ledger = session.ledger
            self.movement = Movement(session.sites, ledger.history, session.trouble)
        self._updates = UpdateWatcher(nodes, session.config.optimizers)

    def read_stored(self) -> None:
        """All parameters and buffers: before the first forward, so that a bad checkpoint is named
        as such.
        """
        batch = _Batch()
        for node, name, parameter in self._parameters(None):
            batch.add(parameter, node.site("param", name, 0), "param")
        self._add_buffers(batch)
        self._read(batch)

    def read_for_update(
        self,
        optimizer: Optional[torch.optim.Optimizer],
        *,
        gradients: bool = True,
        scaled: bool = False,
    ) -> None:
        """What ``optimizer`` is about to use (None: all of the model), and the buffers.

        ``scaled``: the gradients still carry the loss scale, or their update is skipped.
        """
        session, updates, movement = self._session, self._updates, self.movement
        owned = None if optimizer is None else parameter_ids(optimizer)
        parameters = self._parameters(owned)
        is_watched = gradients and movement is not None and movement.is_on
        look = updates.begin(optimizer, session.step) if is_watched else None
        first = session.next_seq
        batch = _Batch()
        for node, name, parameter in parameters:
            batch.add(parameter, node.site("param", name, 0), "param")
        buffers_at = len(batch.sites)
        self._add_buffers(batch)
        self._read(batch)
        first_gradient = session.next_seq
        gradients_read = self._read_gradients(parameters, scaled=scaled) if gradients else []
        if look is not None and movement is not None:
            look.first, look.first_gradient = first, first_gradient
            look.first_stray = session.next_seq
            if updates.has_turn_for_strays(look):
                self._read_strays()
            look.stop = session.next_seq
            stored = batch.sites[:buffers_at]
            updates.look_at_parameters(look, optimizer, parameters, stored, gradients_read)
            updates.look_at_buffers(look, batch.sites[buffers_at:])
            session.note(movement.settle, look)
        if not scaled:
            # Now, while the update can still be prevented.
            session.note(session.ledger.settle_silent, session.step)
        session.step.state_read = True

    def _read_strays(self) -> None:
        batch = _Batch()
        for node, name, parameter in self._updates.strays(self._parameters(None)):
            batch.add(parameter, node.site("param", name, 0), "param")
        self._read(batch)

    def read_gradients(self, optimizer: torch.optim.Optimizer, *, scaled: bool) -> None:
        """The gradients alone, where ``optimizer`` was skipped or has made them within its step."""
        self._read_gradients(self._parameters(parameter_ids(optimizer)), scaled=scaled)
        self._session.step.state_read = True

    def _read_gradients(self, parameters: Sequence[StoredTensor], *, scaled: bool) -> list[int]:
        """The sites of those that were read."""
        batch = _Batch()
        for node, name, parameter in parameters:
            gradient = parameter.grad
            if gradient is not None:
                batch.add(gradient, node.site("param_grad", name, 0), "param_grad")
            # Where Megatron's fused kernels add up the gradient of a weight, and its optimizer
            # takes it from.
            main = getattr(parameter, "main_grad", None)
            if isinstance(main, torch.Tensor) and main is not gradient:
                batch.add(main, node.site("param_grad", f"{name}.main_grad", 0), "param_grad")
        flags = int(Flag.SCALED) if scaled else 0
        self._read(batch, flags, _parameter_gradient, scaled)
        return batch.sites

    def check(self, step: Step, node: ModuleNode, asked_for: Finding) -> Optional[Finding]:
        """In the middle of a verdict: the first non-finite thing that a module and its submodules
        store, if there is one. Read now on the CPU; on a device, where this is asked later, what
        the last reading said.
        """
        batch = self._stored_in(node)
        session = self._session
        if session.is_deferred:
            records = session.ledger.history.latest_of(set(batch.sites))
        else:
            with session.lock:
                records = session.read_now(batch.tensors, batch.sites)
        roles = dict(zip(batch.sites, batch.roles))
        first: Optional[Finding] = None
        for record in records[nonfinite(records)]:
            finding = Finding(record.copy(), roles[int(record["site"])])
            if step.judge.is_finding(finding.seq):
                continue
            step.judge.parameter(finding, asked_for)
            if first is None and not finding.is_soft:
                first = finding
        return first

    def _stored_in(self, node: ModuleNode) -> _Batch:
        batch = _Batch()
        module = node.module()
        for child in () if module is None else module.modules():
            child_node = self._node_of.get(id(child))
            if child_node is None or child_node.module() is not child:
                continue
            for name, parameter in child._parameters.items():
                if parameter is not None:
                    batch.add(parameter, child_node.site("param", name, 0), "param")
            # In training a module may have written its buffers in this very call.
            if not child.training:
                for name, buffer in child._buffers.items():
                    if buffer is not None:
                        batch.add(buffer, child_node.site("buffer", name, 0), "buffer")
        return batch

    def owned_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer updates any parameter of the observed modules."""
        owned = parameter_ids(optimizer)
        return any(
            id(parameter) in owned
            for node in self._nodes
            for parameter in _stored(node, "_parameters").values()
            if parameter is not None
        )

    def _parameters(self, owned: Optional[set[int]]) -> list[StoredTensor]:
        found = []
        done: set[int] = set()
        for node in self._nodes:
            for name, parameter in _stored(node, "_parameters").items():
                key = id(parameter)
                if parameter is None or key in done or (owned is not None and key not in owned):
                    continue
                done.add(key)
                found.append((node, name, parameter))
        return found

    def _add_buffers(self, batch: _Batch) -> None:
        for node in self._nodes:
            for name, buffer in _stored(node, "_buffers").items():
                if buffer is not None:
                    batch.add(buffer, node.site("buffer", name, 0), "buffer")

    def _read(
        self,
        batch: _Batch,
        flags: int = 0,
        method: Callable[..., None] = Judge.parameter,
        *args: Any,
    ) -> None:
        if not args:
            args = (None,)  # nothing asked for these in particular
        self._session.observe_list(batch.tensors, batch.sites, batch.roles, flags, method, *args)


def _parameter_gradient(judge: Judge, finding: Finding, scaled: bool) -> None:
    if not scaled:
        # The optimizer is about to use it: what was held back as scaled is real.
        judge.settle_scaled(skipped=False)
    judge.parameter_gradient(finding, scaled)


def _stored(node: ModuleNode, kind: str) -> dict[str, Optional[torch.Tensor]]:
    module = node.module()
    stored: dict[str, Optional[torch.Tensor]] = {} if module is None else getattr(module, kind)
    return stored
