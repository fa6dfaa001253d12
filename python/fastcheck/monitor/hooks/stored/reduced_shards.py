"""fully_shard (FSDP2): a gradient before it is reduced and scattered, and after.

The optimizer has the shards of parameters, as DTensors, which autograd never sees: while a module
runs, it has the whole parameter instead, a leaf that fully_shard gathers. A hook on that leaf is
given what each backward pass of this rank adds to the gradient, before fully_shard reduces it. The
part of it that belongs to this rank's shard is added up, and compared with the gradient of the
shard: so no rank needs anything of another.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Callable, Optional

import torch

from fastcheck.calls.module_calls import ModuleNode
from fastcheck.utils.torch.own_operators import unobserved
from fastcheck.utils.torch.sharding import Shard, is_part, local, shard_of
from fastcheck.utils.torch.transforms import unwrapped
from fastcheck.utils.torch.versions import is_dynamo_compiling

from .reduced import StepOf, is_readable, norm_of, wide
from .rotation import part_of

__all__ = ["BeforeForward", "ShardedGradient", "sharded_modules"]

# The ratio of two norms of fewer elements is mostly chance.
_LEAST_ELEMENTS = 64


class ShardedGradient:
    """Each rank has a shard of the parameter. ``turn``: which part of a large shard is read."""

    def __init__(
        self,
        node: ModuleNode,
        name: str,
        parameter: torch.Tensor,
        shard: Shard,
        turn: int,
        step_of: StepOf,
        on_error: Callable[[Exception], None],
    ) -> None:
        self._node = node
        self._name = name
        self._parameter = parameter
        self._shard = shard
        self._turn = turn
        self._step_of = step_of
        self._on_error = on_error
        self._handle: Any = None
        # What this rank has computed of the gradient, in the step of this index.
        self._sum: Optional[tuple[int, torch.Tensor]] = None

    @staticmethod
    def takes(parameter: torch.Tensor) -> Optional[Shard]:
        """What this rank has of the parameter, if that can be compared. Ranks with shards of
        another size, or none, decide alike.
        """
        shard = shard_of(parameter)
        if shard is None or parameter.numel() < _LEAST_ELEMENTS * shard.ranks:
            return None
        return shard

    def before_forward(self) -> None:
        """A module is about to run: where it has the whole parameter now, that gets the hook."""
        module = self._node.module()
        whole = None if module is None else module._parameters.get(self._name)
        if self._handle is not None or whole is None or is_part(whole):
            return
        is_trained = whole.is_leaf and whole.requires_grad and whole.shape == self._parameter.shape
        # With offloaded parameters the gradient is copied to another device.
        if is_trained and whole.device == local(self._parameter).device:
            register: Any = whole.register_hook
            self._handle = register(self._came)

    def _came(self, gradient: torch.Tensor) -> None:
        """Called by autograd: this is about to be added to the gradient of the whole parameter."""
        try:
            step, shard = self._step_of(), self._shard
            values = unwrapped(gradient.detach())
            if step is None or values.shape != self._parameter.shape or not is_readable(values):
                return
            part = part_of(values.narrow(shard.dim, shard.start, shard.length), self._turn)
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

    def norms(self, step: int) -> Optional[tuple[torch.Tensor, torch.Tensor]]:
        """Of this rank's gradient as far as it is about its shard, and of the shard's gradient."""
        if self._sum is None or self._sum[0] != step:
            return None
        reduced = self._reduced()
        return None if reduced is None else (norm_of(self._sum[1]), norm_of(reduced))

    def _reduced(self) -> Optional[torch.Tensor]:
        """The part of the shard's gradient whose turn it is; None where there is none yet."""
        gradient = self._parameter.grad
        if gradient is None:
            return None
        values = unwrapped(local(gradient).detach())
        is_whole = values.shape == local(self._parameter).shape
        return part_of(values, self._turn) if is_whole and is_readable(values) else None

    def close(self) -> None:
        """Takes the hook away."""
        if self._handle is not None:
            self._handle.remove()


class BeforeForward:
    """A hook that a module of fully_shard holds; a copy of it (deepcopy, pickle) does nothing."""

    def __init__(self, method: Optional[weakref.WeakMethod[Callable[[], None]]] = None) -> None:
        self._method = method

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
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


def sharded_modules(models: Sequence[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    """Those to which fully_shard was applied; none before torch 2.6."""
    fsdp = getattr(torch.distributed, "fsdp", None)
    kind = getattr(fsdp, "FSDPModule", None)
    if isinstance(kind, type):
        for model in models:
            yield from (module for module in model.modules() if isinstance(module, kind))
