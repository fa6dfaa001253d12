"""Module level: a NaN of the batch or of a buffer is an event if something is computed from it."""

from __future__ import annotations

from typing import Callable

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


class Unread(nn.Module):
    """Returns what no kernel reads."""

    def __init__(self, layout: torch.layout, bad: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.act, self.last = nn.Linear(8, 4), Act(bad), Converted(layout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.act(self.layer(x)))
        return y


class Act(nn.Module):
    def __init__(self, bad: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.bad = bad

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bad(x)


class Converted(nn.Module):
    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.layout = layout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.layout is torch.jagged:
            return torch.nested.as_nested_tensor(x, layout=torch.jagged)
        return x.to_sparse()


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.jagged])
@pytest.mark.parametrize("bad", [lambda x: x / 0, lambda x: x * 0 / 0])
def test_what_a_module_makes_of_it_is_not_read(
    layout: torch.layout, bad: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    model = Unread(layout, bad)
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        y = model(torch.randn(2, 8))
        values = y.values() if layout is torch.jagged else y.to_dense()
        (values - values.mean()).square().mean().backward()
    assert stop.value.culprit.site.module == "act"


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.jagged])
def test_a_mask_before_what_is_not_read_is_no_event(layout: torch.layout) -> None:
    model = Unread(layout, lambda x: x.masked_fill(x < 0, -torch.inf))
    with fastcheck.install(model) as monitor:
        y = model(torch.randn(2, 8))
        values = y.values() if layout is torch.jagged else y.to_dense()
        values.exp().mean().backward()
    assert monitor.event_count == 0


def test_a_part_without_parameters_has_made_what_the_next_part_is_given() -> None:
    """The program calls the parts, and computes between them."""
    parts = nn.ModuleList([nn.Linear(8, 4), Act(lambda x: x.abs() / 0), nn.Linear(4, 1)])
    with fastcheck.install(parts), pytest.raises(fastcheck.OverflowDetected) as stop:
        parts[2](parts[1](parts[0](torch.randn(2, 8))) * 2)
    assert stop.value.culprit.site.module == "1"


def test_what_a_part_made_before_is_told_where_a_mask_could_be_the_cause() -> None:
    parts = nn.ModuleList([nn.Linear(8, 4), Act(lambda x: -x.abs() / 0), nn.Linear(4, 1)])
    with fastcheck.install(parts), pytest.raises(fastcheck.OverflowDetected) as stop:
        parts[2](parts[1](parts[0](torch.randn(2, 8))) * 2)
    assert "and 1 (Act) · forward · output was, before it, non-finite" in stop.value.culprit.reason
