"""Functions that the ranks of the DeepSpeed tests run, each in a process of its own."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fastcheck
from fastcheck.utils.torch.sharding import local
from support.programs.training import nan_gradient, where


class Recomputed(nn.Sequential):
    """The activations of its modules are computed again in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self:
            x = torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)
        return x


def _engine(stage: int, dtype: str, make: Any = nn.Sequential, **more: Any) -> Any:
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=os.environ["RANK"])
    warnings.simplefilter("ignore")
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    if dtype == "fp16":
        get_accelerator().is_fp16_supported = lambda: True
    torch.manual_seed(0)
    model = make(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        # Under ZeRO 3 parameters this small would stay gathered.
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **more,
    }
    if dtype == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def _step(engine: Any, spoil: bool = False) -> float:
    dtype = next(engine.module.parameters()).dtype
    out = engine(torch.randn(4, 8).to(dtype))
    loss = (nan_gradient(out) if spoil else out).float().square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


def plain(rank: int, stage: int, dtype: str) -> Any:
    engine = _engine(stage, dtype)
    torch.manual_seed(rank)
    return [_step(engine) for _ in range(4)]


def trains(rank: int, stage: int, dtype: str, bad_step: int) -> Any:
    """A NaN in a gradient of rank 0."""
    engine = _engine(stage, dtype)
    monitor = fastcheck.callbacks.deepspeed(engine, sync="step")
    torch.manual_seed(rank)
    if stage == 3 and rank == 1:
        engine.module[2].bias.ds_tensor.fill_(float("nan"))  # its one element is that of rank 0
    losses: list[float] = []
    try:
        for step in range(6):
            losses.append(_step(engine, spoil=step == bad_step and rank == 0))
    except fastcheck.OverflowDetected as stop:
        sites = [monitor.sites[number] for number in monitor.records()["site"]]
        return {
            "losses": losses,
            "stop": (engine.global_steps, stop.step, stop.report.rank),
            "culprit": where(stop.culprit),
            "is_intact": all(bool(local(p).isfinite().all()) for p in engine.module.parameters()),
            "norms": [row.gradient_norm for row in monitor.step_table()[:3]],
            "keys": {site.key for site in sites if site.role == "param_grad"},
            "weights": {site.key for site in sites if site.role == "param"},
        }
    return None


def variant(rank: int, stage: int, name: str, is_observed: bool) -> Any:
    """Eight micro-batches, with what changes the step: accumulation, checkpointing, compile."""
    micro = 2 if name == "accumulation" else 1
    make = Recomputed if name == "checkpointing" else nn.Sequential
    engine = _engine(stage, "fp32", make, gradient_accumulation_steps=micro)
    if name == "compiled":
        engine.compile(backend="eager")
    monitor = fastcheck.callbacks.deepspeed(engine) if is_observed else None
    torch.manual_seed(rank)
    losses = [_step(engine) for _ in range(8)]
    weights = [local(p).tolist() for p in engine.module.parameters()]
    if monitor is None:
        return losses, weights, None
    monitor.remove()
    sites = {monitor.sites[row["site"]] for row in monitor.records()}
    read = {site.key for site in sites if site.role == "param_grad"}
    return losses, weights, (monitor.step_index, len(monitor.events), read)


def resumes(rank: int, stage: int, folder: str) -> Any:
    """A checkpoint after three steps, loaded by a new engine, and a NaN two steps later."""
    engine = _engine(stage, "fp32")
    torch.manual_seed(rank)
    for _ in range(3):
        _step(engine)
    engine.save_checkpoint(folder)
    later = _engine(stage, "fp32")
    later.load_checkpoint(folder)
    fastcheck.callbacks.deepspeed(later)
    try:
        for step in range(4):
            _step(later, spoil=step == 2)
    except fastcheck.OverflowDetected as stop:
        return stop.step, later.global_steps, where(stop.culprit)[1]
    return None


def overflows(rank: int, stage: int) -> Any:
    """A weight that leaves the range of float16 by an update, which the next step reads."""
    engine = _engine(stage, "fp16")
    fastcheck.callbacks.deepspeed(engine)
    for step in range(20):
        try:
            _step(engine)
        except fastcheck.OverflowDetected as stop:
            return step, stop.step, where(stop.culprit)[:3]
        if step == 11:  # after those that the scale makes it skip
            for group in engine.optimizer.single_partition_of_fp32_groups:
                group.data[0] = 1e5
    return None


def skips(rank: int, stage: int) -> Any:
    engine = _engine(stage, "fp16")
    monitor = fastcheck.callbacks.deepspeed(engine)
    for _ in range(8):
        _step(engine)
    monitor.remove()
    rows = [row.overflow for row in monitor.step_table()]
    verdicts = {event.verdict.name for event in monitor.events}
    return engine.skipped_steps, rows, monitor.event_count, verdicts


def saves(rank: int, stage: int, place: str) -> Any:
    """A checkpoint, and one after a weight of rank 1 was spoilt."""
    os.chdir(place)
    engine = _engine(stage, "fp32")
    fastcheck.callbacks.deepspeed(engine, seal="refuse")
    torch.manual_seed(rank)
    for _ in range(2):
        _step(engine)
    engine.save_checkpoint("saved")
    found: dict[str, Any] = {}
    found["verified"] = None
    folder = Path("saved", "global_step2")
    if (folder / "fastcheck.json").exists():
        verified = fastcheck.verify(str(folder))
        found["verified"] = bool(verified), verified.step, verified.equal
    if rank == 1:
        with torch.no_grad():
            local(engine.module[0].bias)[0] = float("inf")
    try:
        engine.save_checkpoint("saved", tag="bad")
    except fastcheck.NonFiniteWeightsError as error:
        lines = str(error).splitlines()
        found.update(refused=lines[0], got=lines[2].split()[-1])
    return {**found, "written": Path("saved/bad").exists()}


def seals(rank: int, stage: int, folder: str) -> Any:
    """What verify(resume=) says of a clean resume, and of three that leave something out."""
    found: dict[str, Any] = {}
    for fault in ("sealed", "", "moments", "rate", "weight"):
        engine = _engine(stage, "fp32", nn.Sequential)
        torch.manual_seed(1)
        parts = {"optimizer": engine.optimizer}
        if fault != "sealed":
            engine.load_checkpoint(folder, load_optimizer_states=fault != "moments")
            torch.set_rng_state(torch.load(f"{folder}/random.pt"))
            if fault == "rate":
                engine.optimizer.param_groups[0]["lr"] *= 2
            if fault == "weight":
                local(engine.module[0].bias).detach().add_(1)
            resumed: Any = fastcheck.verify(f"{folder}/seal", resume=engine.module, **parts)
            losses = [_step(engine) for _ in range(3)]
            steps = resumed.first_steps
            found[fault] = list(resumed.differing), steps is not None and steps.agrees, len(losses)
            continue
        for step in range(6):
            _step(engine)
            if step == 2:
                engine.save_checkpoint(folder)
                torch.save(torch.get_rng_state(), f"{folder}/random.pt")
                fastcheck.seal(f"{folder}/seal", engine.module, resume=True, **parts)
    return found
