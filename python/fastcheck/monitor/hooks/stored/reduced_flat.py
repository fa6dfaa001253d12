"""FullyShardedDataParallel (FSDP1): a gradient before it is reduced and scattered, and after.

The parameters of a module lie one after the other in a flat tensor, of which each rank has a piece:
of some parameters all, of some a part, of most of them nothing. While the module runs it has views
of the whole flat tensor in their place, other ones in each forward pass. Where a view begins shows
what of the parameter is in the piece. (A communication hook would be given the flat gradient, but
there can be one alone, which has to do the reduction itself, and none with hybrid strategies.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Optional

import torch

from fastcheck.calls.module_calls import ModuleNode
from fastcheck.utils.torch.rank import group_size

from .reduced_parts import LEAST_ELEMENTS, PartGradient

__all__ = ["FlatGradient", "flat_modules"]


class FlatGradient(PartGradient):
    """``rank``: this one's place in the group over which the flat tensor is in pieces; ``ranks``:
    how many there are.
    """

    def __init__(
        self,
        node: ModuleNode,
        name: str,
        parameter: torch.Tensor,
        rank: int,
        ranks: int,
        *rest: Any,
    ) -> None:
        super().__init__(node, name, parameter, *rest)
        self._piece, self._ranks = elements_of(parameter), ranks
        # Where the piece begins in the flat tensor, and what is here of this parameter.
        self._begins = rank * self._piece
        self._shape, self._offset = parameter.shape, int(parameter.storage_offset())
        # What of the parameter is here, and how much of what is here is no padding.
        self._held = slice(0, 0)

    @staticmethod
    def takes(parameter: torch.Tensor) -> bool:
        """Whether this rank has so much of the parameter that it can be compared; each rank has
        turns of its own.
        """
        return parameter.dim() == 1 and parameter.numel() >= LEAST_ELEMENTS

    def before_forward(self) -> None:
        """A module is about to run: where it has a new view of the parameter, that gets the
        hook.
        """
        whole = self._whole()
        if whole is None or not whole.requires_grad or self._has_hook(whole):
            return
        if whole.device == self._parameter.device and self._finds(whole):
            self._hook(whole)

    def _finds(self, whole: torch.Tensor) -> bool:
        """Whether this is the whole parameter, in a flat tensor of as many pieces as there are
        ranks.
        """
        if elements_of(whole) != self._piece * self._ranks or not whole.is_contiguous():
            return False
        first = int(whole.storage_offset())
        start = self._begins + self._offset - first
        end = min(start + self._shape.numel(), whole.numel())
        self._held = slice(start, end)
        # All of what is here, but for padding behind the last parameter.
        is_last = first + whole.numel() <= self._begins + self._piece
        return 0 <= start < end and (end - start == self._shape.numel() or is_last)

    def _of_part(self, values: torch.Tensor) -> Optional[torch.Tensor]:
        if values.numel() < self._held.stop:
            return None
        return values.reshape(-1)[self._held]

    def _reduced_part(self, values: torch.Tensor) -> Optional[torch.Tensor]:
        if values.shape != self._shape:
            return None
        return values[: self._held.stop - self._held.start]


def elements_of(tensor: torch.Tensor) -> int:
    """So many fit its memory."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def flat_modules(models: Sequence[torch.nn.Module]) -> Iterator[tuple[torch.nn.Module, Any]]:
    """Those that are wrapped in a FullyShardedDataParallel of several ranks, outermost first, and
    the group over which each is in pieces.
    """
    fsdp = getattr(torch.distributed, "fsdp", None)
    kind = getattr(fsdp, "FullyShardedDataParallel", None)
    if not isinstance(kind, type):
        return
    for model in models:
        for module in model.modules():
            group = getattr(module, "process_group", None)
            if isinstance(module, kind) and group_size(group) > 1:
                yield module, group
