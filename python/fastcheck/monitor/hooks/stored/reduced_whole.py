"""DistributedDataParallel: a gradient before it is reduced, and after.

torch calls the hook where the gradient is accumulated, and DistributedDataParallel what it waits
for behind that. At the end of backward() the gradient is reduced.
"""

from __future__ import annotations

from typing import Any, Callable, Optional

import torch

from fastcheck.utils.torch.sharding import is_part
from fastcheck.utils.torch.transforms import unwrapped

from .reduced import StepOf, is_readable, norm_of
from .rotation import part_of

__all__ = ["WholeGradient"]


class WholeGradient:
    """Each rank has all of the parameter. ``turn``: which part of a large one is read."""

    def __init__(
        self,
        parameter: torch.Tensor,
        turn: int,
        step_of: StepOf,
        on_error: Callable[[Exception], None],
    ) -> None:
        self._parameter = parameter
        self._turn = turn
        self._step_of = step_of
        self._on_error = on_error
        # Of this rank alone, in the step of this index.
        self._local: Optional[tuple[int, torch.Tensor]] = None
        register: Any = parameter.register_post_accumulate_grad_hook
        self._handle = register(self._accumulated)

    @staticmethod
    def takes(parameter: torch.Tensor) -> bool:
        """Whether the gradient of this parameter can be read."""
        return parameter.is_leaf and not is_part(parameter) and is_readable(parameter)

    def before_forward(self) -> None:
        """The hook is on the parameter already."""

    def _accumulated(self, parameter: torch.Tensor) -> None:
        """Called by autograd: backward() has added to the gradient."""
        try:
            step = self._step_of()
            if step is not None:
                norm = self._norm()
                self._local = None if norm is None else (step, norm)
        except Exception as error:
            self._on_error(error)

    def norms(self, step: int) -> Optional[tuple[torch.Tensor, torch.Tensor]]:
        """Of the accumulated gradient before the last reduction, and after it."""
        if self._local is None or self._local[0] != step:
            return None
        reduced = self._norm()
        return None if reduced is None else (self._local[1], reduced)

    def _norm(self) -> Optional[torch.Tensor]:
        parameter, gradient = self._parameter, self._parameter.grad
        if gradient is None or gradient.shape != parameter.shape or is_part(gradient):
            return None
        gradient = unwrapped(gradient.detach())
        return norm_of(part_of(gradient, self._turn)) if is_readable(gradient) else None

    def close(self) -> None:
        """Takes the hook away."""
        self._handle.remove()
