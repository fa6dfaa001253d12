"""fully_shard (FSDP2): a gradient before it is reduced and scattered, and after.

The optimizer has DTensors. While a module runs, it has a leaf in the place of each, which is the
same one in all steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Optional

import torch

from fastcheck.calls.module_calls import ModuleNode
from fastcheck.utils.torch.sharding import Shard, is_part, local, shard_of

from .reduced_parts import LEAST_ELEMENTS, PartGradient

__all__ = ["ShardedGradient", "sharded_modules"]


class ShardedGradient(PartGradient):
    """``shard``: what this rank has of the parameter."""

    def __init__(
        self, node: ModuleNode, name: str, parameter: torch.Tensor, shard: Shard, *rest: Any
    ) -> None:
        super().__init__(node, name, parameter, *rest)
        self._shard = shard

    @staticmethod
    def takes(parameter: torch.Tensor) -> Optional[Shard]:
        """What this rank has of the parameter, if that can be compared. Ranks with shards of
        another size, or none, decide alike.
        """
        shard = shard_of(parameter)
        if shard is None or parameter.numel() < LEAST_ELEMENTS * shard.ranks:
            return None
        return shard

    def before_forward(self) -> None:
        """A module is about to run: where it has the whole parameter now, that gets the hook."""
        whole = self._whole()
        if self._handles or whole is None or is_part(whole):
            return
        is_trained = whole.is_leaf and whole.requires_grad and whole.shape == self._parameter.shape
        # With offloaded parameters the gradient is copied to another device.
        if is_trained and whole.device == local(self._parameter).device:
            self._hook(whole)

    def _of_part(self, values: torch.Tensor) -> Optional[torch.Tensor]:
        shard = self._shard
        if values.shape != self._parameter.shape:
            return None
        return values.narrow(shard.dim, shard.start, shard.length)


def sharded_modules(models: Sequence[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    """Those to which fully_shard was applied; none before torch 2.6."""
    fsdp = getattr(torch.distributed, "fsdp", None)
    kind = getattr(fsdp, "FSDPModule", None)
    if isinstance(kind, type):
        for model in models:
            yield from (module for module in model.modules() if isinstance(module, kind))
