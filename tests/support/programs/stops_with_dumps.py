"""Helpers shared by tests of Stop(dump=...): models that stop, and the folder of their dumps."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import torch
from torch import nn

import fastcheck
from support.programs.op_level import model_with, train
from support.programs.training import stopped

FOLDER = Path("dump")


def roots(x: torch.Tensor) -> torch.Tensor:
    y = x.abs() + 1
    return torch.sqrt(-y)


def watch(model: nn.Module, **options: Any) -> fastcheck.Monitor:
    """At op level, where each operator is seen."""
    options.setdefault("stop", fastcheck.Stop(dump=FOLDER))
    return fastcheck.install(model, level="op", sync="call", **options)


def stop_of(function: Callable[[torch.Tensor], torch.Tensor]) -> fastcheck.OverflowDetected:
    model = model_with(function)
    with watch(model):
        return stopped(train, model, 1)


def said(stop: fastcheck.OverflowDetected) -> str:
    """The message, in one line."""
    return " ".join(str(stop).split())
