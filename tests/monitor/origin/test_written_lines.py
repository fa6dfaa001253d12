"""Tests of the lines in which an operator is written, in functions that run or are called."""

from __future__ import annotations

import functools
import math
from typing import Any, Callable

import numpy as np
import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.monitor.origin.written_lines import lines_of_data, lines_of_gradients
from fastcheck.report.stop_report import MadeBy

BATCH = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


def made_by(step: Callable[[nn.Module], Any], model: nn.Module) -> MadeBy:
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        step(model)
    made = stop.value.report.made_by
    assert made is not None
    return made


def sources(written: tuple[str, ...]) -> list[str]:
    """What is said of each place behind its file and line."""
    return [place.partition(" in ")[2] for place in written]


def surprise(y: torch.Tensor) -> torch.Tensor:
    return (y - y).log()


class Criterion(nn.Module):
    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return self.of_all(y).mean()

    def of_all(self, y: torch.Tensor) -> torch.Tensor:
        return torch.log(y - y)

    @staticmethod
    def static(y: torch.Tensor) -> torch.Tensor:
        return (0 * y).log()

    @classmethod
    def of_class(cls, y: torch.Tensor) -> torch.Tensor:
        return cls.static(y)


@torch.enable_grad()
def decorated(y: torch.Tensor) -> torch.Tensor:
    return torch.log(0 * y)


LOGARITHMS = [lambda y: (y - y).log()]


CALLS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "function": (surprise, "surprise: return (y - y).log()"),
    "lambda": (LOGARITHMS[0], "<lambda>: LOGARITHMS = [lambda y: (y - y).log()]"),
    "module": (Criterion(), "of_all: return torch.log(y - y)"),
    "method": (Criterion().of_all, "of_all: return torch.log(y - y)"),
    "class method": (Criterion.of_class, "static: return (0 * y).log()"),
    "partial": (functools.partial(surprise), "surprise: return (y - y).log()"),
    "decorated": (decorated, "decorated: return torch.log(0 * y)"),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_line_is_in_a_function_that_has_returned(name: str) -> None:
    losses = {"own": CALLS[name][0]}

    def step(model: nn.Module) -> None:
        losses["own"](model(BATCH)).sum().backward()

    made = made_by(step, nn.Linear(4, 3))
    assert made.operator == "LogBackward0" and made.line == ""
    assert sources(made.written) == [CALLS[name][1]]


def share(y: torch.Tensor) -> torch.Tensor:
    weight = 1 / (1 + y.square())
    return weight / (y - y).sum()


def test_a_quotient_of_two_tensors_is_no_reciprocal() -> None:
    made = made_by(lambda model: share(model(BATCH)).sum().backward(), nn.Linear(4, 3))
    assert made.operator == "DivBackward0"
    assert sources(made.written) == ["share: return weight / (y - y).sum()"]


def test_the_line_is_in_a_function_within_one_that_has_returned() -> None:
    def loss(y: torch.Tensor) -> torch.Tensor:
        def inner() -> torch.Tensor:
            return (y - y).log()

        return inner().sum()

    made = made_by(lambda model: loss(model(BATCH)).backward(), nn.Linear(4, 3))
    assert sources(made.written) == ["inner: return (y - y).log()"]


