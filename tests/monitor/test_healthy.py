"""Healthy architectures (those of tests/accuracy/healthy.py) have no events at op level and at
module level, however the model is called. The rules behind that hide no fault.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from accuracy import healthy
from accuracy.healthy import MODELS
from fastcheck.types import Verdict
from support.programs.op_level import model_with
from support.programs.training import change_gradient

pytestmark = pytest.mark.usefixtures("op_observer")

NAN = float("nan")


@pytest.mark.parametrize("precision", healthy.PRECISIONS)
@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_counted(name: str, precision: str) -> None:
    monitor, _ = healthy.train(name, precision, steps=3)
    assert not [f"{e.site}: {e.reason}" for e in monitor.events if e.counted]
    assert len(monitor.records()) > 50


@pytest.mark.parametrize("name", MODELS)
def test_nor_when_the_parts_are_called_one_by_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's own forward is called behind the back of its hooks."""
    kind = type(MODELS[name]())
    monkeypatch.setattr(kind, "__call__", lambda self: self.forward(), raising=False)
    monitor, _ = healthy.train(name, "float16", steps=3)
    assert not [f"{e.site}: {e.reason}" for e in monitor.events if e.counted]


def scaled_run(is_masked: bool, scaler: Any, count: str = "origin") -> fastcheck.Monitor:
    def function(x: torch.Tensor) -> torch.Tensor:
        first = torch.tensor([1.0] + [0.0] * 7)
        if is_masked:
            x = x.masked_fill(first.bool(), 0.0)  # lets none of the bad gradient through
        return change_gradient(x, lambda g: g / (1 - first) * 0)

    model = model_with(function)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    stop = fastcheck.Stop(count=count)
    monitor = fastcheck.install(model, level="op", record="stats", overflow_nums=-1, stop=stop)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 8)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    monitor.remove()
    return monitor


def test_a_scaled_gradient_that_a_mask_stops_is_absorbed() -> None:
    monitor = scaled_run(True, torch.amp.GradScaler("cpu"))
    assert monitor.event_count == 0
    assert {e.verdict for e in monitor.events} == {Verdict.ABSORBED}
    assert "was finite" in monitor.events[0].reason


def test_without_a_scale_the_same_is_absorbed_and_counts_where_all_count() -> None:
    monitor = scaled_run(True, torch.amp.GradScaler("cpu", enabled=False))
    assert monitor.event_count == 0
    assert {e.verdict for e in monitor.events} == {Verdict.ABSORBED}
    monitor = scaled_run(True, torch.amp.GradScaler("cpu", enabled=False), "all")
    origins = [e for e in monitor.events if e.verdict is Verdict.ORIGIN]
    assert [e.site.direction for e in origins] == ["backward"] * 2


def test_one_that_reaches_a_parameter_is_skipped_and_counts_in_the_end() -> None:
    monitor = scaled_run(False, torch.amp.GradScaler("cpu"))
    assert monitor.event_count == 0
    assert {e.verdict for e in monitor.events} == {Verdict.SCALED}


def test_ctc_may_keep_infinities_but_no_loss_may_be_nan() -> None:
    class Ctc(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.head(x).log_softmax(-1)
            sizes = torch.tensor([5, 5])
            loss: torch.Tensor = nn.functional.ctc_loss(
                y, torch.ones(2, 3, dtype=torch.long), sizes, torch.tensor([2, 2])
            )
            return loss

    model = Ctc()
    monitor = fastcheck.install(model, level="op", record="stats", overflow_nums=-1)
    model(torch.randn(5, 2, 4)).backward()
    monitor.step()
    assert monitor.event_count == 0
    assert Verdict.BENIGN in {e.verdict for e in monitor.events}
    model(torch.full((5, 2, 4), NAN))
    monitor.step()
    assert monitor.event_count


def test_two_parts_in_turn_are_one_pass_until_one_comes_again() -> None:
    """An infinity made in one part, and taken up after the next part was entered."""
    first, second = model_with(lambda x: x), model_with(lambda x: x)
    whole = nn.ModuleList([first, second])
    monitor = fastcheck.install(whole, level="op", record="stats", overflow_nums=-1)
    with torch.no_grad():
        for _ in range(3):
            scores = first(torch.ones(2, 8)).half() * 60000 * 60000
            second(torch.ones(2, 8))
            scores.float().sigmoid()
    monitor.remove()
    assert monitor.event_count == 0
    assert Verdict.ABSORBED in {e.verdict for e in monitor.events}
