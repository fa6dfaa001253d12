"""Where each rank has a part of a parameter: what it has computed of the gradient of that part.

The optimizer has the parts, which autograd never sees: while a module runs, it has the whole
parameter instead. A hook on that is given what each backward pass of this rank adds to the
gradient, before it is reduced and scattered. What of it belongs to this rank's part is added up,
and compared with the gradient of the part: so no rank needs anything of another.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, Callable, Optional

import torch

from fastcheck.calls.module_calls import ModuleNode
from fastcheck.calls.stored import parameter_at
from fastcheck.utils.torch.own_operators import unobserved
from fastcheck.utils.torch.sharding import local
from fastcheck.utils.torch.transforms import unwrapped
from fastcheck.utils.torch.versions import is_dynamo_compiling

from .reduced import StepOf, is_readable, norm_of, wide
from .rotation import part_of

__all__ = ["LEAST_ELEMENTS", "BeforeForward", "PartGradient"]

# The ratio of two norms of fewer elements is mostly chance.
LEAST_ELEMENTS = 64
_MOST_HANDLES = 256


class PartGradient:
    """Of one parameter, in its turn. ``turn``: what of a large part is read."""

    def __init__(
        self,
        node: ModuleNode,
        name: str,
        parameter: torch.Tensor,
        turn: int,
        step_of: StepOf,
        on_error: Callable[[Exception], None],
    ) -> None:
        self._node = node
        self._name = name
        self._parameter = parameter
        self._turn = turn
        self._step_of = step_of
        self._on_error = on_error
        # Of the last views, of which FSDP1 has new ones in each forward pass.
        self._handles: deque[Any] = deque(maxlen=_MOST_HANDLES)
        # In the step of this index.
        self._sum: Optional[tuple[int, torch.Tensor]] = None

    def _whole(self) -> Optional[torch.Tensor]:
        """What the module has now in the place of the parameter."""
        return parameter_at(self._node, self._name)

    def _has_hook(self, whole: torch.Tensor) -> bool:
        """Whether the last hook is on this tensor."""
        hooks = self._handles[-1].hooks_dict_ref() if self._handles else None
        return hooks is not None and hooks is whole._backward_hooks

    def _hook(self, whole: torch.Tensor) -> None:
        register: Any = whole.register_hook
        self._handles.append(register(self._came))

    def _came(self, gradient: torch.Tensor) -> None:
        """Called by autograd: this is about to be added to the gradient of the whole parameter."""
        try:
            step = self._step_of()
            values = unwrapped(gradient.detach())
            if step is None or not is_readable(values):
                return
            part = self._of_part(values)
            if part is None:
                return
            part = part_of(part, self._turn)
            with torch.no_grad(), unobserved():
                if self._sum is not None and self._sum[0] == step:
                    self._sum[1].add_(part)
                    return
                total = part.to(wide(part), copy=True)
                earlier = self._reduced()
                if earlier is not None:  # not set to None after the last update
                    total.add_(earlier)
                self._sum = step, total
        except Exception as error:
            self._on_error(error)

    def _of_part(self, values: torch.Tensor) -> Optional[torch.Tensor]:
        """Of the whole gradient what belongs to this rank's part."""
        raise NotImplementedError

    def _reduced_part(self, values: torch.Tensor) -> Optional[torch.Tensor]:
        """Of the reduced gradient what _of_part() has."""
        return values if values.shape == local(self._parameter).shape else None

    def norms(self, step: int) -> Optional[tuple[torch.Tensor, torch.Tensor]]:
        """Of this rank's gradient as far as it is about its part, and of the part's gradient."""
        if self._sum is None or self._sum[0] != step:
            return None
        reduced = self._reduced()
        return None if reduced is None else (norm_of(self._sum[1]), norm_of(reduced))

    def _reduced(self) -> Optional[torch.Tensor]:
        """The reduced gradient, as far as it is read; None where there is none yet."""
        gradient = self._parameter.grad
        if gradient is None:
            return None
        values = unwrapped(local(gradient).detach())
        part = self._reduced_part(values) if is_readable(values) else None
        return None if part is None else part_of(part, self._turn)

    def close(self) -> None:
        """Takes the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class BeforeForward:
    """A hook that modules hold; a copy of it (deepcopy, pickle) does nothing."""

    def __init__(self, method: Optional[weakref.WeakMethod[Callable[[], None]]] = None) -> None:
        self._method = method

    def __call__(self, module: torch.nn.Module, *_: Any) -> None:
        # Compiled code would be compiled again at each turn.
        if is_dynamo_compiling():
            return
        method = None if self._method is None else self._method()
        if method is not None:
            method()

    def __deepcopy__(self, memo: Any) -> BeforeForward:
        return BeforeForward()

    def __reduce__(self) -> tuple[Any, ...]:
        return BeforeForward, ()
