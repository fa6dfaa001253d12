"""A step of data-parallel training that is run again, with a fault on one of the ranks."""

from __future__ import annotations

import warnings
from typing import Any, Optional

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastcheck

SPIKE = 35


def a_flipped_bit(rank: int, faulty: int) -> Any:
    """In the second run on one rank; its gradient reaches all. What each rank reports."""
    torch.manual_seed(0)
    count = [0]

    class Middle(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            count[0] += 1
            return x * (1 + 2.0**-20) if (rank, count[0]) == (faulty, 4) else x * 1.0

    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), Middle(), nn.Linear(8, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    step(x)
    step(x)
    before = [p.detach().clone() for p in model.parameters()]
    report = fastcheck.rerun(step, x, model=model, optimizer=optimizer)
    again = fastcheck.rerun(step, x, model=model, optimizer=optimizer)
    is_back = all(bool((a == b).all()) for a, b in zip(before, model.parameters()))
    first = report.first
    assert first is not None
    return {
        "first": (first.rank, first.site.module, first.site.role),
        "report": (report.cause, report.odd_runs, report.runs, report.ranks, report.identical),
        "own": report.differences[0].site.role,
        "text": str(report),
        "again": again.identical,
        "is_back": is_back,
    }


def a_spike_on_one_rank(
    rank: int, fault: str, faulty: int, watches: bool, fails_at: Optional[int] = None
) -> Any:
    """In step SPIKE the ``batch`` of one rank is far off, or its first run of the step computes one
    wrong element (``once``). ``fails_at``: the step in which rank 0 can't keep the state.
    """
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    runs = 0

    def spoil(module: Any, args: Any, output: torch.Tensor) -> Any:
        nonlocal runs
        if args[0][0, 0] != 7:
            return None
        runs += 1
        is_due = fault == "once" and rank == faulty and runs == 1
        return torch.cat([output[:1] + 1000.0, output[1:]]) if is_due else None

    model.module[0].register_forward_hook(spoil)
    watch = fastcheck.Watch(window=32, warm_up=16, rerun=True) if watches else False

    def step(x: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = (model(x) - x[:, :4]).square().mean()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    torch.manual_seed(rank)
    losses = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monitor = fastcheck.install(model, watch=watch, record="stats")
        for number in range(SPIKE + 4):
            x = torch.randn(32, 8)
            x[0, 0] = 7.0 if number == SPIKE else 0.0
            if (number, rank, fault) == (SPIKE, faulty, "batch"):
                x[1:] *= 100
            if rank == 0 and number == fails_at:
                reruns: Any = monitor._spike_reruns
                reruns._models = None
            losses.append(monitor.run(step, x))
        monitor.remove()
    found = monitor.watch.events if watches else ()
    return {
        "events": [(e.step, e.cause, e.text) for e in found if e.kind == "rerun"],
        "losses": losses,
        "weights": [p.tolist() for p in model.parameters()],
        "runs": runs,
        "warned": [str(w.message) for w in caught if "rerun of a step" in str(w.message)],
    }
