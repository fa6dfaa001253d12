"""UpdateReadings: by how much an update moves a parameter, for one parameter a step, in turn.

The parameter is copied before the update and compared with it after, on its device. What comes out
are two numbers, read like any other: they are records of the step, which nothing waits for.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple, Optional

import torch

from fastcheck.calls.module_calls import ModuleNode
from fastcheck.calls.stored import parameter_ids, parameters_of
from fastcheck.monitor.session.session import Session
from fastcheck.utils.torch.own_operators import unobserved
from fastcheck.utils.torch.readable import can_read, has_memory
from fastcheck.utils.torch.sharding import local
from fastcheck.utils.torch.streams import streams_of
from fastcheck.utils.torch.transforms import unwrapped

__all__ = ["UpdateReadings", "part_of"]

# Of a larger parameter a part is copied: another one at each of its turns.
_MOST_ELEMENTS = 1 << 20
_NARROW = (torch.bfloat16, torch.float16)


class _Turns:
    """The parameters of one optimizer that take turns, as modules and names."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.places: list[tuple[ModuleNode, str]] = []
        self.next = 0
        #: How often all had their turn.
        self.rounds = 0


class _Copied(NamedTuple):
    optimizer: torch.optim.Optimizer
    node: ModuleNode
    name: str
    parameter: torch.Tensor
    before: torch.Tensor
    round: int


class UpdateReadings:
    """Of one session at module level. Every method expects the session's lock to be held."""

    def __init__(self, session: Session, nodes: Sequence[ModuleNode]) -> None:
        self._session = session
        self._nodes = nodes
        self._turns: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Turns] = (
            weakref.WeakKeyDictionary()
        )
        self._copied: Optional[_Copied] = None
        self._last_step = -1
        self._is_off = False

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer is about to step: copies the parameter whose turn it is."""
        copied = self._copied
        session = self._session
        step = session.step.index
        if copied is not None and copied.optimizer is optimizer and self._last_step == step:
            return  # a step() that calls that of its base class
        self._copied = None
        turns = self._turns.get(optimizer)
        if turns is None:
            turns = self._turns[optimizer] = _Turns(len(self._turns))
        is_due = self._last_step != step and step % len(self._turns) == turns.number
        if is_due and session.tape is None and not self._is_off:
            try:
                self._copy(optimizer, turns)
            except Exception as error:
                self._switch_off(error)

    def _copy(self, optimizer: torch.optim.Optimizer, turns: _Turns) -> None:
        for _ in range(2):
            while turns.next < len(turns.places):
                node, name = turns.places[turns.next]
                turns.next += 1
                module = node.module()
                parameter = None if module is None else module._parameters.get(name)
                stored = None if parameter is None else _values(parameter)
                if parameter is None or stored is None:
                    continue
                with torch.no_grad(), unobserved():
                    before = part_of(stored, turns.rounds, _MOST_ELEMENTS).clone()
                self._copied = _Copied(optimizer, node, name, parameter, before, turns.rounds)
                self._last_step = self._session.step.index
                return
            turns.rounds += len(turns.places) > 0
            parameters = parameters_of(self._nodes, parameter_ids(optimizer))
            turns.places = [(node, name) for node, name, one in parameters if one.requires_grad]
            turns.next = 0

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """It has stepped: compares, and reads the numbers."""
        copied = self._copied
        if copied is None or copied.optimizer is not optimizer:
            return
        self._copied = None
        try:
            self._compare(copied)
        except Exception as error:
            self._switch_off(error)

    def _compare(self, copied: _Copied) -> None:
        stored, before = _values(copied.parameter), copied.before
        if stored is None:
            return
        with torch.no_grad(), unobserved():
            now = part_of(stored, copied.round, _MOST_ELEMENTS)
            if now.shape != before.shape or now.dtype != before.dtype:
                return
            wide = torch.float64 if now.dtype is torch.float64 else torch.float32
            moved, weight = now.to(wide) - before.to(wide), before.to(wide)
            ratio = torch.linalg.vector_norm(moved) / torch.linalg.vector_norm(weight)
            # Of a weight that was all zero, or is not finite, there is no ratio: 0.
            ratio = torch.nan_to_num(ratio, nan=0.0, posinf=0.0, neginf=0.0)
            lost = None
            gradient = copied.parameter.grad
            if now.dtype in _NARROW and gradient is not None:
                gradient = unwrapped(local(gradient))
                if gradient.layout is torch.strided and gradient.shape == stored.shape:
                    is_due = part_of(gradient, copied.round, _MOST_ELEMENTS) != 0
                    count = (is_due & (now == before)).sum()
                    lost = count / is_due.sum().clamp(min=1)
        self._read("update_ratio", copied, ratio)
        if lost is not None:
            self._read("lost_updates", copied, lost)

    def _read(self, role: str, copied: _Copied, number: torch.Tensor) -> None:
        if number.is_cpu or streams_of(number.device) is not None:
            self._session.read_number(number, copied.node.site(role, copied.name, 0))

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


def part_of(tensor: torch.Tensor, turn: int, most: int) -> torch.Tensor:
    """At most ``most`` elements of a tensor, as a view: the part whose turn it is, all of it in a
    row of turns.
    """
    for dim in range(tensor.dim()):
        if tensor.numel() <= most:
            break
        size = tensor.shape[dim]
        # So many of this dimension fit.
        length = max(1, min(size, most * size // tensor.numel()))
        pieces = -(-size // length)
        start = min(turn % pieces * length, size - length)
        tensor, turn = tensor.narrow(dim, start, length), turn // pieces
    return tensor
