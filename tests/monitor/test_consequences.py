"""Module level: a NaN of the batch or of a buffer is an event if something is computed from it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fastcheck
from accuracy import healthy_awkward
from support.programs.training import batches, stopped, where

NAN = float("nan")
RUNS = [
    name
    for name in healthy_awkward.PROGRAMS
    if name.startswith(("run", "parts")) and name not in healthy_awkward.NOT_AT_MODULE_LEVEL
]


@pytest.mark.parametrize("name", RUNS)
def test_a_healthy_program_is_not_accused(name: str) -> None:
    assert healthy_awkward.run(name, "module") == []


class Imputing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("kept", torch.full((8,), NAN))
        self.imputes = self.adds = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.nan_to_num(0) if self.imputes else x
        y: torch.Tensor = self.layer(x + self.kept if self.adds else x)
        return y


def with_nan(x: torch.Tensor) -> torch.Tensor:
    x[0, 0] = NAN
    return x


class Ratio(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x


class Trained(nn.Module):
    """As a LightningModule, whose parts the program calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.ratio = nn.Linear(8, 4), Ratio()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return y


@pytest.mark.parametrize("level", ["module", "op"])
@pytest.mark.parametrize("is_container", [False, True])
@pytest.mark.parametrize("used", ["", "input", "loss"])
def test_what_a_part_without_parameters_returns_counts_where_it_is_used(
    level: str, is_container: bool, used: str
) -> None:
    """A metric may be NaN."""
    model = Trained()
    parts = nn.ModuleList([model.layer, model.ratio]) if is_container else model
    with fastcheck.install(parts, level=level, overflow_nums=-1) as monitor:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in batches(3):
            made = model.ratio(torch.zeros(4, 8))
            optimizer.zero_grad()
            loss = model.layer(made if used == "input" else x).square().mean()
            (loss + model.ratio(loss * 0) if used == "loss" else loss).backward()
            optimizer.step()
    assert bool([event for event in monitor.events if event.counted]) == bool(used)


def test_a_batch_that_is_used_is_named() -> None:
    model = Imputing()
    fastcheck.install(model)
    stop = stopped(model, with_nan(torch.ones(2, 8)))
    assert where(stop.culprit) == ("", "input", "input[0]", "arrived")
    assert "it did harm" in stop.culprit.reason


def test_a_batch_that_is_imputed_until_it_is_not() -> None:
    model = Imputing()
    model.imputes = True
    monitor = fastcheck.install(model, overflow_nums=-1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, x in enumerate(batches(4)):
        model.imputes = step < 3
        optimizer.zero_grad()
        model(with_nan(x)).square().mean().backward()
        if step < 3:
            optimizer.step()
            assert monitor.event_count == 0
    assert monitor.event_count >= 1
    assert (
        "values that had done no harm before" in next(e for e in monitor.events if e.counted).reason
    )


def test_a_buffer_that_is_used_is_named() -> None:
    model = Imputing()
    model.adds = True
    fastcheck.install(model)
    stop = stopped(model, torch.ones(2, 8))
    assert where(stop.culprit)[0::3] == ("", "arrived")
    assert stop.culprit.site.role == "buffer"
