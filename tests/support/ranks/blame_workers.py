"""Trainings in which one rank has a bad sample, and what each rank reports of it."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import fastcheck
from fastcheck.monitor.distributed import join
from support.programs.training import where


class SyncedNorm(nn.SyncBatchNorm):
    """As SyncBatchNorm, whose own forward is not for the CPU. Nor is it for DDP there."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.detach().mean(0)
        dist.all_reduce(mean)
        return x - mean / dist.get_world_size()


def _trains(rank: int, faulty: int, norm: nn.Module, **options: Any) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), norm, nn.Linear(8, 2))
    is_synced = isinstance(norm, SyncedNorm)
    model: nn.Module = net if is_synced else DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    monitor = fastcheck.install(model, **options)
    try:
        for step in range(5):
            batch = np.ones((4, 8), np.float32)
            if rank == faulty and step == 2:
                batch[1, 3] = np.nan
            optimizer.zero_grad()
            model(torch.from_numpy(batch)).square().mean().backward()
            optimizer.step()
    except fastcheck.OverflowDetected as stop:
        return stop.step, stop.report.rank, where(stop.culprit), monitor
    finally:
        monitor.remove()
    return monitor


def a_bad_sample(rank: int, faulty: int, log_dir: str) -> Any:
    """The stops of several kinds of run, without their monitors."""
    return [
        _trains(rank, faulty, nn.ReLU(), log_dir=log_dir)[:3],
        _trains(rank, faulty, nn.ReLU(), level="op")[:3],
        _trains(rank, faulty, nn.ReLU(), sync="step")[:3],
        _trains(rank, faulty, SyncedNorm(8))[:3],
    ]


class Summed(nn.Module):
    """A layer whose results are those of all ranks together."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.part(x)
        dist.all_reduce(made.detach())
        return made * 1.0


def a_bad_weight(rank: int, faulty: int, log_dir: str) -> Any:
    """A weight of one rank becomes a NaN between two steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Summed(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    fastcheck.install(model, log_dir=log_dir)
    try:
        for step in range(5):
            if (rank, step) == (faulty, 2):
                with torch.no_grad():
                    model[1].part.weight[0, 0] = float("nan")
            optimizer.zero_grad()
            model(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
    except fastcheck.OverflowDetected as stop:
        return stop.step, stop.report.rank, where(stop.culprit)
    return None


def updates_are_held_back(rank: int, kind: str) -> Any:
    """One rank's bad gradient reaches all of them, whose optimizers are not fused."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)))
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01)
    fastcheck.install(model)
    try:
        for step in range(5):
            optimizer.zero_grad()
            loss = model(torch.ones(4, 8)).square().mean()
            (loss * float("nan") if (rank, step) == (1, 2) else loss).backward()
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.step()
            same = all(bool((a == b).all()) for a, b in zip(before, model.parameters()))
            if step == 2:
                assert same
    except fastcheck.OverflowDetected as stop:
        is_finite = all(bool(p.isfinite().all()) for p in model.parameters())
        return stop.step, stop.report.rank, is_finite, stop.report.weights_intact
    return None


def goes_on_without_a_stop(rank: int, faulty: int) -> Any:
    """The counted events of the faulty step where no stop is due: of each kind of run."""
    found = []
    for options in ({"overflow_nums": -1}, {"stop": fastcheck.Stop(action=lambda stop: None)}):
        monitor = _trains(rank, faulty, nn.ReLU(), **options)
        events = [e for e in monitor.events if e.counted and e.step == 2]
        found.append([(where(e)[0], e.site.role, e.verdict.name) for e in events])
    return found


def removes_its_monitor(rank: int) -> Any:
    """Whether the parts of a monitor that ranks share are gone, and torch's Join as it was."""
    original, model = Join.__exit__, nn.Linear(2, 2)
    monitor = fastcheck.install(model)
    session, is_wrapped = weakref.ref(monitor._session), Join.__exit__ is not original
    monitor.remove()
    del monitor
    gc.collect()
    return is_wrapped, session() is None, Join.__exit__ is original


def trains_in_a_pipeline(rank: int, options: Any) -> Any:
    """Two stages of torch.distributed.pipelining, where torch.empty() holds NaNs."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    assert bool(torch.empty(3).isnan().all())
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda y, target: (y - target).square().mean())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = fastcheck.install(model, **options)
    try:
        for step in range(4):
            x = torch.randn(4, 4)
            if (rank, step) == (0, 3):
                x[0, 0] = float("inf")
            if rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=torch.zeros(4, 4))
            optimizer.step()
            optimizer.zero_grad()
        monitor.remove()
    except fastcheck.OverflowDetected as stop:
        return step, stop.step, stop.report.rank, where(stop.culprit)
    return "no stop"


def train_in_pipelines(rank: int) -> Any:
    """At module level and at op level."""
    return [trains_in_a_pipeline(rank, options) for options in ({"sync": "step"}, {"level": "op"})]


def meets(rank: int) -> Any:
    """Installs with options that differ, then again with the same, and then one rank is late."""
    model = nn.Linear(2, 2)
    refused = []
    for options in (
        {"overflow_nums": -1 if rank == 1 else 1},
        {"stop": fastcheck.Stop(action="warn" if rank == 0 else "raise")},
        {"overflow_nums": 2 + rank, "sync": "step"},
    ):
        try:
            fastcheck.install(model, **options)
        except fastcheck.ConfigError as error:
            refused.append(str(error).splitlines()[0])
    hooks_left = len(model._forward_hooks)
    fastcheck.install(model, overflow_nums=-1).remove()
    store: Any = dist.distributed_c10d._get_default_store()
    if rank == 0:
        join._MEETING_SECONDS = 0.3
    else:
        store.wait(["goes on"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monitor = fastcheck.install(model)
        store.set("goes on", "1")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        stopped = None
        try:
            for step in range(4):
                x = torch.full((1, 2), float("nan") if (rank, step) == (1, 2) else 1.0)
                model(x).sum().backward()
                optimizer.step()
            monitor.remove()
        except fastcheck.OverflowDetected as stop:
            stopped = stop.step, stop.report.rank
    return refused, hooks_left, [str(one.message) for one in caught], stopped


def a_received_activation(rank: int) -> Any:
    """A pipeline of two stages: what the second receives has a NaN that the first has made."""
    torch.manual_seed(0)
    stage = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.01)
    fastcheck.install(stage, sync="step")
    x, gradient = torch.randn(2, 4), torch.empty(2, 4)
    try:
        for step in range(3):
            if step == 1 and rank == 0:
                with torch.no_grad():
                    stage[1].weight.mul_(3e38).mul_(10.0).nan_to_num_(posinf=3e38)
            if rank == 0:
                y = stage(x)
                dist.send(y.detach(), 1)
                dist.recv(gradient, 1)
                y.backward(gradient.nan_to_num_())
            else:
                received = torch.empty(2, 4)
                dist.recv(received, 0)
                stage(received.requires_grad_()).sum().backward()
                dist.send(received.grad, 0)
            optimizer.step()
    except fastcheck.OverflowDetected as stop:
        return stop.step, stop.report.rank, where(stop.culprit)
    return None
