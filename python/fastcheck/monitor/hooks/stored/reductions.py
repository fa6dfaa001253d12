"""Reductions: a gradient before DistributedDataParallel reduces it over the ranks, and after.

One parameter has its turn at a time. A hook takes the norm of what has been accumulated of its
gradient, on its device, before the reduction begins: torch calls it where the gradient is
accumulated, and DistributedDataParallel what it waits for behind that. At the end of backward() the
gradient is reduced. Of the two norms one number comes, which is a record of the step like any
other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch.nn.parallel import DistributedDataParallel

from fastcheck.calls.module_calls import ModuleNode
from fastcheck.calls.stored import parameters_of
from fastcheck.monitor.session.session import Session
from fastcheck.utils.torch.own_operators import unobserved
from fastcheck.utils.torch.rank import group_size
from fastcheck.utils.torch.readable import can_read, has_memory
from fastcheck.utils.torch.sharding import is_part
from fastcheck.utils.torch.streams import streams_of
from fastcheck.utils.torch.transforms import unwrapped

from .rotation import Rotation, part_of

__all__ = ["Reductions", "reduced_nodes"]


class _Turn(NamedTuple):
    node: ModuleNode
    name: str
    parameter: torch.Tensor
    step: int
    handle: Any


class Reductions:
    """Of one session at module level. ``nodes``: modules whose gradients are reduced. But for the
    hook every method expects the session's lock to be held.
    """

    def __init__(self, session: Session, nodes: Sequence[ModuleNode]) -> None:
        self._session = session
        self._nodes = nodes
        self._rotation = Rotation()
        self._turn: Optional[_Turn] = None
        # Of this rank alone, in the step of this index.
        self._local: Optional[tuple[int, torch.Tensor]] = None
        self._ratio: Optional[tuple[int, torch.Tensor]] = None
        self._is_off = False

    def _accumulated(self, parameter: torch.Tensor) -> None:
        """Called by autograd: backward() has added to the gradient."""
        session = self._session
        if self._is_off or not session.is_active or session.tape is not None:
            return
        try:
            norm = self._norm(parameter)
            self._local = None if norm is None else (session.step.index, norm)
        except Exception as error:
            self._switch_off(error)

    def after_backward(self) -> None:
        """A backward pass is over, and with it the reduction."""
        turn, local = self._turn, self._local
        if self._is_off or turn is None or local is None or local[0] != self._session.step.index:
            return
        reduced = self._norm(turn.parameter)
        if reduced is not None:
            with torch.no_grad(), unobserved():
                # Where one of them is 0 or not finite: 0.
                ratio = torch.nan_to_num(local[1] / reduced, nan=0.0, posinf=0.0, neginf=0.0)
            self._ratio = local[0], ratio

    def before_update(self) -> None:
        """An optimizer is about to step: reads the number, and gives the turn to the next."""
        session, turn, ratio = self._session, self._turn, self._ratio
        step = session.step.index
        if self._is_off or session.tape is not None or (turn is not None and turn.step == step):
            return  # another optimizer's turn of the same step
        if turn is not None and ratio is not None and ratio[0] == step:
            session.read_number(ratio[1], turn.node.site("reduction", turn.name, 0))
        self.close()
        if self._rotation.is_due():
            self._begin_turn(step)

    def _begin_turn(self, step: int) -> None:
        for _ in range(2):
            while (following := self._rotation.following()) is not None:
                node, name, parameter = following
                if parameter.is_leaf and not is_part(parameter) and _is_readable(parameter):
                    register: Any = parameter.register_post_accumulate_grad_hook
                    self._turn = _Turn(node, name, parameter, step, register(self._accumulated))
                    return
            self._rotation.begin_round(parameters_of(self._nodes, None))

    def _norm(self, parameter: torch.Tensor) -> Optional[torch.Tensor]:
        """Of the part of the gradient whose turn it is, float32 or float64, on its device."""
        gradient = parameter.grad
        if gradient is None or gradient.shape != parameter.shape or is_part(gradient):
            return None
        gradient = unwrapped(gradient.detach())
        if not _is_readable(gradient):
            return None
        with torch.no_grad(), unobserved():
            part = part_of(gradient, self._rotation.rounds)
            wide = torch.float64 if part.dtype is torch.float64 else torch.float32
            norm: torch.Tensor = torch.linalg.vector_norm(part, dtype=wide)
            return norm

    def close(self) -> None:
        """Takes the hook away."""
        if self._turn is not None:
            self._turn.handle.remove()
        self._turn = self._local = self._ratio = None

    def _switch_off(self, error: Exception) -> None:
        self._is_off = True
        self._session.report_internal_error("the reading of reductions", error)


def _is_readable(tensor: torch.Tensor) -> bool:
    is_dense = tensor.layout is torch.strided and tensor.dtype.is_floating_point
    is_known = tensor.is_cpu or streams_of(tensor.device) is not None
    return is_dense and is_known and can_read(tensor) and has_memory(tensor) and tensor.numel() > 0


def reduced_nodes(nodes: Sequence[ModuleNode]) -> list[ModuleNode]:
    """Those within a DistributedDataParallel of several ranks."""
    holders = [node.module() for node in nodes]
    held = {
        id(part)
        for holder in holders
        if isinstance(holder, DistributedDataParallel) and group_size(holder.process_group) > 1
        for part in holder.modules()
    }
    return [node for node, module in zip(nodes, holders) if id(module) in held]
