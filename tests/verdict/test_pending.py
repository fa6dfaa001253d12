"""Module level: what passes between modules counts where something that was made of it lasts or
leaves.
"""

from __future__ import annotations

from typing import Any, Callable, Optional

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastcheck
from fastcheck.types import Verdict
from support.programs.training import (
    Apply,
    batches,
    chain,
    change_gradient,
    nan_gradient,
    poison,
    stopped,
    train,
    where,
)

NAN, INF = float("nan"), float("inf")

pytestmark = pytest.mark.usefixtures("fresh_start")


class Own(nn.Module):
    """A submodule, and code of its own behind it."""

    def __init__(self, inner: nn.Module, behind: Callable[[Any], Any]) -> None:
        super().__init__()
        self.inner, self.behind = inner, behind
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> Any:
        return self.behind(self.inner(x))


def ends() -> dict[str, nn.Module]:
    return {"first": nn.Linear(8, 8), "last": nn.Linear(8, 4)}


def around(*functions: Callable[..., Any]) -> nn.Sequential:
    parts = {f"f{number}": Apply(function) for number, function in enumerate(functions)}
    return chain(first=ends()["first"], **parts, last=ends()["last"])


def clean_gradient(x: torch.Tensor) -> torch.Tensor:
    """x, whose gradient is made finite."""
    return change_gradient(x, lambda gradient: gradient.nan_to_num(0.0))


def verdicts(monitor: fastcheck.Monitor) -> set[Verdict]:
    return {event.verdict for event in monitor.events}


