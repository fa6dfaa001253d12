"""Gradients of parameters whose cause is elsewhere: a parametrization, a -Inf that was read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import fastcheck
from support.programs.training import batches, change_gradient, stopped, where

pytestmark = pytest.mark.usefixtures("fresh_start")

INF, NAN = float("inf"), float("nan")


class Spoiled(nn.Module):
    """A parametrization whose backward makes one NaN while ``is_on``."""

    def __init__(self) -> None:
        super().__init__()
        self.is_on = False

    def forward(self, *parts: torch.Tensor) -> torch.Tensor:
        return change_gradient(sum(parts), self._change)  # type: ignore[arg-type]  # sum() of tensors is a tensor

    def right_inverse(self, weight: torch.Tensor) -> Any:
        return weight / 2, weight / 2

    def _change(self, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        if self.is_on:
            gradient.view(-1)[1] = NAN
        return gradient


def train(model: nn.Module, spoiled: Spoiled, steps: int = 4) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, x in enumerate(batches(steps)):
        spoiled.is_on = step == 2
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("is_parametrized", [False, True])
def test_a_gradient_that_is_written_behind_backward(is_parametrized: bool) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    if is_parametrized:
        parametrizations.weight_norm(model[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train() -> None:
        for step in range(4):
            optimizer.zero_grad()
            model(torch.ones(3, 4)).square().mean().backward()
            if step == 3:
                _, second, *_ = model.parameters()  # no one of those that are probed
                assert second.grad is not None
                second.grad.div_(0)
            optimizer.step()

    fastcheck.install(model)
    stop = stopped(train)
    assert stop.culprit.reason.endswith("or the program wrote it after backward()")


def test_a_gradient_that_the_program_has_written() -> None:
    """As evolution strategies do, or per-sample gradients of torch.func that are clipped."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train() -> None:
        for scale in (1.0, 0.0):
            with torch.no_grad():
                reward = model(torch.ones(3, 4)).mean() * scale
            for p in model.parameters():
                p.grad = torch.ones_like(p) * reward / reward.abs()
            optimizer.step()

    fastcheck.install(model)
    stop = stopped(train)
    assert stop.culprit.reason.endswith("seen in it: the program may have written this gradient")
    assert "try 1. Look before the update, where the loop" in " ".join(str(stop).split())


class TestParametrizations:
    def test_the_module_whose_backward_made_it(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        spoiled = Spoiled()
        parametrize.register_parametrization(model[2], "weight", spoiled)
        fastcheck.install(model)
        stop = stopped(train, model, spoiled)
        module = "2.parametrizations.weight.0"
        assert stop.step == 2
        assert where(stop.culprit) == (module, "grad_input", "input[0]", "origin")
        assert f"the backward of {module} made it" in stop.culprit.reason

    def test_a_gradient_that_came_bad_into_it_is_the_layers(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        parametrizations.weight_norm(model[2])

        def spoil(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            output.register_hook(lambda gradient: gradient * NAN)

        model[2].register_forward_hook(spoil)
        fastcheck.install(model)
        stop = stopped(train, model, Spoiled())
        assert where(stop.culprit)[:2] == ("2", "grad_output")

    def test_one_whose_gradient_is_finite_is_not_named(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        parametrizations.weight_norm(model[2])
        fastcheck.install(model)
        model[2].bias.register_hook(lambda gradient: gradient * NAN)
        stop = stopped(train, model, Spoiled())
        assert where(stop.culprit) == ("2", "param_grad", "bias", "origin")


@pytest.mark.parametrize("value", [-INF, INF, NAN])
def test_a_parameter_that_a_parametrization_is_given_is_the_culprit(value: float) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    parametrizations.weight_norm(model[2])
    fastcheck.install(model)

    def step() -> None:
        for number in range(3):
            if number == 2:  # as an update would
                with torch.no_grad():
                    model[2].parametrizations.weight.original1[1, 1] = value
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            model(torch.ones(2, 8)).square().mean().backward()
            optimizer.step()

    stop = stopped(step)
    assert where(stop.culprit) == ("2.parametrizations.weight", "param", "original1", "arrived")
    assert stop.culprit.reason.startswith("it was finite")


class Cell(nn.Module):
    """An LSTM cell over three steps, into whose hidden state something is put."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 8)
        self.value = value
        self.is_on = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(len(x), 8), x.new_zeros(len(x), 8)
        for number in range(3):
            state = self.cell(x, state)
            if number == 1 and self.is_on:
                hidden = state[0].clone()
                hidden[0, 0] = self.value
                state = hidden, state[1]
        return state[0]


class TestNegativeInfinities:
    @pytest.mark.parametrize("value", [-INF, INF, NAN])
    def test_one_in_a_hidden_state_is_the_culprit_and_no_weight(self, value: float) -> None:
        model = Cell(value)
        fastcheck.install(model)
        stop = stopped(train, model, model)
        assert stop.step == 2
        assert where(stop.culprit) == ("cell", "input", "input[1][0]", "origin")

    def test_a_mask_is_not_blamed_for_a_gradient(self) -> None:
        model = nn.MultiheadAttention(8, 2, batch_first=True)
        fastcheck.install(model)
        mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), -INF)
        model.in_proj_weight.register_hook(lambda gradient: gradient * NAN)

        def step() -> None:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            x = torch.randn(2, 4, 8)
            model(x, x, x, attn_mask=mask, need_weights=False)[0].square().mean().backward()
            optimizer.step()

        stop = stopped(step)
        assert where(stop.culprit) == ("", "param_grad", "in_proj_weight", "origin")
