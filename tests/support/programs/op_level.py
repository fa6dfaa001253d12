"""Models and loops for the tests of level="op"."""

from __future__ import annotations

import math
from typing import Any, Callable, Optional

import torch
from torch import nn

import fastcheck
from support.programs.training import Apply, batches

INF = float("inf")


class Attention(nn.Module):
    """One head with a mask of the kind that is asked for."""

    def __init__(self, width: int = 8, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width, dtype=dtype) for _ in range(3))
        self.mask: Callable[[torch.Tensor], torch.Tensor] = causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.q(x) @ self.k(x).transpose(-1, -2) / math.sqrt(x.shape[-1])
        return torch.softmax(self.mask(scores), -1) @ self.v(x)


def causal(scores: torch.Tensor) -> torch.Tensor:
    ones = torch.ones(scores.shape[-2:], device=scores.device)
    return scores.masked_fill(ones.triu(1).bool(), -INF)


def train(
    model: nn.Module,
    steps: int,
    before: Callable[[int], None] = lambda step: None,
    loss: Callable[[torch.Tensor], torch.Tensor] = lambda y: y.float().square().mean(),
    shape: tuple[int, ...] = (4, 8),
    dtype: torch.dtype = torch.float32,
    optimizer: Any = None,
) -> list[float]:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for step, x in enumerate(batches(steps, *shape)):
        before(step)
        optimizer.zero_grad()
        value = loss(model(x.to(dtype)))
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return losses


def loop(
    model: nn.Module,
    data: list[torch.Tensor],
    *,
    before: Callable[[int], None] = lambda step: None,
    loss: Callable[[torch.Tensor], torch.Tensor] = lambda y: y.float().square().mean(),
    optimizer: Optional[torch.optim.Optimizer] = None,
) -> list[torch.Tensor]:
    """Trains without asking the device for a value."""
    # One by one, as on the CPU by default.
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
    losses = []
    for step, x in enumerate(data):
        before(step)
        optimizer.zero_grad()
        value = loss(model(x))
        value.backward()
        optimizer.step()
        losses.append(value.detach())
        del value
    return losses


def culprit(stop: fastcheck.OverflowDetected) -> tuple[str, str, str, str]:
    """Module, op, direction and verdict."""
    event = stop.culprit
    return event.site.module, event.site.op or "", event.site.direction, event.verdict.name.lower()


def verdicts(monitor: fastcheck.Monitor) -> set[str]:
    return {event.verdict.name.lower() for event in monitor.events}


def model_with(function: Callable[[torch.Tensor], torch.Tensor]) -> nn.Sequential:
    """Linear, the function in a module of its own, linear."""
    model = nn.Sequential(nn.Linear(8, 8), Apply(), nn.Linear(8, 4))
    model[1].function = function
    return model
