"""UpdateReadings: what an update does to a parameter, for one parameter a step, in turn.

The parameter is copied before the update and compared with it after, on its device. What comes out
are two numbers, read like any other: they are records of the step, which nothing waits for. What
the optimizer keeps of the parameter, such as Adam's moments, is read after the update too.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, Callable, NamedTuple, Optional

import torch

from fastcheck.calls.module_calls import ModuleNode
from fastcheck.calls.stored import StoredTensor, parameter_ids, parameters_of
from fastcheck.monitor.session.session import Session
from fastcheck.utils.torch.own_operators import unobserved
from fastcheck.utils.torch.readable import can_read, has_memory
from fastcheck.utils.torch.sharding import is_part, local
from fastcheck.utils.torch.streams import streams_of
from fastcheck.utils.torch.transforms import unwrapped
from fastcheck.verdict.module_level import Judge

from .reductions import Reductions
from .rotation import Rotation, part_of

__all__ = ["UpdateReadings"]

_NARROW = (torch.bfloat16, torch.float16)


class _Turns(Rotation):
    """The turns of one optimizer's parameters."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        #: The eps of its groups, as last reported.
        self.epsilon: list[Any] = []


class _Turn(NamedTuple):
    optimizer: torch.optim.Optimizer
    node: ModuleNode
    name: str
    parameter: torch.Tensor
    before: Optional[torch.Tensor]
    round: int


