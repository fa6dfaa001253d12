"""placement(): where a rank runs and which part of the model it holds, as plain data."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

_VARIABLE = "FASTCHECK_PLACEMENT"
#: Ranks that differ in these alone hold the same weights.
_REPLICATED = ("dp", "dp_replicate", "cp")
_MEGATRON = {
    "dp": "get_data_parallel_rank",
    "tp": "get_tensor_model_parallel_rank",
    "pp": "get_pipeline_model_parallel_rank",
    "ep": "get_expert_model_parallel_rank",
    "cp": "get_context_parallel_rank",
}


def placement(modules: Iterable[torch.nn.Module]) -> dict[str, Any]:
    """Host, device and parallel coordinates of this rank; None where they are unknown.

    ``coordinates`` are those of the environment variable FASTCHECK_PLACEMENT (``dp=3,tp=1``), or
    of Megatron's parallel state, or of the device mesh of the model's DTensors, or of its
    DistributedDataParallel. ``replica_group`` is the same text on ranks that hold the same
    weights. ``serial`` is the device's UUID, ``run`` the launcher's name of the job. Synchronises
    nothing, communicates with no rank and never raises.
    """
    models = list(modules)
    device = _first_device(models)
    coordinates, group = _attempt(_coordinates, models) or (None, None)
    is_parallel = dist.is_available() and dist.is_initialized()
    return {
        "host": socket.gethostname(),
        "rank": dist.get_rank() if is_parallel else None,
        "world_size": dist.get_world_size() if is_parallel else None,
        "local_rank": _whole(os.environ.get("LOCAL_RANK")),
        **(_attempt(_device, device) or {"device": None, "serial": None}),
        "coordinates": coordinates,
        "replica_group": group,
        "run": _run(),
    }


def _attempt(function: Any, *arguments: Any) -> Any:
    """Returns what a function returns; None where it raises, as other libraries' functions may."""
    try:
        return function(*arguments)
    except Exception:
        return None


def _first_device(models: list[torch.nn.Module]) -> Optional[torch.device]:
    for model in models:
        for parameter in model.parameters():
            return parameter.device
    return None


def _device(device: Optional[torch.device]) -> Optional[dict[str, Any]]:
    if device is None or device.type == "cpu":
        return {"device": "cpu", "serial": None} if device is not None else None
    properties = getattr(torch, device.type).get_device_properties(device)
    uuid = getattr(properties, "uuid", None)
    return {
        "device": str(getattr(properties, "name", device.type)),
        "serial": None if uuid is None else str(uuid),
    }


def _coordinates(models: list[torch.nn.Module]) -> tuple[Optional[dict[str, int]], Optional[str]]:
    given = os.environ.get(_VARIABLE)
    if given:
        pairs = (part.partition("=") for part in given.replace(" ", "").split(","))
        return _with_group({name: int(value) for name, _, value in pairs if name})
    state = sys.modules.get("megatron.core.parallel_state")
    if state is not None and state.model_parallel_is_initialized():
        ranks = {name: _attempt(getattr(state, ask, None)) for name, ask in _MEGATRON.items()}
        return _with_group({name: rank for name, rank in ranks.items() if rank is not None})
    return _of_mesh(models) or _of_ddp(models) or (None, None)


def _with_group(coordinates: dict[str, int]) -> tuple[dict[str, int], str]:
    return coordinates, _group_text(
        {name: at for name, at in coordinates.items() if name not in _REPLICATED}
    )


def _group_text(parts: dict[str, int]) -> str:
    return " ".join(f"{name}={at}" for name, at in sorted(parts.items())) or "all"


def _of_mesh(models: list[torch.nn.Module]) -> Optional[tuple[dict[str, int], str]]:
    """The coordinates in the mesh of the DTensors; dimensions over which none of them is in parts
    hold replicas.
    """
    coordinates: dict[str, int] = {}
    parts: dict[str, int] = {}
    for parameter in (p for model in models for p in model.parameters()):
        mesh: Any = getattr(parameter, "device_mesh", None)
        for dimension, placed in enumerate(getattr(parameter, "placements", None) or ()):
            name = (mesh.mesh_dim_names or [f"mesh{i}" for i in range(mesh.ndim)])[dimension]
            at = coordinates[name] = int(mesh.get_local_rank(dimension))
            if not placed.is_replicate():
                parts[name] = at
    return (coordinates, _group_text(parts)) if coordinates else None


def _of_ddp(models: list[torch.nn.Module]) -> Optional[tuple[dict[str, int], str]]:
    for module in (part for model in models for part in model.modules()):
        if isinstance(module, DistributedDataParallel):
            ranks = dist.get_process_group_ranks(module.process_group)
            at = ranks.index(dist.get_rank())
            is_whole = len(ranks) == dist.get_world_size()
            return {"dp": at}, "all" if is_whole else f"with rank {min(ranks)}"
    return None


def _run() -> Optional[str]:
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"):
        run_id = os.environ.get(name, "")
        if run_id not in ("", "none"):
            return run_id
    return None


def _whole(text: Optional[str]) -> Optional[int]:
    return int(text) if text and text.isdecimal() else None
