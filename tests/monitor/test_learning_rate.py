"""A learning rate of 0 for all parameters is named in the summary, and warned of."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Callable

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


@pytest.mark.filterwarnings("ignore::fastcheck.LearningRateWarning")
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


class TestWarning:
    """Once, in the tenth update in a row."""

    @staticmethod
    def warnings_of(steps: int, change: Callable[[int], float], level: str = "module") -> list[Any]:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=change(0))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with fastcheck.install(model, level=level):
                for step, x in enumerate(batches(steps)):
                    optimizer.param_groups[0]["lr"] = change(step)
                    optimizer.zero_grad()
                    model(x).square().mean().backward()
                    optimizer.step()  # here
        return [one for one in caught if one.category is fastcheck.LearningRateWarning]

    @pytest.mark.parametrize("level", ["module", "op"])
    @pytest.mark.usefixtures("op_observer")
    def test_in_every_step(self, level: str) -> None:
        (one,) = self.warnings_of(25, lambda step: 0.0, level)
        assert issubclass(one.category, fastcheck.FastcheckWarning)
        assert "the learning rate of every parameter group was 0 in the first 10" in str(
            one.message
        )
        line = Path(__file__).read_text().splitlines()[one.lineno - 1]
        assert one.filename == __file__ and line.endswith("# here")

    def test_from_a_step_on(self) -> None:
        (one,) = self.warnings_of(25, lambda step: 0.1 * (step < 4))
        assert "has been 0 since step 4" in str(one.message)

    @pytest.mark.parametrize(
        "change",
        [
            lambda step: 0.01 * step,  # a warm-up
            lambda step: 0.1 * (step > 8),
            lambda step: 0.1 * (step < 16),  # the end of a schedule
            lambda step: 0.1 * (step % 9 == 0),
            lambda step: torch.tensor(0.1),
        ],
    )
    def test_is_not_given(self, change: Any) -> None:
        assert self.warnings_of(25, change) == []

    def test_of_two_optimizers(self) -> None:
        model = Net()
        with warnings.catch_warnings(), fastcheck.install(model, watch=False) as monitor:
            warnings.simplefilter("error")
            optimizers = [
                torch.optim.SGD(model.head.parameters(), lr=0.0),
                torch.optim.SGD(model.blocks.parameters(), lr=0.1),
            ]
            for order in (1, -1):
                for x in batches(12):
                    model(x).square().mean().backward()
                    for optimizer in optimizers[::order]:
                        optimizer.step()
        assert "every parameter group" not in monitor.summary()

    def test_can_be_silenced(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fastcheck.LearningRateWarning)
            assert "was 0 in all 12 steps" in summary_after([0.0] * 12)
