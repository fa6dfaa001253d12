"""allow_nonfinite(): intended NaNs are not events until they reach other tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Callable

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.types import Verdict
from fastcheck.verdict import allowed
from support.programs.training import stopped, where

NAN = float("nan")

pytestmark = pytest.mark.usefixtures("fresh_start", "no_allowances")


@pytest.fixture
def no_allowances() -> Iterator[None]:
    yield
    allowed._allowances.clear()


class Shift(nn.Module):
    """Keeps NaNs where they are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1.0


class Impute(nn.Module):
    """Puts the mean of the others in the place of a NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = Shift()
        self.leaks = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.shift(x)
        return x if self.leaks else torch.where(x.isnan(), torch.nanmean(x, 0), x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.impute = Impute()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.impute(x))


def batch() -> torch.Tensor:
    x = torch.randn(6, 3)
    x[2, 1] = NAN
    return x


def train(model: nn.Module, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(batch()).square().sum().backward()
        optimizer.step()


def test_without_it_the_batch_is_blamed() -> None:
    model = Model()
    fastcheck.install(model, stop=fastcheck.Stop(count="all"))
    assert where(stopped(train, model).culprit) == ("", "input", "input[0]", "arrived")


def test_a_batch_and_a_module_that_imputes() -> None:
    fastcheck.allow_nonfinite("", "input[0]", reason="sensors fail")
    fastcheck.allow_nonfinite("impute", reason="it fills the gaps")
    model = Model()
    monitor = fastcheck.install(model)
    train(model)
    assert monitor.event_count == 0
    assert {e.verdict for e in monitor.events} == {Verdict.INTENDED}
    reasons = {e.reason for e in monitor.events}
    assert any("sensors fail" in reason for reason in reasons)


def test_what_gets_out_is_an_event() -> None:
    fastcheck.allow_nonfinite("", "input*", reason="sensors fail")
    fastcheck.allow_nonfinite("impute*", reason="it fills the gaps")
    model = Model()
    model.impute.leaks = True
    fastcheck.install(model)
    stop = stopped(train, model)
    assert where(stop.culprit) == ("fc", "output", "output", "origin")
    assert "values that allow_nonfinite() allows in impute.shift (Shift)" in stop.culprit.reason


def test_gradients_of_parameters_are_never_allowed() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    monitor = fastcheck.install(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with fastcheck.allow_nonfinite("*", reason="all"), fastcheck.allow_nonfinite(reason="all"):
        model(torch.ones(4, 3)).sum().backward()
        weight = model[0].weight
        assert weight.grad is not None
        weight.grad[0, 0] = NAN
        stop = stopped(optimizer.step)
    assert where(stop.culprit)[1] == "param_grad" and monitor.event_count == 1


def test_it_ends_with_its_block() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    fastcheck.install(model, overflow_nums=-1)
    with fastcheck.allow_nonfinite("", "input*", reason="one batch"):
        pass
    assert allowed._allowances == []


@pytest.mark.parametrize(
    ("function", "option", "value"),
    [
        (fastcheck.allow_nonfinite, "module", 3),
        (fastcheck.allow_nonfinite, "tensor", ""),
        (fastcheck.allow_nonfinite, "reason", " "),
        (fastcheck.benign, "pattern", 3),
        (fastcheck.benign, "output", "first"),
        (fastcheck.benign, "reason", ""),
    ],
)
def test_wrong_arguments(function: Callable[..., Any], option: str, value: Any) -> None:
    given = {"pattern": "aten.add"} if function is fastcheck.benign else {"module": "a"}
    with pytest.raises(fastcheck.ConfigError, match=rf"{function.__name__}\({option}=\)"):
        function(**{**given, "reason": "x", option: value})
