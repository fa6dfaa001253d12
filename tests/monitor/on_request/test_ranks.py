"""Under several ranks each one looks for itself."""

from __future__ import annotations

import signal
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastcheck
from fastcheck.log.reader import read_log
from support.ranks.ranks_harness import run_ranks, values


def trains(rank: int, place: str) -> tuple[int, bool]:
    """Rank 1 alone is asked, in step 1, at op level."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    request = fastcheck.OnRequest(signal="SIGUSR1", steps=2, dir=place)
    monitor = fastcheck.install(model, on_request=request)
    for step in range(6):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        if (rank, step) == (1, 1):
            signal.raise_signal(signal.SIGUSR1)
        optimizer.step()
    monitor.remove()
    return monitor.step_index, "observed at op level" in " ".join(monitor.summary().split())


def test_one_rank_alone_is_asked(tmp_path: Path) -> None:
    results = values(run_ranks(trains, str(tmp_path / "more"), world_size=2))
    assert results == [(5, False), (5, True)]
    view = read_log(tmp_path / "more" / "step2-op")
    assert sorted(view.meta) == [1]
    assert sorted(set(view.records["step"].tolist())) == [2, 3]