class TestForward:
    def test_what_another_module_removes_is_absorbed(self) -> None:
        model = around(poison, torch.nan_to_num)
        monitor = fastcheck.install(model)
        train(model)
        monitor.flush()
        assert monitor.event_count == 0
        assert verdicts(monitor) == {Verdict.ABSORBED}
        assert "absorbed: 3 tensors, first output of f0 (Apply)" in monitor.summary()

    def test_what_the_code_between_the_modules_removes(self) -> None:
        model = Own(Apply(poison), torch.nan_to_num)
        monitor = fastcheck.install(model)
        model(torch.ones(2, 8))
        assert monitor.event_count == 0

    def test_what_the_model_returns_stops_the_run_where_it_returns(self) -> None:
        model = around(poison, torch.neg)
        monitor = fastcheck.install(model)
        finished = []
        model.last.register_forward_hook(lambda *_: finished.append(1))
        stop = stopped(model, torch.ones(2, 8))
        assert finished
        assert where(stop.culprit) == ("f0", "output", "output", "origin")
        assert stop.culprit.reason.endswith("including its parameters; the model returned it")
        assert not monitor._core.hooks.observer._local.stack

    def test_everything_counts_where_that_is_asked_for(self) -> None:
        model = around(poison, torch.nan_to_num)
        monitor = fastcheck.install(model, overflow_nums=-1, stop=fastcheck.Stop(count="all"))
        model(torch.ones(2, 8))
        assert monitor.event_count == 1

    def test_one_module_removes_it_and_another_does_not(self) -> None:
        class Twice(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first = nn.Linear(8, 8)
                self.bad, self.clean = Apply(poison), Apply(torch.nan_to_num)
                self.passes = Apply(torch.neg)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = self.bad(self.first(x))
                return self.clean(x) + self.passes(x)

        model = Twice()
        fastcheck.install(model)
        assert where(stopped(model, torch.ones(2, 8)).culprit)[0] == "bad"

    def test_the_code_of_the_model_lets_through_what_a_module_has_removed(self) -> None:
        class Leaks(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first = nn.Linear(8, 8)
                self.bad, self.clean = Apply(poison), Apply(torch.nan_to_num)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = self.bad(self.first(x))
                return self.clean(x) + x

        model = Leaks()
        fastcheck.install(model)
        assert where(stopped(model, torch.ones(2, 8)).culprit)[0] == "bad"

    def test_what_came_to_nothing_in_earlier_steps_is_not_blamed(self) -> None:
        model = Own(around(poison, torch.nan_to_num, lambda x: x), lambda y: y + 0.0)
        monitor = fastcheck.install(model)
        train(model, 2)
        model.inner.f2.function = poison
        stop = stopped(train, model, 1)
        assert where(stop.culprit) == ("inner.f2", "output", "output", "origin")
        assert monitor.event_count == 1

    def test_what_is_not_removed_any_more_is_named_where_it_begins(self) -> None:
        model = around(poison, torch.nan_to_num, lambda x: x + 0.0)
        fastcheck.install(model)
        train(model, 2)
        model.f1.function = torch.neg
        assert where(stopped(train, model, 1).culprit)[0] == "f0"

    def test_a_negative_infinity_that_a_removed_nan_was_made_of(self) -> None:
        functions = [torch.zeros_like, torch.log, lambda x: x - x, torch.nan_to_num]
        model = around(*functions)
        monitor = fastcheck.install(model)
        with torch.no_grad():
            model(torch.ones(2, 8))
        assert monitor.event_count == 0

    def test_each_submodule_called_alone_counts_where_it_returns(self) -> None:
        model = around(poison, torch.nan_to_num)
        fastcheck.install(model)
        x = model.f0(model.first(torch.ones(2, 8)))  # pending: f0 has no parameters
        assert where(stopped(model.first, x).culprit)[0] == "f0"

    def test_what_the_model_returned_could_not_be_read(self) -> None:
        model = Own(Apply(poison), lambda y: float(y.sum()))
        fastcheck.install(model)
        stop = stopped(model, torch.ones(2, 8))
        assert where(stop.culprit)[0] == "inner"
        assert stop.culprit.reason.endswith("; what the model returned was not read")

    def test_a_weight_that_is_not_finite_counts_at_once(self) -> None:
        model = around(torch.nan_to_num)
        with torch.no_grad():
            model.first.weight[0, 0] = NAN
        fastcheck.install(model)
        assert where(stopped(model, torch.ones(2, 8)).culprit)[1] == "param"

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_a_checkpointed_part_that_removes_it(self, reentrant: bool) -> None:
        class Checkpointed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first = nn.Linear(8, 8)
                self.bad, self.clean = Apply(poison), Apply(torch.nan_to_num)

            def part(self, x: torch.Tensor) -> torch.Tensor:
                return self.clean(self.bad(x))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = self.first(x)
                y: torch.Tensor = checkpoint(self.part, x, use_reentrant=reentrant)
                return y

        model = Checkpointed()
        monitor = fastcheck.install(model)
        train(model)
        assert monitor.event_count == 0
        assert len(monitor.events) >= 3

    def test_a_model_without_steps_lets_go_of_what_was_absorbed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("fastcheck.monitor.session.event_store._MAX_FINDINGS", 4)
        model = around(poison, torch.nan_to_num)
        monitor = fastcheck.install(model)
        with torch.no_grad():
            for x in batches(20):
                model(x)
        assert monitor.event_count == 0
        assert sum(event.verdict is Verdict.ABSORBED for event in monitor.events) >= 15


class TestLossAndState:
    def test_the_loss(self) -> None:
        class Hides(nn.Module):
            """What it returns holds a tensor that is not read."""

            def __init__(self) -> None:
                super().__init__()
                self.first, self.bad = nn.Linear(8, 8), Apply(poison)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = self.first(x)
                self.hidden = self.bad(x)
                return x

        model = Hides()
        monitor = fastcheck.install(model, overflow_nums=-1)
        y = model(torch.ones(2, 8))
        assert monitor.event_count == 0
        (y + model.hidden).sum().backward()
        first = next(event for event in monitor.events if event.counted)
        assert where(first) == ("", "loss", "loss", "origin")

    def test_running_statistics_keep_it(self) -> None:
        model = chain(
            first=nn.Linear(8, 8),
            bad=Apply(),
            norm=nn.BatchNorm1d(8),
            clean=Apply(torch.nan_to_num),
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monitor = fastcheck.install(model)
        train(model, 2, optimizer=optimizer)
        model.bad.function = poison
        stop = stopped(train, model, 1, optimizer=optimizer)
        assert where(stop.culprit) == ("bad", "output", "output", "origin")
        assert "it reached norm.running_" in stop.culprit.reason
        assert monitor.event_count == 1


class TestGradients:
    def test_a_gradient_that_another_module_removes(self) -> None:
        model = around(clean_gradient, nan_gradient)
        monitor = fastcheck.install(model)
        train(model)
        assert monitor.event_count == 0
        assert verdicts(monitor) == {Verdict.ABSORBED}

    def test_before_the_first_update_the_end_of_backward_decides(self) -> None:
        model = around(nan_gradient)
        monitor = fastcheck.install(model)
        weight = model.first.weight.clone()
        y = model(torch.ones(2, 8)).sum()
        stop = stopped(y.backward)
        assert where(stop.culprit)[0:3:2] == ("f0", "input[0]")
        assert "it reached the gradient of first." in stop.culprit.reason
        assert torch.equal(weight, model.first.weight)
        assert monitor.event_count == 1

    def test_later_the_update_decides_before_it_is_made(self) -> None:
        model = around(lambda x: x)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fastcheck.install(model)
        train(model, 2, optimizer=optimizer)
        model.f0.function = nan_gradient
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        weight = model.first.weight.clone()
        stop = stopped(optimizer.step)
        assert where(stop.culprit)[0:3:2] == ("f0", "input[0]")
        assert torch.equal(weight, model.first.weight)

    def test_a_loop_that_repairs_its_gradients_by_itself(self) -> None:
        model = around(lambda x: x)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monitor = fastcheck.install(model)
        for step, x in enumerate(batches(5)):
            optimizer.zero_grad()
            model.f0.function = nan_gradient if step > 1 else (lambda x: x)
            model(x).square().mean().backward()
            for p in model.parameters():
                p.grad = p.grad.nan_to_num(0.0)
            optimizer.step()
        assert monitor.event_count == 0

    def test_clipping_decides(self) -> None:
        model = around(lambda x: x)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fastcheck.install(model)
        train(model, 2, optimizer=optimizer)
        model.f0.function = nan_gradient
        model(torch.ones(2, 8)).sum().backward()
        stop = stopped(torch.nn.utils.clip_grad_norm_, model.parameters(), 1.0)
        assert where(stop.culprit)[0:3:2] == ("f0", "input[0]")

    def test_under_a_scaler_that_did_not_skip(self) -> None:
        model = around(clean_gradient, nan_gradient)
        monitor = fastcheck.install(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for x in batches(3):
            optimizer.zero_grad()
            scaler.scale(model(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert monitor.event_count == 0
        assert scaler.get_scale() == 4.0

    def test_a_scale_that_the_loop_has_of_its_own(self) -> None:
        model = around(nan_gradient)
        training = fastcheck.Training(scaler=4.0)
        monitor = fastcheck.install(model, overflow_nums=-1, training=training)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        (model(torch.ones(2, 8)).square().mean() * 4.0).backward()
        optimizer.step()
        first = next(event for event in monitor.events if event.counted)
        assert where(first)[0:3:2] == ("f0", "input[0]")

    def test_an_optimizer_with_a_closure(self) -> None:
        model = around(lambda x: x)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
        fastcheck.install(model)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(2, 8)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        model.f0.function = nan_gradient
        weight = model.last.weight.clone()
        stop = stopped(optimizer.step, closure)
        assert where(stop.culprit)[0:3:2] == ("f0", "input[0]")
        assert torch.equal(weight, model.last.weight)

    def test_a_loop_without_an_optimizer(self) -> None:
        model = around(lambda x: x)
        fastcheck.install(model)

        def step(change: Optional[Callable[[torch.Tensor], torch.Tensor]]) -> None:
            model.f0.function = change or (lambda x: x)
            model.zero_grad()
            model(torch.ones(2, 8)).square().mean().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad

        step(None)
        step(None)
        assert where(stopped(step, nan_gradient).culprit)[0:3:2] == ("f0", "input[0]")


@pytest.mark.parametrize("level", ["module", "op"])
def test_what_a_criterion_returned_was_not_returned_by_the_model(level: str) -> None:
    parts = {"root": Apply(lambda x: (-x.abs() - 1).sqrt()), "sum": Apply(torch.sum)}
    model, criterion = nn.Linear(4, 2), chain(**parts)
    with (
        fastcheck.install(model, criterion, level=level),
        pytest.raises(fastcheck.OverflowDetected) as stop,
    ):
        criterion(model(torch.ones(3, 4))).backward()
    assert "the model returned it" not in stop.value.culprit.reason
