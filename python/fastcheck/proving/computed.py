"""Computed: the tensors of one computation of a step."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

#: What a tensor is (``"loss"``, ``"output"``, ``"gradient"``, ``"update"``, or of a module
#: ``"forward input"``, ``"backward output"``, ...), and its name.
Key = tuple[str, str]


def is_of_rows(key: Key) -> bool:
    """Whether it is computed from some rows of the batch, and not a sum over all of them."""
    return key[0] == "output" or (is_site(key) and key[0] != "backward parameter")


def is_site(key: Key) -> bool:
    """Whether it is a tensor inside the model."""
    return " " in key[0]


@dataclass
class Computed:
    """What one computation of the step came to.

    ``tensors`` in the order of the computation. ``rows``: which of them have the rows of the batch
    in their first dimension.
    """

    tensors: dict[Key, torch.Tensor] = field(default_factory=dict)
    rows: set[Key] = field(default_factory=set)
