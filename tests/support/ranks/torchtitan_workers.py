"""Ranks of tests of a loop of torchtitan's shape. Each is a process of its own."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

import fastcheck
from fastcheck.utils.torch.sharding import local
from support.programs.training import Net, poison, where


def _clip(model: Any, most: float) -> torch.Tensor:
    """As torchtitan.distributed.utils.clip_grad_norm_ of torchtitan 0.3 does without pipelines."""
    parameters = list(model.parameters())
    norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    clip_grads_with_norm_(parameters, most, norm)
    return norm


def trains(rank: int, observed: bool, bad_step: int, folder: str) -> Any:
    """As torchtitan.trainer.Trainer.train_step does: two micro-batches, clip, step, schedule, and a
    checkpoint of every second step.
    """
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model: Any = Net()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    monitor = fastcheck.install(model, sync="step") if observed else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    torch.manual_seed(rank)
    found: dict[str, Any] = {"losses": [], "norms": [], "stop": None}
    try:
        for step in range(6):
            optimizer.zero_grad()
            for micro in range(2):
                x = torch.randn(4, 8)
                is_bad = (rank, step, micro) == (1, bad_step, 1)
                loss = model(poison(x) if is_bad else x).square().sum() / 16
                loss.backward()
                found["losses"].append(loss.item())
            found["norms"].append(_clip(model, 1.0).item())
            optimizer.step()
            schedule.step()
            if step % 2:
                dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/step-{step}")
    except fastcheck.OverflowDetected as stop:
        found["stop"] = stop.step, stop.report.rank, where(stop.culprit)[1]
    found["is_intact"] = all(bool(local(p).isfinite().all()) for p in model.parameters())
    if monitor is not None:
        rows = monitor.step_table()
        found["rows"] = [row.gradient_norm for row in rows]
        sites = [monitor.sites[r["site"]] for r in monitor.records()]
        found["keys"] = sorted({site.key for site in sites if site.role == "param_grad"})
    return found
