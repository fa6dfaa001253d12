"""What a training loop is told of, as events of the watch."""

from __future__ import annotations

import warnings
from typing import Any, Callable

import torch
from torch import nn

import fastcheck


def texts(
    program: Callable[[nn.Module, Any], None],
    steps: int = 15,
    may_warn: bool = True,
    kinds: tuple[str, ...] = ("invariant",),
    **options: Any,
) -> list[str]:
    """What a loop of this step is told of, as an event."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not may_warn:
            warnings.simplefilter("error", fastcheck.FastcheckWarning)
        with fastcheck.install(model, **options) as monitor:
            for _ in range(steps):
                program(model, optimizer)
    return [event.text for event in monitor.watch.events if event.kind in kinds]


def loss(model: nn.Module) -> torch.Tensor:
    return model(torch.randn(8, 8)).square().mean()
