"""The frames of a program as they were, with the tensors among their local variables."""

from __future__ import annotations

import dis
from collections.abc import Sequence
from types import CodeType
from typing import Any, NamedTuple, Optional, Union

import torch


class HeldTensor(NamedTuple):
    """A tensor without its graph. ``key``: in the list, tuple or dictionary of this name; None: it
    is the variable itself. ``version``: of the tensor then. ``order``, ``node``: the number and the
    name of the node that has made it; -1 and empty: it had no graph.
    """

    name: str
    key: Union[str, int, None]
    tensor: torch.Tensor
    version: int
    order: int
    node: str

    @property
    def is_unchanged(self) -> bool:
        """True if it was not written since."""
        return self.version == (0 if self.tensor.is_inference() else self.tensor._version)


class HeldFrame(NamedTuple):
    """A frame as it was; the names are those of Python's frames."""

    f_code: CodeType
    f_globals: dict[str, Any]
    f_lasti: int
    tensors: Sequence[HeldTensor]
    f_back: Optional[HeldFrame]

    @property
    def f_lineno(self) -> int:
        """The line that ran."""
        lines = [line for at, line in dis.findlinestarts(self.f_code) if at <= self.f_lasti]
        return next((line for line in reversed(lines) if line), self.f_code.co_firstlineno)

    @property
    def f_locals(self) -> dict[str, Any]:
        """The tensors that have not been written since."""
        variables: dict[str, Any] = {}
        for held in self.tensors:
            if held.is_unchanged:
                if held.key is None:
                    variables[held.name] = held.tensor
                else:
                    variables.setdefault(held.name, {})[held.key] = held.tensor
        return variables


def held_frames(frames: Sequence[Any]) -> list[HeldFrame]:
    """Frames of what the extension holds (``HeldLocals.frames()``), innermost first."""
    found: list[HeldFrame] = []
    back: Optional[HeldFrame] = None
    for code, names, at, tensors in reversed(frames):
        back = HeldFrame(code, names, at, [HeldTensor(*one) for one in tensors], back)
        found.insert(0, back)
    return found
