"""Float8 training of torchao on the CPU, which emulates its products; skipped without torchao."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from support.programs.training import poison, stopped, where

pytest.importorskip("torchao.float8")

pytestmark = [
    pytest.mark.usefixtures("fresh_start"),
    pytest.mark.filterwarnings("default:::(?!fastcheck)"),
]


def make() -> Any:
    float8: Any = importlib.import_module("torchao.float8")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).bfloat16()
    return float8.convert_to_float8_training(model, config=float8.Float8LinearConfig(emulate=True))


def train(model: Any, bad: int = -1) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(1)
    losses = []
    for step in range(4):
        x = torch.randn(16, 16, dtype=torch.bfloat16)
        optimizer.zero_grad()
        loss = model(poison(x) if step == bad else x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("level", ["module", "op"])
def test_losses_and_weights_are_the_same(level: str) -> None:
    plain, watched = make(), make()
    monitor = fastcheck.install(watched, level=level)
    assert train(plain) == train(watched)
    assert all(map(torch.equal, plain.parameters(), watched.parameters()))
    monitor.remove()
    assert monitor.event_count == 0
    sites = {monitor.sites[r["site"]] for r in monitor.records()}
    if level == "module":
        assert ("2", "output") in {(site.module, site.role) for site in sites}


def test_a_bad_batch_is_named() -> None:
    model = make()
    fastcheck.install(model)
    stop = stopped(train, model, bad=2)
    assert stop.step == 2 and where(stop.culprit)[1] == "input"
