"""The rank of this process, and a collective: what every rank of a group has to say, as JSON."""

from __future__ import annotations

import json
import os
from typing import Any

import torch

_MOST_BYTES = 1 << 30


def of_all_ranks(value: Any, group: Any = None) -> list[Any]:
    """``value`` of each rank of ``group`` (None: the default group), in the order of the ranks,
    which all call this and wait for each other. Lists come in the place of tuples.

    torch's all_gather_object() takes pickles: whoever takes part by a rank's connection could run
    code on all ranks.

    Raises:
        ValueError: a rank has sent something else, or more than a GiB. On every rank.
    """
    count = group_size(group)
    if count == 1:
        return [value]
    distributed, device = torch.distributed, _device_of(group)
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    size = torch.tensor([len(text)], dtype=torch.int64, device=device)
    sizes = [torch.zeros_like(size) for _ in range(count)]
    distributed.all_gather(sizes, size, group=group)
    lengths = [int(length) for length in sizes]
    if min(lengths) < 0 or max(lengths) > _MOST_BYTES:
        raise ValueError(f"a rank has sent a message of {max(lengths):,} bytes")
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: len(text)] = text
    parts = [torch.zeros_like(padded) for _ in range(count)]
    distributed.all_gather(parts, padded, group=group)
    return [json.loads(p[:n].cpu().numpy().tobytes()) for p, n in zip(parts, lengths)]


def _device_of(group: Any) -> torch.device:
    """The device on which the tensors of the group's collectives lie; the CPU where it has a
    choice.
    """
    group = torch.distributed.group.WORLD if group is None else group
    devices = {device.type: device for device in getattr(group, "_device_types", ())}
    return devices.get("cpu") or next(iter(devices.values()), torch.device("cpu"))


def own_rank() -> int:
    """The number of this process among those that train together; 0 where it is alone."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdecimal() else 0


def group_size(group: Any = None) -> int:
    """The number of ranks of ``group`` (None: the default group); 1 without a group, or outside of
    it.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 1
    return max(1, torch.distributed.get_world_size(group))
