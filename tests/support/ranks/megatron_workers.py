"""Functions that the ranks of the Megatron Core tests run, each in a process of its own."""

from __future__ import annotations

import functools
import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import fastcheck


def saves(rank: int, folder: str) -> Any:
    """Two checkpoints of Megatron Core's own format: of finite weights, and of others."""
    os.chdir(folder)
    warnings.simplefilter("ignore")
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    # Megatron asks for a GPU where the CPU would do.
    for name, answer in (("synchronize", None), ("current_device", "cpu")):
        setattr(torch.cuda, name, functools.partial(dict.get, {0: answer}, 0))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = SimpleNamespace(
        config=SimpleNamespace(fp16=False),
        param_groups=[],
        get_loss_scale=lambda: torch.ones(1),
        step=lambda: (True, 1.0, None),
    )
    fastcheck.callbacks.megatron(model, optimizer, seal="refuse")

    def save(name: str) -> None:
        Path(name).mkdir(exist_ok=True)
        shards = {
            key: ShardedTensor.from_rank_offsets(f"model.{key}", tensor, replica_id=rank)
            for key, tensor in model.state_dict().items()
        }
        dist_checkpointing.save({"model": shards, "iteration": 3}, name)

    save("good")
    found = fastcheck.verify("good")
    with torch.no_grad():
        model[1].bias[0] = float("inf")
    try:
        save("bad")
    except fastcheck.NonFiniteWeightsError as error:
        return bool(found), found.equal, str(error).splitlines()[0], os.listdir("bad")
    return None
