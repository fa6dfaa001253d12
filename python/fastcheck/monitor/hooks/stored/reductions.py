"""Reductions: a gradient before it is reduced over the ranks, and after.

One parameter has its turn at a time. A hook takes what this rank has computed of its gradient, on
its device, before the reduction: ``reduced_whole`` under DistributedDataParallel,
``reduced_shards`` under fully_shard, ``reduced_flat`` under FullyShardedDataParallel. At the end of
backward() the gradient is reduced. Of the two norms one number comes, which is a record of the step
like any other.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch.nn.parallel import DistributedDataParallel

from fastcheck.calls.module_calls import ModuleNode
from fastcheck.calls.stored import parameters_of
from fastcheck.monitor.session.session import Session
from fastcheck.utils.torch.own_operators import unobserved
from fastcheck.utils.torch.rank import group_size

from .reduced import ReducedGradient
from .reduced_flat import FlatGradient, flat_modules
from .reduced_parts import BeforeForward
from .reduced_shards import ShardedGradient, sharded_modules
from .reduced_whole import WholeGradient
from .rotation import Rotation

__all__ = ["Reductions", "reductions_of"]


class _Turn(NamedTuple):
    node: ModuleNode
    name: str
    step: int
    gradient: ReducedGradient


class Reductions:
    """Of one session at module level. But for the hooks every method expects the session's lock to
    be held.

    Args:
        session: the session.
        nodes: modules whose gradients are reduced.
        replicated: the id() of those within a DistributedDataParallel.
        flat: by id() the groups of those within a FullyShardedDataParallel. The others are those of
            fully_shard.
        called: modules that have their parameters when they are about to run.
    """

    def __init__(
        self,
        session: Session,
        nodes: Sequence[ModuleNode],
        replicated: set[int],
        flat: Mapping[int, Any],
        called: Sequence[torch.nn.Module],
    ) -> None:
        self._session = session
        self._nodes = nodes
        self._replicated = replicated
        self._flat = flat
        self._rotation = Rotation()
        self._turn: Optional[_Turn] = None
        # In the step of this index.
        self._ratio: Optional[tuple[int, torch.Tensor]] = None
        self._is_off = False
        hook = BeforeForward(weakref.WeakMethod(self._before_forward))
        self._hooks = [module.register_forward_pre_hook(hook) for module in called]

    def _before_forward(self) -> None:
        """A module is about to run, and has its parameters."""
        turn = self._turn
        if turn is None or self._is_off:
            return
        try:
            turn.gradient.before_forward()
        except Exception as error:
            self._switch_off(error)

    def _step(self) -> Optional[int]:
        session = self._session
        if self._is_off or not session.is_active or session.tape is not None:
            return None
        return session.step.index

    def after_backward(self) -> None:
        """A backward pass is over, and with it the reduction."""
        turn, step = self._turn, self._session.step.index
        if turn is None or self._is_off:
            return
        try:
            norms = turn.gradient.norms(step)
            if norms is not None:
                with torch.no_grad(), unobserved():
                    # Where one of them is 0 or not finite: 0.
                    ratio = torch.nan_to_num(norms[0] / norms[1], nan=0.0, posinf=0.0, neginf=0.0)
                self._ratio = step, ratio
        except Exception as error:
            self._switch_off(error)

    def before_update(self) -> None:
        """An optimizer is about to step: reads the number, and gives the turn to the next."""
        session, turn, ratio = self._session, self._turn, self._ratio
        step = session.step.index
        if self._is_off or session.tape is not None or (turn is not None and turn.step == step):
            return  # another optimizer's turn of the same step
        if turn is not None and ratio is not None and ratio[0] == step:
            session.read_number(ratio[1], turn.node.site("reduction", turn.name, 0))
        self._end_turn()
        try:
            if self._rotation.is_due():
                self._begin_turn(step)
        except Exception as error:
            self._switch_off(error)

    def _begin_turn(self, step: int) -> None:
        for _ in range(2):
            while (following := self._rotation.following()) is not None:
                node, name, parameter = following
                gradient = self._begin(node, name, parameter)
                if gradient is not None:
                    self._turn = _Turn(node, name, step, gradient)
                    return
            self._rotation.begin_round(parameters_of(self._nodes, None))

    def _begin(
        self, node: ModuleNode, name: str, parameter: torch.Tensor
    ) -> Optional[ReducedGradient]:
        rest = self._rotation.rounds, self._step, self._switch_off
        key = id(node.module())
        if key in self._replicated:
            return WholeGradient(parameter, *rest) if WholeGradient.takes(parameter) else None
        if key in self._flat:
            group, is_taken = self._flat[key], FlatGradient.takes(parameter)
            place = torch.distributed.get_rank(group), group_size(group)
            return FlatGradient(node, name, parameter, *place, *rest) if is_taken else None
        shard = ShardedGradient.takes(parameter)
        return None if shard is None else ShardedGradient(node, name, parameter, shard, *rest)

    def _end_turn(self) -> None:
        if self._turn is not None:
            self._turn.gradient.close()
        self._turn = self._ratio = None

    def close(self) -> None:
        """Takes the hooks away."""
        self._end_turn()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _switch_off(self, error: Exception) -> None:
        self._is_off = True
        self._session.report_internal_error("the reading of reductions", error)


def reductions_of(
    session: Session, nodes: Sequence[ModuleNode], models: Sequence[torch.nn.Module]
) -> Optional[Reductions]:
    """Of the nodes whose gradients torch reduces over several ranks; None without any."""
    try:
        return None if group_size() == 1 else _reductions_of(session, nodes, models)
    except Exception as error:
        session.report_internal_error("the reading of reductions", error)
        return None


def _reductions_of(
    session: Session, nodes: Sequence[ModuleNode], models: Sequence[torch.nn.Module]
) -> Optional[Reductions]:
    holders = [node.module() for node in nodes]
    replicated = {
        id(part)
        for holder in holders
        if isinstance(holder, DistributedDataParallel) and group_size(holder.process_group) > 1
        for part in holder.modules()
    }
    called = list(sharded_modules(models))
    held = {id(part) for holder in called for part in holder.modules()}
    flat = {}
    for holder, group in flat_modules(models):
        # Its own forward gathers the parameters, and then calls what it wraps.
        called += holder.children()
        flat.update(dict.fromkeys(map(id, holder.modules()), group))
    held |= replicated | set(flat)
    reduced = [node for node, module in zip(nodes, holders) if id(module) in held]
    return Reductions(session, reduced, replicated, flat, called) if reduced else None
