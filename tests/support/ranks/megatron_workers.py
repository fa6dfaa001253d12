"""Functions that the ranks of the Megatron Core tests run, each in a process of its own."""

from __future__ import annotations

import functools
import json
import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fastcheck


def saves(rank: int, folder: str) -> Any:
    """Checkpoints of Megatron Core's own format. The ranks hold halves of the first layer, and the
    second layer as replicas.
    """
    os.chdir(folder)
    warnings.simplefilter("ignore")
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    # Megatron asks for a GPU where the CPU would do.
    for name, answer in (("synchronize", None), ("current_device", "cpu")):
        setattr(torch.cuda, name, functools.partial(dict.get, {0: answer}, 0))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8 // dist.get_world_size()), nn.Linear(8, 2))
    optimizer = SimpleNamespace(
        config=SimpleNamespace(fp16=False),
        param_groups=[],
        get_loss_scale=lambda: torch.ones(1),
        step=lambda: (True, 1.0, None),
    )
    fastcheck.callbacks.megatron(model, optimizer, seal="refuse")

    def save(name: str) -> None:
        Path(name).mkdir(exist_ok=True)
        shards = {}
        for key, tensor in model.state_dict().items():
            is_part = key.startswith("0.")
            where = [(0, rank, dist.get_world_size())] if is_part else []
            shards[key] = ShardedTensor.from_rank_offsets(
                f"model.{key}", tensor, *where, replica_id=0 if is_part else rank
            )
        dist_checkpointing.save({"model": shards, "iteration": 3}, name)
        dist.barrier()

    save("good")
    verified = fastcheck.verify("good")
    sealed = json.loads(Path("good", "fastcheck.json").read_text())
    dist.barrier()
    with torch.no_grad():
        if rank == 1:
            model[0].weight[2, 1] += 1
    save("other")
    if rank == 0:
        Path("other", "fastcheck.json").write_text(json.dumps(sealed))
    dist.barrier()
    other = fastcheck.verify("other")
    with torch.no_grad():
        if rank == 1:
            model[0].bias[0] = float("inf")
    refused = ""
    try:
        save("bad")
    except fastcheck.NonFiniteWeightsError as error:
        refused = str(error).splitlines()[0]
    return {
        "verified": (bool(verified), verified.equal),
        "parts": {key: len(one.get("parts", ())) for key, one in sealed["tensors"].items()},
        "other": other.differing,
        "refused": refused,
        "written": os.listdir("bad"),
    }
