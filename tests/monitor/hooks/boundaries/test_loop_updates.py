"""Loops that update the weights themselves, without an optimizer of torch."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
from torch import nn
from torch.func import functional_call

import fastcheck
from fastcheck.monitor.hooks import step_ends
from support.programs.training import stopped
from support.warned import warned

pytestmark = pytest.mark.usefixtures("fresh_start")

RATE = 0.05


def in_place(parameter: torch.Tensor) -> None:
    with torch.no_grad():
        parameter -= RATE * parameter.grad


def through_data(parameter: torch.Tensor) -> None:
    parameter.data.sub_(RATE * parameter.grad.data)


def other_data(parameter: torch.Tensor) -> None:
    parameter.data = parameter.data - RATE * parameter.grad


def to_none(parameter: torch.Tensor) -> None:
    parameter.grad = None


def to_zero(parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.data.zero_()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).tanh() @ self.weight


class Called(nn.Module):
    """No module is called."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).square().mean()


def loss_of(model: nn.Module, divisor: float = 1.0) -> torch.Tensor:
    x = torch.randn(5, 4)
    loss = model.loss(x) if isinstance(model, Called) else model(x).square().mean()
    return loss / torch.tensor(divisor)


def each(change: Callable[[torch.Tensor], None], model: nn.Module) -> None:
    for parameter in model.parameters():
        change(parameter)


def rows(monitor: fastcheck.Monitor) -> list[Any]:
    return [(row.step, row.loss) for row in monitor.step_table()]


@pytest.mark.parametrize("make", [Net, Called])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("clears", [to_none, to_zero])
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("update", [in_place, through_data, other_data])
def test_each_update_ends_a_step(
    make: Callable[[], nn.Module],
    parts: int,
    clears: Callable[[torch.Tensor], None],
    is_late: bool,
    update: Callable[[torch.Tensor], None],
) -> None:
    model, losses = make(), []
    with fastcheck.install(model) as monitor:
        for _ in range(4):
            losses.append(0.0)
            if not is_late:
                each(clears, model)
            for part in range(parts):
                loss = loss_of(model)
                if is_late and part == 0:
                    each(clears, model)
                loss.backward()
                losses[-1] += loss.item()
            each(update, model)
        assert rows(monitor) == [(step, pytest.approx(loss)) for step, loss in enumerate(losses)]
        assert "a step ends where the next pass begins" in monitor.summary()


@pytest.mark.parametrize(
    ("kind", "count"),
    [("never cleared", 1), ("cleared now and then", 0), ("held", 0), ("momentum", 0)],
)
@pytest.mark.parametrize("level", ["module", "op"])
def test_gradients_that_are_never_cleared(kind: str, count: int, level: str) -> None:
    """``momentum``: the loop makes what is added to smaller; ``held``: an optimizer may update."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), RATE) if kind == "held" else None
    with warned() as caught, fastcheck.install(model, level=level):
        for step in range(80):
            loss_of(model).backward()
            each(in_place, model)
            if kind == "cleared now and then" and step % 40 == 39:
                each(to_none, model)
            for parameter in model.parameters() if kind == "momentum" else ():
                parameter.grad *= 0.9
    told = [text for text in caught if "gradients are not cleared: in 64 updates" in text]
    assert len(told) == count
    del optimizer


def test_at_op_level() -> None:
    model, losses = Net(), []
    with fastcheck.install(model, level="op") as monitor:
        for _ in range(4):
            each(to_none, model)
            loss = loss_of(model)
            loss.backward()
            losses.append(loss.item())
            each(in_place, model)
        assert rows(monitor) == list(enumerate(losses))


@pytest.mark.parametrize("make", [Net, Called])
def test_gradients_of_autograd_grad(make: Callable[[], nn.Module]) -> None:
    model, losses = make(), []
    with fastcheck.install(model) as monitor:
        for _ in range(4):
            loss = loss_of(model)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            losses.append(loss.item())
            with torch.no_grad():
                for parameter, gradient in zip(model.parameters(), gradients):
                    parameter -= RATE * gradient
        assert rows(monitor) == list(enumerate(losses))


def test_a_weight_that_the_update_breaks() -> None:
    model = Net()

    def train() -> None:
        for step in range(6):
            each(to_none, model)
            loss_of(model).backward()
            each(in_place, model)
            if step == 3:
                with torch.no_grad():
                    model.weight.fill_(float("inf"))

    with fastcheck.install(model):
        stop = stopped(train)
    assert stop.step == 4 and stop.culprit.site.key == "weight"
    assert "The update of step 3 was applied after it was last read finite" in str(stop)


def test_a_loss_that_breaks_has_updated_nothing() -> None:
    model = Net()

    def train() -> None:
        for step in range(6):
            each(to_none, model)
            loss_of(model, 0.0 if step == 3 else 1.0).backward()
            each(in_place, model)

    with fastcheck.install(model):
        stop = stopped(train)
    assert stop.step == 3 and stop.report.weights_intact


@pytest.mark.parametrize("level", ["module", "op"])
class TestNoUpdates:
    def test_sharpness_aware_minimisation(self, level: str) -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        with fastcheck.install(model, level=level) as monitor:
            for _ in range(3):
                loss_of(model).backward()
                steps = [0.01 * p.grad for p in model.parameters() if p.grad is not None]
                with torch.no_grad():
                    torch._foreach_add_(list(model.parameters()), steps)
                    optimizer.zero_grad()
                loss_of(model).backward()
                with torch.no_grad():
                    torch._foreach_sub_(list(model.parameters()), steps)
                optimizer.step()
                optimizer.zero_grad()
            assert monitor.step_index == 2

    def test_weights_of_functional_call(self, level: str) -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        with fastcheck.install(model, level=level) as monitor:
            for _ in range(3):
                optimizer.zero_grad()
                slow = dict(model.named_parameters())
                loss = functional_call(model, slow, torch.randn(5, 4)).square().mean()
                gradients = torch.autograd.grad(loss, list(slow.values()), create_graph=True)
                fast = {name: p - RATE * g for (name, p), g in zip(slow.items(), gradients)}
                functional_call(model, fast, torch.randn(5, 4)).square().mean().backward()
                optimizer.step()
            assert monitor.step_index == 2

    def test_noise_on_weights_between_passes_that_add_up(self, level: str) -> None:
        model = Net()
        with fastcheck.install(model, level=level) as monitor:
            for _ in range(3):
                for _ in range(3):
                    noise = [0.01 * torch.randn_like(p) for p in model.parameters()]
                    with torch.no_grad():
                        torch._foreach_add_(list(model.parameters()), noise)
                    loss_of(model).backward()
                    with torch.no_grad():
                        torch._foreach_sub_(list(model.parameters()), noise)
                each(in_place, model)
                each(to_none, model)
            assert monitor.step_index == 2

    def test_a_state_that_is_loaded_after_a_pass(self, level: str) -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        with fastcheck.install(model, level=level) as monitor:
            loss_of(model).backward()
            model.load_state_dict(state)
            for _ in range(3):
                optimizer.zero_grad()
                loss_of(model).backward()
                optimizer.step()
            assert monitor.step_index == 2

    def test_an_optimizer_that_has_ended_the_first_step(
        self, level: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is looked for in no later step."""
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        searches: list[int] = []
        search = step_ends._living
        monkeypatch.setattr(step_ends, "_living", lambda: searches.append(0) or search())
        with fastcheck.install(model, level=level) as monitor:
            for _ in range(3):
                loss = loss_of(model)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            assert monitor.step_index == 2 and not searches
