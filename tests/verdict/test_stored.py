"""Stored values that were finite and no longer are: buffers, and the optimizer's state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Callable

import pytest
import torch
from torch import nn

import fastcheck
from support.programs.training import Apply, chain, nan_gradient, stopped, train, where

INF = float("inf")

pytestmark = pytest.mark.usefixtures("fresh_start")

LEVELS = pytest.mark.parametrize("level", ["module", "op"])


@pytest.fixture
def install() -> Iterator[Callable[..., fastcheck.Monitor]]:
    """fastcheck.install(), and remove() at the end."""
    monitors = []

    def installed(model: nn.Module, **options: Any) -> fastcheck.Monitor:
        monitors.append(fastcheck.install(model, **options))
        return monitors[-1]

    yield installed
    for monitor in monitors:
        monitor._remove(waits_for_ranks=False)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[torch.Tensor]) -> None:
    for x in batches:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


@LEVELS
@pytest.mark.parametrize("bad_step", [0, 3])
def test_running_statistics_that_overflow_in_training(
    install: Any, level: str, bad_step: int
) -> None:
    """The variance is beyond float32, and what the norm returns is finite."""
    model = chain(norm=nn.BatchNorm1d(4), out=nn.Linear(4, 2))
    monitor = install(model, level=level)
    batches = [torch.randn(8, 4) for _ in range(5)]
    batches[bad_step] *= 1e20
    stop = stopped(steps, model, sgd(model), batches)
    assert where(stop.culprit) == ("norm", "buffer", "running_var", "origin")
    assert stop.step == bad_step and monitor.event_count == 1
    assert f"finite when it was read in step {max(bad_step - 1, 0)}" in stop.culprit.reason
    assert stop.report.weights_intact


@LEVELS
def test_a_nan_that_a_forward_leaves_in_a_buffer(install: Any, level: str) -> None:
    class Leaves(nn.BatchNorm1d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            if x.shape[0] == 3:
                self.running_mean.data.numpy()[1] = float("nan")
            return y

    model = chain(norm=Leaves(4), out=nn.Linear(4, 2))
    install(model, level=level)
    stop = stopped(steps, model, sgd(model), [torch.randn(n, 4) for n in (4, 4, 3, 4)])
    assert where(stop.culprit) == ("norm", "buffer", "running_mean", "origin")
    assert stop.step == 2


@LEVELS
def test_healthy_statistics_and_infinities_on_purpose(install: Any, level: str) -> None:
    class Keeps(nn.Module):
        """A mask that is filled in, and a best loss that is set back to what it was at first."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.zeros(4, 4))
            self.register_buffer("best", torch.full((2,), INF))
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.best.fill_(INF if self.calls % 3 == 0 else 1.0)
            if self.calls == 2:
                self.mask[0, 1:] = -INF
            return x

    class OwnNorm(nn.Module):
        """A variance that is infinite before the first batch."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("running_var", torch.full((4,), INF))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.running_var.copy_(x.var(0).minimum(self.running_var).detach())
            return x / (self.running_var + 1e-5).sqrt()

    model = chain(norm=nn.BatchNorm1d(4), own=OwnNorm(), keeps=Keeps(), out=nn.Linear(4, 2))
    monitor = install(model, level=level)
    steps(model, sgd(model), [torch.randn(8, 4) for _ in range(8)])
    model.eval()
    model(torch.randn(8, 4))
    assert monitor.event_count == 0, monitor.events


@LEVELS
@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("infinite", [1, 4])
def test_statistics_that_were_infinite_before_the_run(
    install: Any, level: str, is_training: bool, infinite: int
) -> None:
    """As half() makes them of more than 65,504: in evaluation the norm returns its bias."""
    model = chain(norm=nn.BatchNorm1d(4), out=nn.Linear(4, 2)).train(is_training)
    model.norm.running_var[:infinite] = INF
    monitor = install(model, level=level)
    stop = stopped(lambda: (model(torch.randn(8, 4)), monitor.flush()))
    assert where(stop.culprit) == ("norm", "buffer", "running_var", "arrived")
    assert "non-finite when it was first read" in stop.culprit.reason


@LEVELS
def test_an_infinity_that_is_stored_is_not_said_to_be_on_purpose(install: Any, level: str) -> None:
    """As a weight of classes is, of which one has no sample."""

    class Weighed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("ratio", torch.tensor([1.0, INF]))
            self.loss = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.loss(x) * 0 * self.ratio

    model = Weighed()
    install(model, level=level)
    stop = stopped(lambda: model(torch.randn(8, 4)).sum().backward())
    said = "infinities that were stored in" if level == "op" else "non-finite when it was first"
    assert said in stop.culprit.reason and "on purpose" not in str(stop)


def test_a_loss_of_a_class_whose_bias_is_the_log_of_0_is_not_made_of_finite_tensors() -> None:
    model = nn.Linear(4, 3)
    with torch.no_grad():
        model.bias[2] = -INF
    fastcheck.install(model)
    optimizer = sgd(model)

    def step(last: int) -> None:
        optimizer.zero_grad()
        logits = model(torch.randn(6, 4))
        nn.functional.cross_entropy(logits, torch.arange(6) % last).backward()
        optimizer.step()

    step(2)
    stop = stopped(step, 3)
    assert "finite, except for -Inf in Linear" in stop.culprit.reason
    assert stop.culprit.site.role == "loss"


def test_a_variance_that_overflows_in_training_has_no_operator() -> None:
    model = chain(norm=nn.BatchNorm1d(4), out=nn.Linear(4, 2))
    fastcheck.install(model)
    batches = [torch.randn(8, 4), torch.randn(8, 4), torch.randn(8, 4)]
    batches[1][2, 1] = 1e25
    stop = stopped(steps, model, sgd(model), batches)
    assert where(stop.culprit) == ("norm", "buffer", "running_var", "origin")
    assert stop.report.made_by is None


def test_a_bad_statistic_follows_from_what_made_it_bad(install: Any) -> None:
    divide = Apply(lambda x: x / 0)
    model = chain(divide=divide, norm=nn.BatchNorm1d(4), out=nn.Linear(4, 2))
    monitor = install(model, overflow_nums=-1)
    train(model, 1, data=iter([torch.randn(8, 4)]))
    buffers = [e.verdict.name for e in monitor.events if e.site.role == "buffer"]
    assert buffers and set(buffers) == {"PROPAGATED"} and monitor.event_count == 1


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RMSprop])
def test_a_second_moment_that_overflows(install: Any, kind: Any) -> None:
    model = chain(a=nn.Linear(4, 4), b=nn.Linear(4, 2))
    monitor = install(model)
    optimizer = kind(model.parameters(), lr=1e-3)
    steps(model, optimizer, [torch.randn(8, 4)] * 2)
    model.a.weight.register_hook(lambda gradient: gradient * 1e24)
    stop = stopped(steps, model, optimizer, [torch.randn(8, 4)])
    key = "exp_avg_sq" if kind is torch.optim.Adam else "square_avg"
    assert where(stop.culprit) == ("a", "optimizer_state", f"weight.{key}", "origin")
    assert stop.step == 2 and not stop.report.weights_intact
    assert f"optimizer state a.weight.{key}" in str(stop)
    (gradient, record), *_ = stop.report.inputs
    assert gradient.key == "a.weight" and 1e22 < float(record["max"]) < 1e26
    assert "1. The gradient of a.weight reaches " in str(stop)
    assert monitor.event_count == 1


@LEVELS
@pytest.mark.parametrize(
    ("kind", "options", "key"),
    [
        (torch.optim.Adam, {}, "exp_avg"),
        (torch.optim.AdamW, {"fused": True}, "exp_avg_sq"),
        (torch.optim.SGD, {"momentum": 0.9}, "momentum_buffer"),
    ],
)
def test_a_state_that_was_loaded_with_nan(
    install: Any, kind: Any, options: dict[str, Any], key: str, level: str
) -> None:
    """It is found before the update that would break the weights."""
    model = chain(a=nn.Linear(4, 4), b=nn.Linear(4, 2))
    optimizer = kind(model.parameters(), lr=1e-3, **options)
    steps(model, optimizer, [torch.randn(8, 4)] * 2)
    optimizer.state[model.b.weight][key][1, 2] = float("nan")
    install(model, level=level)
    stop = stopped(steps, model, optimizer, [torch.randn(8, 4)] * 2)
    assert stop.step == 0 and stop.culprit.verdict.name == "ARRIVED"
    text = " ".join(str(stop).split())
    assert "try 1. No observed update of this run has made it: as a rule the optimizer's" in text
    assert where(stop.culprit) == ("b", "optimizer_state", f"weight.{key}", "arrived")
    if level == "module":
        assert stop.report.weights_intact and bool(model.b.weight.isfinite().all())


def test_a_healthy_state_leaves_no_record(install: Any) -> None:
    """A resumed run has those of a run that was not interrupted."""
    model = chain(a=nn.Linear(4, 4), b=nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    steps(model, optimizer, [torch.randn(8, 4)])
    monitor = install(model)
    steps(model, optimizer, [torch.randn(8, 4)] * 3)
    assert monitor.event_count == 0
    assert not any(monitor.sites[r["site"]].role == "optimizer_state" for r in monitor.records())


@LEVELS
@pytest.mark.parametrize("kept", [torch.zeros(4, 4), {"least": torch.tensor(INF)}])
def test_a_state_as_other_optimizers_keep_it(
    install: Any, kept: Any, level: str, recwarn: pytest.WarningsRecorder
) -> None:
    """A tensor without a dict, and the least loss that was seen until now."""
    model = chain(a=nn.Linear(4, 4), b=nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer.state[model.a.weight] = kept
    monitor = install(model, level=level)
    steps(model, optimizer, [torch.randn(8, 4)] * 2)
    assert monitor.event_count == 0 and not list(recwarn)


def test_a_large_gradient_that_is_not_squared(install: Any) -> None:
    model = chain(a=nn.Linear(4, 4), b=nn.Linear(4, 2))
    monitor = install(model)
    model.a.bias.register_hook(lambda gradient: torch.full_like(gradient, 1e24))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-30, momentum=0.9)
    steps(model, optimizer, [torch.randn(8, 4)] * 2)
    assert monitor.event_count == 0
    assert any(monitor.sites[r["site"]].role == "optimizer_state" for r in monitor.records())


def test_a_learning_rate_that_blew_up_the_weights_is_what_a_stop_advises(install: Any) -> None:
    model = chain(a=nn.Linear(4, 4), act=nn.ReLU(), b=nn.Linear(4, 2))
    install(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e30)
    stop = stopped(steps, model, optimizer, [torch.ones(8, 4)] * 5)
    text = " ".join(str(stop).split())
    assert "lower the learning rate (it is now SGD: 1.00e+30)" in text
    assert "division" not in text and "softmax" not in text


def test_a_gradient_beside_a_negative_infinity_is_no_first_of_all(install: Any) -> None:
    """The reason names the exception."""

    def log(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, torch.zeros(8, 1).log()], 1)

    class Ends(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.clamp_min(-5)

    model = chain(a=nn.Linear(4, 4), log=Apply(log), ends=Ends(), b=nn.Linear(5, 2))
    install(model)
    optimizer = sgd(model)
    model.a.weight.register_hook(lambda gradient: gradient * float("nan"))
    model(torch.randn(8, 4)).sum().backward()
    stop = stopped(optimizer.step)
    assert where(stop.culprit)[1] == "param_grad"
    assert "observed in this step was finite, except for -Inf in log (Apply)" in stop.culprit.reason


def test_two_modules_that_read_one_tensor_are_both_named(install: Any) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = Apply(lambda x: x * 1), Apply(nan_gradient)
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layer(x)
            return self.one(x) + self.other(x)

    model = Two()
    install(model)
    stop = stopped(lambda: model(torch.ones(2, 4)).sum().backward())
    assert "one" in stop.culprit.reason and "other" in stop.culprit.reason


def test_a_module_with_new_parts_claims_nothing_for_them(install: Any) -> None:
    model = chain(a=nn.Linear(4, 4), b=nn.Linear(4, 2))
    outer = chain(inner=model)
    install(outer)
    model.b = nn.Linear(4, 2)
    with torch.no_grad():
        model.b.weight.fill_(float("nan"))
    stop = stopped(outer, torch.ones(2, 4))
    assert stop.culprit.site.module == "inner"
    assert "contains modules that are not observed" in stop.culprit.reason


def test_a_buffer_that_something_else_than_its_module_wrote() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)
            self.register_buffer("center", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> Any:
            return self.layer(x - self.center)

    model = Centred()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        for count in (1.0, 0.0, 1.0):
            optimizer.zero_grad()
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            model.center.copy_(torch.ones(4) / torch.tensor(count))
    culprit = stop.value.culprit
    assert (culprit.site.key, culprit.verdict) == ("center", fastcheck.types.Verdict.ARRIVED)
    assert "and no longer is" in culprit.reason and "has run" not in culprit.reason


def test_a_loss_that_is_not_computed_from_a_parameter_that_never_was_finite(install: Any) -> None:
    model = chain(a=nn.Linear(4, 4))
    model.register_parameter("spare", nn.Parameter(torch.full((3,), float("nan"))))
    optimizer = sgd(model.a)
    monitor = install(model, overflow_nums=-1)
    for factor in (1.0, 1.0, 0.0):
        optimizer.zero_grad()
        (model(torch.randn(8, 4)).sigmoid() * factor).log().mean().backward()
        optimizer.step()
    monitor.flush()
    events = [event for event in monitor.events if event.counted]
    assert [event.site.key for event in events] == ["spare", "loss"]
    assert (
        events[1].verdict.name == "ORIGIN" and "did no harm in parameter spare" in events[1].reason
    )
