"""The rank of this process."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch


class Ranks(NamedTuple):
    """This process among others: its rank, how many stop ``together`` with it (1: it decides
    alone), and whether it trains with others, stopping with them or not.
    """

    own: int = 0
    together: int = 1
    has_others: bool = False


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
