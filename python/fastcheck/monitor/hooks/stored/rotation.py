"""Rotation: the parameters of a model take turns, one in a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Optional

import torch

from fastcheck.calls.module_calls import ModuleNode
from fastcheck.calls.stored import StoredTensor, parameter_at

__all__ = ["Rotation", "part_of"]

# Of a larger parameter a part is read: another one at each of its turns.
_MOST_ELEMENTS = 1 << 18
# A step of a smaller model takes milliseconds, and a turn some 0.1 ms: after so many rounds there
# is a turn in one of so many steps.
_SMALL, _ROUNDS, _SPARSE = 1 << 24, 3, 8


class Rotation:
    """The parameters, as modules and names, in the order of their turns."""

    def __init__(self) -> None:
        self._places: list[tuple[ModuleNode, str]] = []
        self._next = 0
        # The elements of all of them, and in how many steps there might have been a turn.
        self._numel = self._chances = 0
        #: How often all had their turn.
        self.rounds = 0

    def is_due(self) -> bool:
        """Once for each step: whether it has a turn."""
        self._chances += 1
        is_sparse = self.rounds >= _ROUNDS and self._numel < _SMALL
        return not is_sparse or self._chances % _SPARSE == 0

    def following(self) -> Optional[StoredTensor]:
        """The next parameter of this round; None: all had their turn. Passes over those that are
        gone.
        """
        while self._next < len(self._places):
            node, name = self._places[self._next]
            self._next += 1
            parameter = parameter_at(node, name)
            if parameter is not None:
                return node, name, parameter
        return None

    def begin_round(self, parameters: Iterable[StoredTensor]) -> None:
        """Those that are trained have a turn, in this order."""
        self.rounds += len(self._places) > 0
        trained = [stored for stored in parameters if stored[2].requires_grad]
        self._places = [(node, name) for node, name, _ in trained]
        self._numel = sum(parameter.numel() for _, _, parameter in trained)
        self._next = 0


def part_of(tensor: torch.Tensor, turn: int, most: Optional[int] = None) -> torch.Tensor:
    """At most ``most`` elements (None: 262,144) of a tensor, as a view: the part whose turn it is,
    all of it in a row of turns.
    """
    most = _MOST_ELEMENTS if most is None else most
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
