"""Runs that a loss stops."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.report.stop_report import MadeBy

from .training import batches

Loss = Callable[[torch.Tensor], torch.Tensor]


def stop_of(loss: Loss, *, steps: int = 2, **options: Any) -> fastcheck.OverflowDetected:
    """The stop of a run whose loss is ``loss(y)``, where y are positive logits."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Softplus())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with fastcheck.install(model, **options), pytest.raises(fastcheck.OverflowDetected) as stop:
        for x in batches(steps):
            optimizer.zero_grad()
            loss(model(x)).backward()
            optimizer.step()
    return stop.value


def maker_of(loss: Loss, **options: Any) -> MadeBy:
    made = stop_of(loss, **options).report.made_by
    assert made is not None
    return made
