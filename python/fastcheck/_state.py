"""Reads what a model stores: parameters, their gradients and buffers, in one list call."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Callable, Optional

import torch
from torch.nn.modules.batchnorm import _NormBase

from ._calls import ModuleNode
from ._finding import Finding
from ._movement import UPDATES, Look, Movement
from ._readable import can_read, has_memory
from ._record import Depth, Flag, nonfinite
from ._session import Session
from ._shards import local
from ._step import Step
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
        self._met: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._looks = 0
        # The optimizer, the step, and how many updates it had had by then.
        self._last_look = (0, -1, 0)

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
        session = self._session
        owned = None if optimizer is None else _parameter_ids(optimizer)
        look = Look()
        look.first = session.next_seq
        batch = _Batch()
        parameters = self._parameters(owned)
        for node, name, parameter in parameters:
            batch.add(parameter, node.site("param", name, 0), "param")
        watches = gradients and self._begins_update(optimizer)
        if watches:
            self._look(look, optimizer, parameters, batch)
        self._add_buffers(batch)
        self._read(batch)
        if gradients:
            self._read_gradients(owned, scaled=scaled)
        if self.movement is not None and watches:
            look.stop = session.next_seq
            session.note(self.movement.settle, look)
        if not scaled:
            # Now, while the update can still be prevented.
            session.note(session.ledger.settle_silent, session.step)
        session.step.state_read = True

    def _begins_update(self, optimizer: Optional[torch.optim.Optimizer]) -> bool:
        """Whether to look at what moves. A step() that calls that of its base class comes twice."""
        if self.movement is None or not self.movement.is_on:
            return False
        step = self._session.step
        last, self._last_look = self._last_look, (id(optimizer), step.index, step.update_count)
        return last != self._last_look

    def _look(
        self,
        look: Look,
        optimizer: Optional[torch.optim.Optimizer],
        parameters: Sequence[tuple[ModuleNode, str, torch.Tensor]],
        batch: _Batch,
    ) -> None:
        """What the records of this update don't tell. Adds parameters that no optimizer holds to
        the batch, now and then.
        """
        look.is_certain = optimizer is not None
        still = set() if optimizer is None else _still(optimizer)
        for node, name, parameter in parameters:
            # Of a copy in few bits the optimizer may hold the original, which moves unseen.
            is_copy = optimizer is None and parameter.dtype.itemsize < 4
            look.parameters.append(node.site("param", name, 0))
            look.is_live.append(
                parameter.requires_grad and id(parameter) not in still and not is_copy
            )
            main = getattr(parameter, "main_grad", None)
            look.has_gradient.append(parameter.grad is not None or main is not None)
            look.is_part.append(local(parameter) is not parameter)
        for node in self._nodes:
            module = node.module()
            for name, buffer in () if module is None else module._buffers.items():
                if module is not None and buffer is not None:
                    look.buffers.append(node.site("buffer", name, 0))
                    look.is_training.append(module.training)
                    look.calls.append(node.total_calls if node.is_callable else look.first)
                    look.is_exempt.append(isinstance(module, _NormBase))
        if optimizer is None:
            return
        self._met.add(optimizer)
        self._looks += 1
        if self._looks % UPDATES == 0:
            self._add_strays(look, batch)

    def _add_strays(self, look: Look, batch: _Batch) -> None:
        given = self._session.config.optimizers or ()
        held = {key for optimizer in (*self._met, *given) for key in _parameter_ids(optimizer)}
        for node, name, parameter in self._parameters(None):
            if parameter.requires_grad and parameter.grad is not None and id(parameter) not in held:
                look.strays.append(node.site("param", name, 0))
                batch.add(parameter, look.strays[-1], "param")

    def read_gradients(self, optimizer: torch.optim.Optimizer, *, scaled: bool) -> None:
        """The gradients alone, where ``optimizer`` was skipped or has made them within its step."""
        self._read_gradients(_parameter_ids(optimizer), scaled=scaled)
        self._session.step.state_read = True

    def _read_gradients(self, owned: Optional[set[int]], *, scaled: bool) -> None:
        batch = _Batch()
        for node, name, parameter in self._parameters(owned):
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
        owned = _parameter_ids(optimizer)
        return any(
            id(parameter) in owned
            for node in self._nodes
            for parameter in _stored(node, "_parameters").values()
            if parameter is not None
        )

    def _parameters(self, owned: Optional[set[int]]) -> list[tuple[ModuleNode, str, torch.Tensor]]:
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


def _parameter_ids(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _still(optimizer: torch.optim.Optimizer) -> set[int]:
    """The parameters whose learning rate is 0, or on a device, where asking would wait."""
    found: set[int] = set()
    for group in optimizer.param_groups:
        rate = group.get("lr")
        is_unknown = isinstance(rate, torch.Tensor) and not rate.is_cpu
        if rate is not None and (is_unknown or not rate):
            found.update(map(id, group["params"]))
    return found


def _stored(node: ModuleNode, kind: str) -> dict[str, Optional[torch.Tensor]]:
    module = node.module()
    stored: dict[str, Optional[torch.Tensor]] = {} if module is None else getattr(module, kind)
    return stored
