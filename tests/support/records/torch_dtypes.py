"""The torch dtype of a name in the reference's table."""

from __future__ import annotations

import torch


def torch_dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found