class UpdateReadings:
    """Of one session at module level. Every method expects the session's lock to be held.

    ``compares``: whether updates are compared. ``moments``: whose states of the optimizer are read,
    ``"turns"``, ``"all"`` or ``"none"``. ``on_epsilon`` is called with the eps of an optimizer
    that divides by the root of a mean of squares, by number of the gradient, when it is another;
    ``on_betas`` with the betas of its groups, once. ``reductions``: where gradients are reduced.
    """

    def __init__(
        self,
        session: Session,
        nodes: Sequence[ModuleNode],
        compares: bool,
        moments: str,
        on_epsilon: Callable[[Mapping[int, float]], None],
        on_betas: Callable[[float, float], None],
        reductions: Optional[Reductions] = None,
    ) -> None:
        self._session = session
        self._nodes = nodes
        self._compares = compares
        self._moments = moments
        self._on_epsilon = on_epsilon
        self._on_betas = on_betas
        self.reductions = reductions
        self._turns: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Turns] = (
            weakref.WeakKeyDictionary()
        )
        self._turn: Optional[_Turn] = None
        self._last_step = -1
        self._is_off = False

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer is about to step: copies the parameter whose turn it is."""
        if self.reductions is not None:
            self.reductions.before_update()
        session, turn = self._session, self._turn
        step = session.step.index
        if turn is not None and turn.optimizer is optimizer and self._last_step == step:
            return  # a step() that calls that of its base class
        self._turn = None
        turns = self._turns.get(optimizer)
        if turns is None:
            turns = self._turns[optimizer] = _Turns(len(self._turns))
        if self._is_off or self._session.tape is not None:
            return
        try:
            # One that is a tensor on a device would have to be waited for.
            values = [group.get("eps") for group in optimizer.param_groups]
            epsilon = [one if isinstance(one, Real) else None for one in values]
            if epsilon != turns.epsilon:
                if not turns.epsilon:
                    self._report_betas(optimizer)
                turns.epsilon = epsilon
                self._report_epsilon(optimizer)
            is_next = self._last_step != step and step % len(self._turns) == turns.number
            if is_next and turns.is_due():
                self._begin_turn(optimizer, turns)
        except Exception as error:
            self._switch_off(error)

    def _report_epsilon(self, optimizer: torch.optim.Optimizer) -> None:
        of: dict[int, float] = {}
        for group in optimizer.param_groups:
            eps = group.get("eps")
            # Adam and what is like it, and RMSprop.
            if isinstance(eps, Real) and ("betas" in group or "alpha" in group):
                of.update(dict.fromkeys(map(id, group["params"]), float(eps)))
        found = {}
        for node, name, parameter in parameters_of(self._nodes, set(of)) if of else ():
            whole = node.site("param_grad", name, 0)
            site = node.part_site("param_grad", name) if is_part(parameter) else whole
            found[site] = of[id(parameter)]
        if found:
            self._on_epsilon(found)

    def _report_betas(self, optimizer: torch.optim.Optimizer) -> None:
        """Of Adam and its variants that scale by the root of the second moment."""
        if "adam" not in type(optimizer).__name__.lower() or isinstance(
            optimizer, torch.optim.Adamax
        ):
            return
        for group in optimizer.param_groups:
            betas = group.get("betas", ())
            if len(betas) == 2 and all(isinstance(one, Real) for one in betas):
                self._on_betas(float(betas[0]), float(betas[1]))

    def _begin_turn(self, optimizer: torch.optim.Optimizer, turns: _Turns) -> None:
        for _ in range(2):
            while (following := turns.following()) is not None:
                node, name, parameter = following
                stored = _values(parameter)
                if stored is None:
                    continue
                before = None
                if self._compares:
                    with torch.no_grad(), unobserved():
                        before = part_of(stored, turns.rounds).clone()
                self._turn = _Turn(optimizer, node, name, parameter, before, turns.rounds)
                self._last_step = self._session.step.index
                return
            turns.begin_round(parameters_of(self._nodes, parameter_ids(optimizer)))

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """It has stepped: compares, and reads the numbers and the states."""
        turn = self._turn
        is_due = turn is not None and turn.optimizer is optimizer
        if is_due:
            self._turn = None
        if self._is_off or self._session.tape is not None:
            return
        try:
            if turn is not None and is_due and turn.before is not None:
                self._compare(turn, turn.before)
            if self._moments == "all":
                owned = parameter_ids(optimizer)
                self._read_states(optimizer, parameters_of(self._nodes, owned))
            elif self._moments == "turns" and turn is not None and is_due:
                self._read_states(optimizer, [(turn.node, turn.name, turn.parameter)])
        except Exception as error:
            self._switch_off(error)

    def _read_states(
        self, optimizer: torch.optim.Optimizer, parameters: Iterable[StoredTensor]
    ) -> None:
        tensors, sites = [], []
        for node, name, parameter in parameters:
            for key, value in optimizer.state.get(parameter, {}).items():
                if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
                    continue
                values = unwrapped(local(value.detach()))
                is_dense = values.layout is torch.strided and values.dtype.is_floating_point
                if is_dense and can_read(values) and has_memory(values):
                    tensors.append(values)
                    sites.append(node.site("optimizer_state", f"{name}.{key}", 0))
        if tensors:
            roles = ["optimizer_state"] * len(sites)
            self._session.observe_list(tensors, sites, roles, 0, Judge.optimizer_state, False)

    def _compare(self, turn: _Turn, before: torch.Tensor) -> None:
        stored = _values(turn.parameter)
        if stored is None:
            return
        with torch.no_grad(), unobserved():
            now = part_of(stored, turn.round)
            if now.shape != before.shape or now.dtype != before.dtype:
                return
            wide = torch.float64 if now.dtype is torch.float64 else torch.float32
            moved, weight = now.to(wide) - before.to(wide), before.to(wide)
            ratio = torch.linalg.vector_norm(moved) / torch.linalg.vector_norm(weight)
            # Of a weight that was all zero, or is not finite, there is no ratio: 0.
            ratio = torch.nan_to_num(ratio, nan=0.0, posinf=0.0, neginf=0.0)
            lost = None
            gradient = turn.parameter.grad
            if now.dtype in _NARROW and gradient is not None:
                gradient = unwrapped(local(gradient))
                if gradient.layout is torch.strided and gradient.shape == stored.shape:
                    is_due = part_of(gradient, turn.round) != 0
                    count = (is_due & (now == before)).sum()
                    lost = count / is_due.sum().clamp(min=1)
        self._read("update_ratio", turn, ratio)
        if lost is not None:
            self._read("lost_updates", turn, lost)

    def _read(self, role: str, turn: _Turn, number: torch.Tensor) -> None:
        if number.is_cpu or streams_of(number.device) is not None:
            self._session.read_number(number, turn.node.site(role, turn.name, 0))

    def _switch_off(self, error: Exception) -> None:
        self._is_off = True
        self._session.report_internal_error("the reading of updates", error)


def _values(parameter: torch.Tensor) -> Optional[torch.Tensor]:
    """What this rank holds of a parameter that is about to be updated; None: it can't be read."""
    if parameter.grad is None:
        return None
    values = unwrapped(local(parameter.detach()))
    is_dense = values.layout is torch.strided and values.dtype.is_floating_point
    is_readable = is_dense and values.dtype.itemsize > 1 and can_read(values)
    return values if is_readable and has_memory(values) and values.numel() else None
