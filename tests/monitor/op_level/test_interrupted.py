"""A forward that ends with a BaseException such as KeyboardInterrupt: torch calls no hook, and the
next steps are observed.
"""

from __future__ import annotations

import asyncio
import logging
import reprlib
from typing import Any

import pytest
import torch
from torch import nn

import fastcheck

pytestmark = pytest.mark.usefixtures("fresh_start")


class Inner(nn.Module):
    interrupt: type[BaseException] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.interrupt is not None:
            raise self.interrupt
        return x * 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(3, 3), Inner(), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(self.first(x)))


class Tree(nn.Module):
    """Calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, depth: int = 3) -> torch.Tensor:
        return self.layer(self(x, depth - 1) if depth else x)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("sync", ["never", "call"])
@pytest.mark.parametrize("level", ["module", "op"])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, ValueError])
def test_steps_close_after_an_interrupt_that_the_caller_catches(
    level: str, sync: str, kind: type[BaseException]
) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = fastcheck.install(model, level=level, sync=sync)
    train(model, optimizer)
    model.inner.interrupt = kind
    for _ in range(2):
        with pytest.raises(kind):
            train(model, optimizer)
    model.inner.interrupt = None
    for _ in range(3):
        train(model, optimizer)
    assert monitor.step_index == 3 and monitor.event_count == 0
    with pytest.raises(fastcheck.OverflowDetected) as caught:
        model(torch.full((2, 3), float("inf")))
        train(model, optimizer)
    culprit = caught.value.report.culprit
    assert culprit.step == 4
    assert (culprit.site.module, culprit.site.role) == ("", "input")
    monitor.remove()


def test_an_interrupt_before_a_part_is_called_alone() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = fastcheck.install(model, level="op")
    model.inner.interrupt = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        train(model, optimizer)
    for _ in range(3):
        train(model.first, optimizer)
    assert monitor.step_index == 2
    monitor.remove()


def test_a_module_that_calls_itself_is_one_pass() -> None:
    model = Tree()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = fastcheck.install(model, level="op")
    for _ in range(3):
        train(model, optimizer)
    assert monitor.step_index == 2 and monitor.event_count == 0
    records = monitor.records()
    outputs = [row for row in records if "addmm" in str(monitor.sites[row["site"]].op)]
    assert {int(row["step"]) for row in outputs} == {0, 1, 2}
    monitor.remove()


def _logged(y: torch.Tensor) -> None:
    logging.getLogger("train").warning("scores %s", y)


@pytest.mark.parametrize(
    "write", [reprlib.repr, _logged, lambda y: asyncio.run(asyncio.sleep(0, y))]
)
def test_a_stop_is_not_lost_where_a_tensor_is_written_as_text(write: Any) -> None:
    """Code that takes in the exceptions of a repr() would take in the stop."""
    layer = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    fastcheck.install(layer, level="op")
    with pytest.raises(fastcheck.OverflowDetected) as stop:
        for divisor in (1.0, 0.0, 1.0):
            scores = layer(torch.randn(2, 3)) / divisor
            write(scores)
            optimizer.zero_grad()
            scores.sum().backward()
            optimizer.step()
    assert stop.value.step == 1
    assert stop.value.culprit.site.op == "aten.div.Tensor"
