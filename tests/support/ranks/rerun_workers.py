"""A step of data-parallel training that is run again, with a fault on one of the ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastcheck


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
