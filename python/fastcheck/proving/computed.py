"""Computed: the tensors of one computation of a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable, Optional

import torch

#: A kind of tensor (``"loss"``, ``"output"``, ``"gradient"``, ``"update"``, or of a module
#: ``"forward input"``, ``"backward output"``, ...), and its name.
Key = tuple[str, str]


def is_of_rows(key: Key) -> bool:
    """True if it is computed from some rows of the batch, and not a sum over all of them."""
    return key[0] == "output" or is_site(key)


def is_site(key: Key) -> bool:
    """True if it is a tensor inside the model."""
    return " " in key[0]


@dataclass
class Computed:
    """The results of one computation of the step.

    ``tensors`` in the order of the computation. ``rows``: which of them have the rows of the batch
    in their first dimension. ``fixed``: those inside the model that need no gradient.
    """

    tensors: dict[Key, torch.Tensor] = field(default_factory=dict)
    rows: set[Key] = field(default_factory=set)
    fixed: set[Key] = field(default_factory=set)

    def map_rows(self, change: Callable[[torch.Tensor], Optional[torch.Tensor]]) -> Computed:
        """The results with ``change`` made of each tensor that has rows, and without those for
        which it returns None, or whose rows are not known.
        """
        changed = {k: change(t) if k in self.rows else t for k, t in self.tensors.items()}
        kept = [k for k in changed if k in self.rows or not is_of_rows(k)]
        tensors = {k: t for k in kept if (t := changed[k]) is not None}
        return Computed(tensors, self.rows & tensors.keys())
