"""Keeps a bad update out of weights in host memory, for optimizers that can't skip one themselves.

An optimizer leaves a parameter without a gradient alone, with all that it keeps of it. So where the
gradients of an update are on the CPU and not finite, they are taken away for the time of the step.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Callable, Optional

from torch import Tensor
from torch.optim import Optimizer

from fastcheck.errors import UnsupportedTensorError
from fastcheck.utils.torch.own_operators import no_grad
from fastcheck.utils.torch.versions import is_compiling

from .found_inf import gradients_by_device

_Taken = list[tuple[Tensor, Tensor]]

# What was taken from each optimizer whose step is under way, by whichever guard.
_under_way: weakref.WeakKeyDictionary[Optimizer, _Taken] = weakref.WeakKeyDictionary()


class HostGuard:
    """The twin of UpdateGuard for optimizers in host memory; the arguments are the same.

    Not thread-safe: one optimizer is stepped by one thread at a time.
    """

    def __init__(
        self,
        found_nonfinite: Callable[[Sequence[Tensor]], Tensor],
        combine: Optional[Callable[[Tensor, Optimizer], None]] = None,
    ) -> None:
        self._found_nonfinite = found_nonfinite
        self._combine = combine
        self._mine: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def before_update(self, optimizer: Optimizer) -> Optional[Tensor]:
        """Takes the gradients away where any of them is not finite.

        Returns a 0-dim float32 tensor, 1.0: the update is held back. None: the parameters are not
        all in host memory, or the gradients can't be read.
        """
        self.after_update(optimizer)  # of a step that raised
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not parameters or is_compiling() or not all(p.is_cpu for p in parameters):
            return None
        gradients = [one for many in gradients_by_device(optimizer).values() for one in many]
        if not all(gradient.is_cpu for gradient in gradients):
            return None
        with no_grad():
            try:
                word = self._found_nonfinite(gradients or [Tensor([0.0])])
            except UnsupportedTensorError:
                return None
            if self._combine is not None:
                self._combine(word, optimizer)
        if float(word) and optimizer not in _under_way:
            taken = [(p, p.grad) for p in parameters if p.grad is not None]
            for parameter, _ in taken:
                parameter.grad = None
            _under_way[optimizer] = taken
            self._mine.add(optimizer)
        return word

    def after_update(self, optimizer: Optimizer) -> None:
        """Gives the gradients back."""
        if optimizer in self._mine:
            self._mine.discard(optimizer)
            for parameter, gradient in _under_way.pop(optimizer, ()):
                if parameter.grad is None:
                    parameter.grad = gradient

    def close(self) -> None:
        """Gives back what steps that raised have left."""
        for optimizer in list(self._mine):
            self.after_update(optimizer)
