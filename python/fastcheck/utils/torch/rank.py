"""The rank of this process."""

from __future__ import annotations

import os
from typing import Any

import torch


def own_rank() -> int:
    """The number of this process among those that train together; 0 where it is alone."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdecimal() else 0


def group_size(group: Any = None) -> int:
    """How many ranks ``group`` (None: the default group) has; 1 without one, or outside of it."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 1
    return max(1, torch.distributed.get_world_size(group))
