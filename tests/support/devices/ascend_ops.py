"""Loops and monitors for the tests of level="op" on a fake Ascend NPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Optional

import torch
from torch import nn

import fastcheck
from support.programs.op_level import Attention, model_with
from support.programs.training import batches

NAME = "npu:0"

Function = Callable[[torch.Tensor], torch.Tensor]


def loop(
    model: nn.Module,
    steps: int = 4,
    *,
    shape: tuple[int, ...] = (4, 8),
    before: Callable[[int], None] = lambda step: None,
    optimizer: Optional[torch.optim.Optimizer] = None,
) -> list[torch.Tensor]:
    """Trains without asking the device for a value."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
    losses = []
    for step, x in enumerate(batches(steps, *shape)):
        before(step)
        optimizer.zero_grad()
        x = x.to(torch.float16).pin_memory().to(NAME, non_blocking=True)
        # Small: what overflows is the model's business.
        loss = (model(x).float() * 1e-2).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def net(function: Function) -> nn.Module:
    return model_with(function).to(NAME, torch.float16)


def attention(mask: Function) -> nn.Module:
    model = Attention(dtype=torch.float16).to(NAME)
    model.mask = mask
    return model


def upper(scores: torch.Tensor) -> torch.Tensor:
    return torch.ones(scores.shape[-2:], device=scores.device).triu(1).bool()


@contextmanager
def watching(model: nn.Module, **options: Any) -> Iterator[fastcheck.Monitor]:
    options = {"record": "stats", "overflow_nums": -1, **options}
    with fastcheck.install(model, level="op", **options) as monitor:
        yield monitor
        monitor.flush()


def counted(monitor: fastcheck.Monitor) -> list[str]:
    return [event.site.op or "" for event in monitor.events if event.counted]


def summary(monitor: fastcheck.Monitor) -> str:
    return " ".join(monitor.summary().split())


def line(function: Function) -> str:
    """The line of a function of one line, as in an event."""
    code = function.__code__
    return f"{Path(code.co_filename).name}:{code.co_firstlineno + 1} in {code.co_name}"


def overflowing(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(x.abs() * 100 + 20)
