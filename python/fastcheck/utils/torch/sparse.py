"""The values that a sparse tensor holds, as a tensor that can be read."""

from __future__ import annotations

from typing import Optional

import torch

from .own_operators import no_grad, unobserved

_COMPRESSED = frozenset((torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc))


def values_of(tensor: torch.Tensor) -> Optional[torch.Tensor]:
    """Its values, on the memory of ``tensor`` and without a graph; None where it is not sparse."""
    is_coo = tensor.layout is torch.sparse_coo
    if not is_coo and tensor.layout not in _COMPRESSED:
        return None
    with unobserved(), no_grad():
        held = tensor._values() if is_coo else tensor.values()
        return held.detach()
