"""Tiny models and training loops that the tests of install() share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Callable, Optional

import pytest
import torch
from torch import nn

import fastcheck


class Residual(nn.Module):
    """x + b(relu(a(x))), the activation in place."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.a = nn.Linear(width, width)
        self.act = nn.ReLU(inplace=True)
        self.b = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(self.act(self.a(x)))


class Net(nn.Module):
    """Three residual blocks with dropout, and a head."""

    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(width) for _ in range(3))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.dropout(block(x))
        return self.head(x)


class Apply(nn.Module):
    """A module without parameters that applies a function, which may be exchanged while
    training.
    """

    def __init__(self, function: Callable[..., Any] = lambda x: x) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def chain(**modules: nn.Module) -> nn.Sequential:
    model = nn.Sequential()
    for name, module in modules.items():
        model.add_module(name, module)
    return model


class _Changed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, change: Any) -> torch.Tensor:
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.change(gradient), None


def change_gradient(x: torch.Tensor, change: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    """x, whose gradient goes through ``change``."""
    changed: torch.Tensor = _Changed.apply(x, change)
    return changed


def nan_gradient(x: torch.Tensor) -> torch.Tensor:
    """x, with a gradient of NaN."""
    return change_gradient(x, lambda gradient: gradient * float("nan"))


def overflow_at_update(parameter: torch.Tensor) -> None:
    """A gradient with which SGD with a rate of 100 moves a float16 parameter out of range. The next
    step finds that: an update is read when it is used.
    """
    parameter.register_hook(lambda gradient: torch.full_like(gradient, -1000.0))


def poison(x: torch.Tensor, value: float = float("nan")) -> torch.Tensor:
    """x with its first element replaced, differentiable."""
    mask = torch.zeros_like(x, dtype=torch.bool)
    mask.view(-1)[0] = True
    return torch.where(mask, torch.full_like(x, value), x)


def batches(count: int, *shape: int, seed: int = 0) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield torch.randn(*(shape or (4, 8)), generator=generator)


def train(
    model: nn.Module,
    steps: int = 3,
    *,
    optimizer: Optional[torch.optim.Optimizer] = None,
    data: Optional[Iterator[torch.Tensor]] = None,
    before_step: Callable[[int], None] = lambda step: None,
) -> list[float]:
    """A plain loop; the losses."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for step, x in enumerate(data or batches(steps)):
        before_step(step)
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def stopped(function: Callable[..., Any], *args: Any, **kwargs: Any) -> fastcheck.OverflowDetected:
    """Calls the function, which has to be stopped, and returns the stop."""
    with pytest.raises(fastcheck.OverflowDetected) as caught:
        function(*args, **kwargs)
    return caught.value


def where(event: Any) -> tuple[str, str, str, str]:
    """The place and verdict of an event, short enough to be compared in one line."""
    site = event.site
    return site.module, site.role, site.label, event.verdict.name.lower()


def names(monitor: fastcheck.Monitor, step: int = 0) -> list[str]:
    """The sites of a step's records, in device order, as text."""
    return [str(monitor.sites[r["site"]]) for r in monitor.records() if r["step"] == step]


def steps_of(monitor: fastcheck.Monitor) -> list[int]:
    """The steps that have records, in order."""
    return sorted(set(monitor.records()["step"].tolist()))


# ---- On a device, without reading anything back --------------------------------------------------


def deep(layers: int = 30) -> nn.Sequential:
    """Linear layers and activations, and a hole at the end into which a test puts a fault."""
    model = nn.Sequential()
    for index in range(layers):
        model.add_module(f"layer{index}", nn.Linear(8, 8))
        model.add_module(f"act{index}", nn.Tanh())
    model.add_module("tail", Apply())
    return model


def without_waiting(model: nn.Module, data: Sequence[torch.Tensor]) -> Callable[[], None]:
    """A step for each of ``data``, which are on the model's device; reads nothing back."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train() -> None:
        for x in data:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    return train


def assert_stops_with_the_culprit(device: str, sync: Any) -> None:
    """A NaN made in the eighth of twenty steps."""
    model = deep(3).to(device)
    fastcheck.install(model, sync=sync)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loop() -> None:
        for step, x in enumerate(batches(20)):
            model.tail.function = poison if step == 7 else Apply().function
            optimizer.zero_grad()
            model(x.to(device)).square().mean().backward()
            optimizer.step()

    stop = stopped(loop)
    assert where(stop.culprit) == ("tail", "output", "output", "origin")
    assert stop.step == 7
    assert stop.culprit.record["nan_count"] == 1
