"""A loss scale without GradScaler: a step that the loop skips is a row and a skipped update."""

from __future__ import annotations

from typing import Any, Callable, Optional

import pytest
import torch
from torch import nn

import fastcheck
from support.programs.training import Net, batches, stopped

pytestmark = pytest.mark.usefixtures("fresh_start")

INF = float("inf")


def train(
    model: nn.Module,
    bad: set[int],
    steps: int = 6,
    *,
    clears: str = "before forward",
    to_none: bool = True,
    scale: float = 1024.0,
    parts: int = 1,
    before_backward: Callable[[nn.Module], None] = lambda model: None,
) -> None:
    """A loop that scales, unscales, looks at the norm and skips by itself."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    weight = model.get_parameter("head.weight")
    now = [-1]
    weight.register_hook(lambda gradient: gradient * INF if now[0] in bad else gradient)
    data = batches(steps * parts)
    for step in range(steps):
        now[0] = step
        if clears == "before forward":
            optimizer.zero_grad(set_to_none=to_none)
        for part in range(parts):
            loss = model(next(data)).square().mean()
            if clears == "before backward" and part == 0:
                optimizer.zero_grad(set_to_none=to_none)
            before_backward(model)
            (loss * scale).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        torch._foreach_div_(gradients, scale)
        if bool(torch.stack([g.norm() for g in gradients]).norm().isfinite()):
            optimizer.step()


def overflows(monitor: fastcheck.Monitor) -> list[int]:
    return [row.step for row in monitor.step_table() if row.overflow]


GIVEN: dict[str, Any] = {"not given": None, "given": 1024.0, "a function": lambda: 1024.0}


@pytest.mark.parametrize("scaler", GIVEN.values(), ids=GIVEN)
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("clears", ["before forward", "before backward"])
class TestRows:
    def test_one_for_each_iteration(
        self, scaler: Any, to_none: bool, clears: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = Net()
        monitor = fastcheck.install(model, training=fastcheck.Training(scaler=scaler))
        train(model, {1, 3, 4}, clears=clears, to_none=to_none)
        rows = monitor.step_table()
        assert [row.step for row in rows] == list(range(6))
        assert overflows(monitor) == [1, 3, 4]
        assert all(row.loss is not None for row in rows)
        assert monitor.event_count == 0

    @pytest.mark.filterwarnings("ignore:step 4. the loss scale stays at 1,024:UserWarning")
    def test_each_step_overflows(self, scaler: Any, to_none: bool, clears: str) -> None:
        model = Net()
        monitor = fastcheck.install(model, training=fastcheck.Training(scaler=scaler))
        train(model, set(range(8)), 8, clears=clears, to_none=to_none)
        assert len(monitor.step_table()) == 8
        assert overflows(monitor)[:7] == list(range(7))

    def test_that_counts_after_so_many(self, scaler: Any, to_none: bool, clears: str) -> None:
        model = Net()
        fastcheck.install(
            model,
            training=fastcheck.Training(scaler=scaler),
            stop=fastcheck.Stop(max_skipped=4),
        )
        stop = stopped(train, model, set(range(20)), 20, clears=clears, to_none=to_none)
        assert "4 steps in a row were skipped" in stop.culprit.reason
        assert stop.culprit.site.key == "head.weight"


def test_an_update_between_them_begins_the_count_again() -> None:
    model = Net()
    monitor = fastcheck.install(model, stop=fastcheck.Stop(max_skipped=3))
    train(model, {0, 1, 3, 4, 6, 7}, 9)
    assert monitor.event_count == 0
    assert overflows(monitor) == [0, 1, 3, 4, 6, 7]


@pytest.mark.parametrize("scaler", [None, 1024.0])
def test_accumulated_gradients(scaler: Optional[float]) -> None:
    model = Net()
    monitor = fastcheck.install(model, training=fastcheck.Training(scaler=scaler))
    train(model, {1, 3}, 5, parts=3)
    assert [row.step for row in monitor.step_table()] == list(range(5))
    assert overflows(monitor) == [1, 3]


def test_a_step_of_two_passes_that_clears_between_them_is_one() -> None:
    """As sharpness-aware minimisation does."""
    model = Net()
    monitor = fastcheck.install(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x in batches(4):
        model(x).square().mean().backward()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [row.step for row in monitor.step_table()] == list(range(4))


def gradients_apart(model: nn.Module) -> None:
    """A pass of autograd.grad(), which leaves no gradient on a parameter."""
    torch.autograd.grad(model(torch.ones(1, 8)).mean(), list(model.parameters()))


def test_many_passes_that_leave_no_gradient_before_training() -> None:
    model = Net()
    monitor = fastcheck.install(model)
    for _ in range(70):
        gradients_apart(model)
    train(model, {90, 93}, 96)
    assert len(overflows(monitor)) == 2


def test_a_pass_that_leaves_no_gradient_in_each_iteration() -> None:
    model = Net()
    monitor = fastcheck.install(model)
    train(model, {90, 93}, 96, before_backward=gradients_apart)
    assert len(overflows(monitor)) == 2


@pytest.mark.parametrize("is_scaled", [True, False])
def test_a_model_without_gradients_is_searched_seldom(
    is_scaled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a loss scale of the loop's own, and with finite numbers, it is not at all."""
    searched: list[bool] = []

    def parameters() -> list[torch.Tensor]:
        searched.append(True)
        return []

    training = fastcheck.Training(scaler=2.0 if is_scaled else None)
    model = Net()
    monitor = fastcheck.install(model, training=training)
    unfinished = monitor._watcher.ends.unfinished
    monkeypatch.setattr(unfinished, "_parameters", parameters)
    for _ in range(256):
        gradients_apart(model)
    assert len(searched) == (64 + 3 if is_scaled else 0)
