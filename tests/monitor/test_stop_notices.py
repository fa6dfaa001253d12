"""Tests of a stop's text on what was wrong in the program before, long before a warning is due."""

from __future__ import annotations

import re
import warnings
from typing import Any, Callable, Optional

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastcheck

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _labels(y: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(y)) % 4


def _mse(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(y, 10 * x[:, :4])


def _pairs(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (y - x[:, 0]).square().mean()


def _bce(factor: float) -> Loss:
    return lambda y, x: F.binary_cross_entropy_with_logits(y, (x[:, :4] > 0).float() * factor)


def stopped(
    loss: Loss, loop: str = "", rate: float = 0.01, bad_at: Optional[int] = None
) -> tuple[str, Any]:
    """The text of the stop of a loop, in one line, and its monitor. ``loop``: a fault of it;
    ``bad_at``: the step whose batch is NaN.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), rate)
    given = model.parameters()
    with fastcheck.install(model) as monitor, pytest.raises(fastcheck.OverflowDetected) as stop:
        for step in range(25):
            if loop != "not cleared":
                optimizer.zero_grad()
            x = torch.randn(32, 8)
            value = loss(model(x * float("nan") if step == bad_at else x), x)
            value.backward(retain_graph=loop == "twice")
            if loop == "twice":
                value.backward()
            elif loop == "clipped late":
                optimizer.step()
            clipped = given if loop == "clipped nothing" else model.parameters()
            torch.nn.utils.clip_grad_norm_(clipped, 1e30)
            if loop != "clipped late":
                optimizer.step()
            if loop == "stepped twice":
                optimizer.step()
    text = str(stop.value)
    assert len(text.splitlines()) <= 25, text
    return re.sub(r"\s+", " ", text), monitor


@pytest.mark.parametrize(
    ("loss", "loop", "rate", "said"),
    [
        (_bce(255.0), "", 30.0, "binary cross entropy is given targets from 0 to 255"),
        (lambda y, _: F.nll_loss(y, _labels(y)), "", 30.0, "negative log likelihood, which is"),
        (lambda y, x: _pairs(y.sum(1, keepdim=True), x), "", 30.0, "broadcast to [32, 32]"),
        (_mse, "not cleared", 2.0, "gradients are not cleared: in"),
        (_mse, "clipped late", 2.0, "clipped after the update that used them, in"),
        (_mse, "clipped nothing", 2.0, "clipping was given no gradient"),
        (_mse, "twice", 2.0, "called twice on the same loss"),
        (_mse, "stepped twice", 2.0, "steps twice for one backward()"),
        # The same without a fault.
        (_bce(1.0), "", 1e12, ""),
        (lambda y, _: F.cross_entropy(y, _labels(y)), "", 1e30, ""),
        (lambda y, x: _pairs(y.sum(1), x), "", 30.0, ""),
        (_mse, "", 2.0, ""),
    ],
)
@pytest.mark.filterwarnings("ignore:`parameters` is an empty")
def test_a_run_that_diverges_within_25_steps(loss: Loss, loop: str, rate: float, said: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fastcheck.FastcheckWarning)
        text, _ = stopped(loss, loop, rate)
    assert said in text and ("1. By step" in text) == bool(said) and "noticed by" not in text


@pytest.mark.parametrize("is_twice", [False, True])
def test_a_stop_for_another_reason(is_twice: bool) -> None:
    """A form that was seen once is told by the stop, and in the events of the watch; no warning
    comes in addition.
    """

    def loss(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(y.softmax(-1) if is_twice else y, _labels(y))

    text, monitor = stopped(loss, bad_at=7)
    said = "cross entropy is made, is given the result of softmax. Give the criterion the"
    assert (
        f"noticed by step 7: in the graph of the loss log_softmax, of which {said}" in text
    ) == (is_twice)
    assert [event.step for event in monitor.watch.events] == [7] * is_twice
    assert all("checks in a row" not in event.text for event in monitor.watch.events)
    assert "look at the data, not at the model" in text


def test_a_fact_that_held_later_is_left_out() -> None:
    """Two updates in a row are none of ten, unless they are the first."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        for step in range(25):
            if step < 8:
                optimizer.zero_grad()
            x = torch.randn(8, 8) * (float("nan") if step == 12 else 1)
            _mse(model(x), x).backward()
            optimizer.step()
    assert "noticed   by" not in str(stop.value)
