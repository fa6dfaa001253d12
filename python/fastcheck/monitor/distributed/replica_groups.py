"""Finds which parameters of a model several ranks hold alike, and which ranks.

DistributedDataParallel says so, the placements of DTensors do (FSDP2 with a replicate dimension,
tensor parallelism), hybrid shards of FSDP1, and in Megatron Core the process groups of its parallel
state, with the attributes that it sets on parameters. A plain parameter outside of these is not
taken for a replica, nor is that of a norm beside DTensors: it may be of a rank's own channels.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any, Callable, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

Names = frozenset[str]


class ReplicaGroup(NamedTuple):
    """The ranks of ``group`` hold the same bits of the parameters ``names``, as ``what`` says.

    ``is_data_parallel``: each of them is to train on batches of its own. ``reason``: what is known
    of the cause where several differ, or "". ``are_averaged``: they are equal only now and then, as
    with local SGD.
    """

    group: dist.ProcessGroup
    names: Names
    what: str
    is_data_parallel: bool
    reason: Callable[[], str] = str
    are_averaged: Callable[[], bool] = bool


def replica_groups(
    model: torch.nn.Module, calls_of: Callable[[torch.nn.Module], int]
) -> list[ReplicaGroup]:
    """All of a model, in the same order on each rank of a group. ``calls_of``: how often a module
    was called. Communicates with no rank.
    """
    groups = [*_of_ddp(model, calls_of), *_of_placements(model), *_of_hybrid_shards(model)]
    groups += _of_megatron(model)
    return [replicas for replicas in groups if dist.get_world_size(replicas.group) > 1]


def _of_ddp(
    model: torch.nn.Module, calls_of: Callable[[torch.nn.Module], int]
) -> Iterator[ReplicaGroup]:
    for path, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            prefix, ignored = f"{path}." if path else "", module.parameters_to_ignore
            inner = (name for name, _ in module.module.named_parameters() if name not in ignored)
            wrapper = weakref.ref(module)
            yield ReplicaGroup(
                module.process_group,
                frozenset(f"{prefix}module.{name}" for name in inner),
                "DistributedDataParallel",
                is_data_parallel=True,
                reason=partial(_bypassed, wrapper, calls_of),
                are_averaged=partial(_has_local_sgd, wrapper),
            )


def _bypassed(
    wrapper: weakref.ref[DistributedDataParallel], calls_of: Callable[[torch.nn.Module], int]
) -> str:
    known = wrapper()
    # A method of the model may call its parts.
    if known is None or calls_of(known) or not any(map(calls_of, known.module.modules())):
        return ""
    return (
        "gradients were not reduced: the model was called, but DistributedDataParallel around it "
        "never was. Call the wrapped model"
    )


def _has_local_sgd(wrapper: weakref.ref[DistributedDataParallel]) -> bool:
    hooks = [hook for hook, _ in getattr(wrapper(), "_comm_hooks", ())]
    return any("localsgd" in getattr(hook, "__name__", "").lower() for hook in hooks)


def _of_placements(model: torch.nn.Module) -> Iterator[ReplicaGroup]:
    """Groups of each dimension of a mesh over which a DTensor is replicated, and of each over which
    FSDP2 divides batches, though it may replicate nothing there.
    """
    of_ranks: dict[tuple[int, ...], tuple[dist.ProcessGroup, str, set[str]]] = {}
    own = dict(_fsdp_groups(model))
    for name, parameter in model.named_parameters():
        mesh: Any = getattr(parameter, "device_mesh", None)
        for dimension, placed in enumerate(getattr(parameter, "placements", ())):
            if not placed.is_replicate() or mesh.size(dimension) < 2:
                continue
            group = mesh.get_group(dimension)
            called = mesh.mesh_dim_names[dimension] if mesh.mesh_dim_names else str(dimension)
            what = f"replicated over dimension {called} of the device mesh"
            of_ranks.setdefault(_ranks(group), (group, what, set()))[2].add(name)
    for ranks, group in own.items():
        of_ranks.setdefault(ranks, (group, "fully_shard", set()))
    for ranks, (group, what, names) in of_ranks.items():
        yield ReplicaGroup(group, frozenset(names), what, is_data_parallel=ranks in own)


def _of_hybrid_shards(model: torch.nn.Module) -> Iterator[ReplicaGroup]:
    """FSDP1 with a hybrid strategy: each rank of the group has the same shard."""
    group_of: dict[str, Any] = {}
    for path, module in model.named_modules():
        ignored = getattr(module, "_ignored_params", None)
        if ignored is not None:  # an instance of FSDP within another instance has groups of its own
            group = getattr(module, "_inter_node_pg", None)
            for name, parameter in module.named_parameters(path):
                group_of[name] = None if parameter in ignored else group
    of_ranks: dict[tuple[int, ...], tuple[dist.ProcessGroup, set[str]]] = {}
    for name, group in group_of.items():
        if group is not None:
            of_ranks.setdefault(_ranks(group), (group, set()))[1].add(name)
    for group, names in of_ranks.values():
        yield ReplicaGroup(group, frozenset(names), "hybrid shards of FSDP", is_data_parallel=True)


def _fsdp_groups(model: torch.nn.Module) -> Iterator[tuple[tuple[int, ...], dist.ProcessGroup]]:
    """The ranks among which FSDP2 divides the batches."""
    for module in model.modules():
        asked = getattr(module, "_get_fsdp_state", None)
        state = None if asked is None else asked()
        parts = getattr(state, "_fsdp_param_groups", None)
        if parts is None:  # older versions of torch have one
            parts = [getattr(state, "_fsdp_param_group", None)]
        for part in parts:
            for name in ("replicate_process_group", "shard_process_group"):
                group = getattr(getattr(part, "mesh_info", None), name, None)
                if group is not None:
                    yield _ranks(group), group


def _of_megatron(model: torch.nn.Module) -> Iterator[ReplicaGroup]:
    """Megatron Core takes a parameter that is not marked as split for a replica, too: so it leaves
    such out of the norm of gradients on all ranks of the tensor parallel group but one.
    """
    state: Any = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return
    # Experts have groups of their own; a DTensor's placements are looked at above.
    own = {
        name: parameter
        for name, parameter in model.named_parameters()
        if getattr(parameter, "allreduce", True) and not hasattr(parameter, "placements")
    }
    whole = (n for n, p in own.items() if not getattr(p, "tensor_model_parallel", False))
    group = state.get_tensor_model_parallel_group()
    yield ReplicaGroup(
        group, frozenset(whole), "not split over the tensor parallel group", is_data_parallel=False
    )
    options = [getattr(module, "ddp_config", None) for module in model.modules()]
    # The other parts of a weight come with the next forward pass there.
    late = any(getattr(option, "overlap_param_gather", False) for option in options)
    if any(option is not None for option in options) and not late:
        group = state.get_data_parallel_group(with_context_parallel=True)
        yield ReplicaGroup(group, frozenset(own), "the data parallel group", is_data_parallel=False)


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))
