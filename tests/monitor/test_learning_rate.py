"""A learning rate of 0 for all parameters is named in the summary."""

from __future__ import annotations

import pytest
import torch

import fastcheck
from support.programs.training import Net, batches

pytestmark = pytest.mark.usefixtures("fresh_start")


def summary_after(rates: list[float], second: float = 0.0) -> str:
    """Of a run whose first group has these rates, step by step, and whose second has ``second``."""
    model = Net()
    monitor = fastcheck.install(model)
    groups = [{"params": model.blocks.parameters()}, {"params": model.head.parameters()}]
    optimizer = torch.optim.SGD(groups, lr=second)
    for x, rate in zip(batches(len(rates)), rates):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    # Rows are as wide as the terminal.
    return " ".join(monitor.summary().split())


def test_in_every_step() -> None:
    text = summary_after([0.0] * 3)
    assert "the learning rate of every parameter group was 0 in all 3 steps: no weight" in text


def test_from_a_step_on() -> None:
    text = summary_after([0.1] * 2 + [0.0] * 12)
    assert "the learning rate of every parameter group has been 0 since step 2 (12 steps)" in text


@pytest.mark.parametrize(
    ("rates", "second"),
    [
        ([0.0, 0.1, 0.1], 0.0),  # a warm-up
        ([0.1, 0.1, 0.0], 0.0),  # the end of a schedule
        ([0.0] * 12, 0.1),  # a group that is frozen so
        ([0.0], 0.0),
    ],
)
def test_is_no_remark_where_something_is_trained(rates: list[float], second: float) -> None:
    assert "every parameter group" not in summary_after(rates, second)
