"""Lazy modules: until their first forward their parameters and buffers have no shape and no memory,
and raise where they are asked for them. They are left alone until then and observed afterwards.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastcheck


class Lazy(nn.Module):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU())
        self.last = nn.Linear(8, 2)
        self.unused = nn.LazyConv2d(3, 3)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.first(x)) * self.scale
        return y


def train(model: nn.Module, steps: int = 4) -> list[float]:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(16, 5)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "options",
    [{}, {"level": "op"}, {"record": "stats"}, {"record": "range"}, {"watch": True}],
    ids=str,
)
def test_observed_once_they_are_materialised(options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    alone = train(Lazy())
    torch.manual_seed(1)
    monitor = fastcheck.install(model := Lazy(), **options)
    assert "0 records" in monitor.summary()
    assert train(model) == alone
    records = monitor.records()
    sites = [monitor.sites[number] for number in set(records["site"].tolist())]
    read = {(site.module, site.label) for site in sites}
    monitor.remove()
    # At op level parameters are read once, before the first forward.
    first = ("first.0", "output" if "level" in options else "weight")
    assert read >= {first, ("last", "weight")}
    assert not [site for site in read if site[0] == "unused"]
    assert "no longer observes" not in monitor.summary()


@pytest.mark.parametrize("level", ["op", "module"])
def test_dumped(level: str, tmp_path: Path) -> None:
    model = Lazy()
    with fastcheck.Dumper(tmp_path, level=level, tensors=True, model=model):
        train(model, 1)


def test_a_stop_in_the_first_step_is_replayed_and_dumped(tmp_path: Path) -> None:
    model = Lazy(scale=float("inf"))
    stop = fastcheck.Stop(replay=True, dump=tmp_path)
    monitor = fastcheck.install(model, stop=stop)
    with pytest.raises(fastcheck.OverflowDetected) as caught:
        monitor.run(lambda x: model(x).sum().backward(), torch.randn(16, 5))
    assert caught.value.report.dump is not None


def test_inventory() -> None:
    model = Lazy()
    made = fastcheck.inventory(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert made["parameters"]["first.0.weight"]["shape"] is None
    assert made["buffers"]["first.1.running_mean"]["shape"] is None
    assert made["totals"] == {"parameters": 18, "trainable": 18}
    assert fastcheck.compare(made, made).verdict == "identical"


def test_a_seal_names_what_it_does_not_hold(tmp_path: Path) -> None:
    torch.save((model := Lazy()).state_dict(), path := tmp_path / "model.pt")
    seal = fastcheck.seal(path, model)
    assert "last.weight" in seal.tensors
    assert "a lazy module" in seal.unsealed["first.0.weight"]


def test_functions_say_what_is_expected() -> None:
    with pytest.raises(fastcheck.UnsupportedTensorError, match="lazy module before its first"):
        fastcheck.exponents(nn.LazyLinear(3).weight)


@pytest.mark.parametrize("level", ["module", "op"])
def test_a_model_that_is_on_meta_at_first(level: str) -> None:
    with torch.device("meta"):
        model = nn.Linear(8, 8)
    with fastcheck.install(model, level=level, overflow_nums=-1) as monitor:
        model.to_empty(device="cpu")
        nn.init.constant_(model.weight, float("nan"))
        nn.init.zeros_(model.bias)
        model(torch.ones(2, 8)).sum().backward()
    assert monitor.events
