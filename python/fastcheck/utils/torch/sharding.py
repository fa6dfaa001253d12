"""Sharded optimizers (FSDP2, DeepSpeed's ZeRO 3): decides over all shards whether an update is bad,
and finds what a rank keeps of a parameter, and where in it that lies.

A rank holds only a part of every gradient.

DistributedDataParallel needs nothing of this: after its reduction the gradients of all ranks are
equal, and so is what each rank decides.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist


class LocalShard(NamedTuple):
    """``data`` is what a rank holds of a tensor of ``numel`` elements: those that begin at
    ``offsets`` and have the shape ``sizes``.
    """

    data: torch.Tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    numel: int


def kept_part(tensor: Any) -> Optional[torch.Tensor]:
    """The part that this rank keeps of a parameter that is not gathered now, flat; None of any
    other tensor. No communication.
    """
    kept = getattr(tensor, "ds_tensor", None)
    if not isinstance(kept, torch.Tensor) or tensor.numel() == tensor.ds_numel:
        return None
    return without_padding(tensor, kept)


def kept_parts(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parts that this rank keeps of the model's parameters, by name: of those that are not
    gathered, of which a state_dict has no elements. No communication.
    """
    parts = {name: kept_part(parameter) for name, parameter in model.named_parameters()}
    return {name: part for name, part in parts.items() if part is not None}


def without_padding(parameter: Any, flat: torch.Tensor) -> torch.Tensor:
    """The part ``flat`` that this rank has of a parameter, or of its gradient, without what
    DeepSpeed adds behind the last element to make all parts equally long, which is never written.
    """
    rank = 0
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank = torch.distributed.get_rank(getattr(parameter, "ds_process_group", None))
    held = int(parameter.ds_numel) - rank * flat.numel()
    return flat.detach().reshape(-1)[: max(0, held)]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The local part of a DTensor, or of a parameter under ZeRO 3; any other tensor as it is. No
    communication.
    """
    inner = getattr(tensor, "_local_tensor", None)
    if inner is None and hasattr(tensor, "ds_tensor"):
        inner = kept_part(tensor)
    return inner if isinstance(inner, torch.Tensor) else tensor


def part_of(tensor: torch.Tensor) -> Optional[LocalShard]:
    """The part of a DTensor that this rank has; None of any other tensor, and of partial sums. No
    communication.
    """
    chunks = getattr(tensor, "__create_chunk_list__", None)  # as DCP asks for them
    if chunks is None or any(
        placement.is_partial() for placement in getattr(tensor, "placements", ())
    ):
        return None
    (chunk,) = chunks()
    return LocalShard(local(tensor), tuple(chunk.offsets), tuple(chunk.sizes), tensor.numel())


def is_part(tensor: torch.Tensor) -> bool:
    """True if the local part of a DTensor is less than the tensor: a shard, or a partial sum."""
    placements = getattr(tensor, "placements", None) or ()
    return any(not placement.is_replicate() for placement in placements)


def is_sharded(optimizer: torch.optim.Optimizer) -> bool:
    """True if some parameter of the optimizer is a DTensor of which each rank holds a part."""
    return any(True for _ in _sharded(optimizer))


def shard_groups(optimizer: torch.optim.Optimizer) -> list[dist.ProcessGroup]:
    """The process groups over which the optimizer's parameters are in parts, in the same order on
    every rank.
    """
    groups: list[dist.ProcessGroup] = []
    for parameter in _sharded(optimizer):
        mesh = parameter.device_mesh
        for dimension, placement in enumerate(parameter.placements):
            if not placement.is_replicate():
                group = mesh.get_group(dimension)
                if group not in groups:
                    groups.append(group)
    return groups


def reduce_found_inf(word: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Makes ``word`` the highest that any rank has which holds a part of the same parameters.

    ``word``: 0-dim float32 on the parameters' device, 1.0 (skip the update) or 0.0; changed in
    place. One MAX all-reduce of 4 bytes for each group of shard_groups(), in the order of the
    stream: the host doesn't wait, but for a group on the CPU. Every rank of these groups has to
    call it before the same step of the optimizer.
    """
    for group in shard_groups(optimizer):
        dist.all_reduce(word, op=dist.ReduceOp.MAX, group=group)


def join_reduction(optimizer: torch.optim.Optimizer) -> None:
    """Joins the reductions that the other ranks make in reduce_found_inf(), with the value 0.0."""
    parameter = next(_sharded(optimizer), None)
    if parameter is not None:
        word = torch.zeros((), dtype=torch.float32, device=local(parameter).device)
        reduce_found_inf(word, optimizer)


def _sharded(optimizer: torch.optim.Optimizer) -> Any:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if is_part(parameter):
                yield parameter
