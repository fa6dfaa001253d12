"""Module level: a +Inf passed from one module to another is judged by what that one computes."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
from torch import nn

import fastcheck
from support.programs.training import Apply, chain, stopped, where

INF = float("inf")

pytestmark = pytest.mark.usefixtures("fresh_start")


def large(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(x.abs() * 1e4)


def model_of(*functions: Callable[..., Any]) -> nn.Module:
    applied = {f"f{index}": Apply(function) for index, function in enumerate(functions)}
    return chain(first=nn.Linear(8, 8), **applied)


def run(model: nn.Module, loss: Callable[[torch.Tensor], torch.Tensor] = torch.sum) -> None:
    torch.manual_seed(0)
    loss(model(torch.randn(4, 8))).backward()


def test_a_mask_is_no_event() -> None:
    def mask(x: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.arange(8) < 4, x, INF)

    model = model_of(mask, lambda x: x + 1, lambda x: torch.softmax(-x, -1))
    monitor = fastcheck.install(model)
    run(model)
    assert monitor.event_count == 0
    assert {where(event)[0] for event in monitor.events} == {"f0", "f1"}
    assert "whether it counts depends on what is computed from it" in monitor.events[0].reason


def test_what_the_model_returns_is_named_where_it_began() -> None:
    model = model_of(large, lambda x: x + 1)
    fastcheck.install(model)
    stop = stopped(model, torch.ones(4, 8))
    assert where(stop.culprit) == ("f0", "output", "output", "origin")
    assert stop.culprit.reason.endswith("; the model returned it")


def test_a_nan_that_is_made_of_it() -> None:
    model = model_of(large, lambda x: x + 1, lambda x: x - x)
    fastcheck.install(model)
    stop = stopped(model, torch.ones(4, 8))
    assert where(stop.culprit) == ("f0", "output", "output", "origin")
    assert "it did harm: f2 (Apply)" in stop.culprit.reason


def test_a_gradient_that_it_makes_a_nan_of() -> None:
    model = model_of(large, lambda x: 1 / (1 + x))
    fastcheck.install(model)
    stop = stopped(run, model)
    assert where(stop.culprit)[0] in ("f0", "f1")


def test_a_later_overflow_at_a_place_that_did_no_harm_before() -> None:
    model = model_of(large, torch.tanh, lambda x: x)
    fastcheck.install(model)
    with torch.no_grad():
        model(torch.ones(4, 8))
    model.f1.function = lambda x: x - x
    stop = stopped(model, torch.ones(4, 8))
    assert where(stop.culprit)[0] == "f0"


def test_everything_counts_where_that_is_asked_for() -> None:
    model = model_of(large, torch.tanh)
    fastcheck.install(model, stop=fastcheck.Stop(count="all"))
    stop = stopped(model, torch.ones(4, 8))
    assert where(stop.culprit) == ("f0", "output", "output", "origin")