class Logarithm(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.abs().log()


def test_an_observed_module_made_it_in_backward_alone() -> None:
    def step(model: nn.Module) -> None:
        y = model(BATCH)
        (y.sum() + surprise(y).sum()).backward()

    model = nn.Sequential(nn.Linear(4, 3), Logarithm())
    assert sources(made_by(step, model).written) == ["surprise: return (y - y).log()"]

    class Power(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.exponent = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.pow(self.exponent)

    layers = nn.ModuleDict({"power": nn.Sequential(nn.Linear(4, 3, bias=False), Power())})
    optimizer = torch.optim.SGD(layers.parameters(), 0.1)

    def through(model: nn.Module) -> None:
        layers["power"](BATCH).sum().backward()
        optimizer.step()

    made = made_by(through, layers)
    assert made.is_backward and made.operator == "PowBackward1"
    assert sources(made.written) == ["forward: return x.pow(self.exponent)"]


def test_the_line_of_the_variable_is_not_named_twice() -> None:
    def step(model: nn.Module) -> None:
        y = model(BATCH)
        loss = (y - y).log()
        loss.sum().backward()

    made = made_by(step, nn.Linear(4, 3))
    assert "loss = (y - y).log()" in made.variable and made.written == ()


@pytest.mark.parametrize("is_kept", [True, False])
def test_no_function_around_the_result_has_made_it(is_kept: bool) -> None:
    """Nor is text that is repeated a product."""
    factor = torch.tensor(3e38)

    def step(model: nn.Module) -> None:
        print("=" * 20)
        y = model(BATCH) * 2
        loss_of(y)

    def loss_of(y: torch.Tensor) -> None:
        if is_kept:
            loss = math.prod([y.abs().sum() + 9, factor])
            loss.backward()
        else:
            math.prod([y.abs().sum() + 9, factor]).backward()

    made = made_by(step, nn.Linear(4, 3))
    assert made.operator == "MulBackward0"
    assert ("loss = math.prod(" in made.variable) is is_kept
    assert sources(made.written) == ([] if is_kept else ["step: y = model(BATCH) * 2"])


def test_the_first_functions_with_no_more_than_three_places() -> None:
    def inner(y: torch.Tensor) -> tuple[str, ...]:
        y /= y.sum()
        return lines_of_data(is_loud=True)

    def outer(y: torch.Tensor) -> tuple[str, ...]:
        y = y / y.sum()
        y = y.sqrt() + y.std()
        y = y.log()
        return inner(y)

    assert sources(outer(BATCH)) == ["inner: y /= y.sum()"]


def test_what_is_guarded_or_has_not_run_is_left_out() -> None:
    eps = 1e-6

    def data(y: torch.Tensor) -> tuple[str, ...]:
        y = y / (y.norm() + 1e-8)
        y = (y + eps).log() / y.sum().clamp(min=1)
        y = y / 255
        y = y / len(y)
        written = lines_of_data(is_loud=True)
        print(y.sqrt(), end="")
        return written

    assert sources(data(BATCH))[:1] == ["data: y = y / len(y)"]
    assert len([one for one in sources(data(BATCH)) if one.startswith("data")]) == 1


def normalised(x: torch.Tensor) -> torch.Tensor:
    return (x - x.mean()) / x.std()


def test_a_batch_that_a_function_has_made() -> None:
    def step(model: nn.Module) -> None:
        batch = normalised(BATCH * 0)
        model(batch)

    made = made_by(step, nn.Linear(4, 3))
    assert made.variable.endswith("batch = normalised(BATCH * 0)")
    assert sources(made.written) == ["normalised: return (x - x.mean()) / x.std()"]

    def without(model: nn.Module) -> None:
        model(normalised(BATCH * 0))

    made = made_by(without, nn.Linear(4, 3))
    assert sources(made.written) == ["normalised: return (x - x.mean()) / x.std()"]


def test_of_neginf_alone_no_root_is_named() -> None:
    def features(x: torch.Tensor) -> torch.Tensor:
        return x.sqrt().log()

    def step(model: nn.Module) -> None:
        model(features(BATCH * 0))

    made = made_by(step, nn.Linear(4, 3))
    assert sources(made.written) == ["features: return x.sqrt().log()"]

    def root(x: torch.Tensor) -> torch.Tensor:
        return x.sqrt() - float("inf")

    def other(model: nn.Module) -> None:
        model(root(BATCH * 0))

    assert made_by(other, nn.Linear(4, 3)).written == ()


def test_lines_that_write_to_gradients() -> None:
    def step(model: nn.Module) -> tuple[str, ...]:
        for p in model.parameters():
            p.grad = None
        model(BATCH).sum().backward()
        for p in model.parameters():
            assert p.grad is not None
            p.grad.zero_()
            p.grad.mul_(2)
            p.grad /= 3
        return lines_of_gradients()

    written = sources(step(nn.Linear(4, 3)))
    assert [one for one in written if one.startswith("step")] == [
        "step: p.grad.mul_(2)",
        "step: p.grad /= 3",
    ]


def test_a_gradient_that_the_program_has_changed() -> None:
    def clipped(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(BATCH).sum().backward()
        for p in model.parameters():
            assert p.grad is not None
            p.grad.mul_(float("nan"))
        optimizer.step()

    made = made_by(clipped, nn.Linear(4, 3))
    assert sources(made.written) == ['clipped: p.grad.mul_(float("nan"))']


class Average(nn.Module):
    """A teacher that is corrected by 1 - decay ** step, which is 0 at step 0."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.mean = nn.Linear(4, 3), nn.Linear(4, 3).requires_grad_(False)
        self.count = 0

    def update(self) -> None:
        for mean, own in zip(self.mean.parameters(), self.own.parameters()):
            mean.copy_(own / (1 - torch.tensor(0.9) ** self.count) * 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(x) + self.mean(x)


def test_a_weight_that_the_program_has_written() -> None:
    model = Average()
    optimizer = torch.optim.SGD(model.own.parameters(), 0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(BATCH).sum().backward()
        optimizer.step()
        with torch.no_grad():
            model.update()

    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        for _ in range(2):
            step()
    made = stop.value.report.made_by
    assert made is not None and made.how == "The program's code writes to tensors in place."
    line = "update: mean.copy_(own / (1 - torch.tensor(0.9) ** self.count) * 0)"
    assert sources(made.written) == [line]


class Scaled(nn.Module):
    """Sets its scale from the first batch, as an activation norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(4))
        self.is_set = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_set:
            self.log_scale.data = -torch.log(x.std(0))
            self.is_set = True
        return x * self.log_scale.exp()


def test_a_weight_that_its_module_has_written() -> None:
    """Clipping writes to gradients alone."""
    model = nn.Sequential(nn.Linear(6, 4), Scaled())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        model(torch.zeros(3, 6)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        step()
    made = stop.value.report.made_by
    assert made is not None
    assert sources(made.written) == ["forward: self.log_scale.data = -torch.log(x.std(0))"]


def test_the_line_that_gives_a_function_the_loss_is_not_named_twice() -> None:
    def update(loss: torch.Tensor) -> None:
        loss.backward()

    def step(model: nn.Module) -> None:
        update(torch.distributions.kl_divergence(*priors(model(BATCH))).sum(1).mean())

    def priors(y: torch.Tensor) -> Any:
        bernoulli = torch.distributions.Bernoulli
        return bernoulli(y.sigmoid()), bernoulli(torch.zeros_like(y))

    made = made_by(step, nn.Linear(4, 3))
    assert "an argument of update, which runs from" in made.variable
    assert made.written == ()


def test_a_hook_on_a_parameter_that_is_a_lambda() -> None:
    model = nn.Linear(4, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.weight.register_hook(lambda g: g / g.norm())

    def step(model: nn.Module) -> None:
        for factor in (1.0, 0.0):
            optimizer.zero_grad()
            (model(BATCH) * factor).sum().backward()
            optimizer.step()

    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        step(model)
    made, text = stop.value.report.made_by, " ".join(str(stop.value).split())
    assert made is not None and stop.value.step == 1
    hook = "<lambda>: model.weight.register_hook(lambda g: g / g.norm())"
    assert sources(made.written) == [hook]
    assert "try 1. Look at the lines that may have made it: it divides" in text
    assert "sqrt(x + eps)" not in text


def test_a_weight_that_was_never_finite_is_not_put_down_to_later_lines() -> None:
    model = Average()
    with torch.no_grad():
        model.own.weight.fill_(float("nan"))

    def step(model: nn.Module) -> None:
        model(BATCH)
        model.own.weight.mul_(2)

    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        step(model)
    assert "first read" in stop.value.culprit.reason and stop.value.report.made_by is None


def test_a_likelihood_takes_the_logarithm() -> None:
    def step(model: nn.Module) -> None:
        y = torch.distributions.Normal(model(BATCH), torch.tensor(-1.0), validate_args=False)
        y.log_prob(torch.zeros(())).sum().backward()

    made = made_by(step, nn.Linear(4, 3))
    assert "step: y.log_prob(torch.zeros(())).sum().backward()" in sources(made.written)


def test_no_code_of_the_program_runs() -> None:
    class Lazy:
        @property
        def loss(self) -> Any:
            raise AssertionError

        def __getattr__(self, name: str) -> Any:
            raise AssertionError

    lazy, table = Lazy(), {"loss": surprise}

    def step(is_called: bool) -> tuple[str, ...]:
        if is_called:
            lazy.loss(BATCH)
            lazy.other(BATCH)
            table["none"](BATCH)
            table["loss"](BATCH)
        return lines_of_data(is_loud=True)

    assert sources(step(is_called=False))[:1] == ["surprise: return (y - y).log()"]


def test_the_line_of_a_power_of_data() -> None:
    """Weights of a replay with a priority of 0; a square makes no infinity of such numbers."""

    def step(model: nn.Module) -> None:
        share = torch.arange(8.0).pow(2)
        weight = share.pow(-0.4)
        (weight[:, None] / 2 * model(BATCH)).mean().backward()

    assert sources(made_by(step, nn.Linear(4, 3)).written) == ["step: weight = share.pow(-0.4)"]


class Counted(torch.autograd.Function):
    """Computes in NumPy."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.detach().numpy() / np.zeros(1, np.float32))

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("kind", ["same line", "line before", "other name"])
def test_a_function_that_is_applied_where_an_operator_reads_infinity(kind: str) -> None:
    def update(loss: torch.Tensor) -> None:
        loss.backward()

    def step(model: nn.Module) -> None:
        y, counted = model(BATCH), Counted.apply
        if kind == "same line":
            update(Counted.apply(y).mean())
        elif kind == "other name":
            update(counted(y).mean())
        else:
            y = Counted.apply(y)
            update(y.abs().mean())

    model = nn.Linear(4, 3)
    with fastcheck.install(model, level="op"), pytest.raises(fastcheck.OverflowDetected) as stop:
        # This line applies it, too, but is not the one that reads infinity.
        _ = None if kind == "same line" else Counted.apply(step(model))
        step(model)
    text = " ".join(str(stop.value).split())
    is_told = "The line applies Counted, an autograd.Function: what its forward computes" in text
    assert is_told == (kind == "same line")
