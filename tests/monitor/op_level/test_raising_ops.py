"""Operators that raise when they are through, as in a checkpoint that has all it needs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastcheck

pytestmark = pytest.mark.usefixtures("fresh_start")


def stop_here(tensor: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError("a hook of the program")


def test_the_error_of_a_hook_that_packs_a_bad_result() -> None:
    """The hook runs within relu_(), after it has written."""
    layer = nn.Linear(2, 2)
    fastcheck.install(layer, overflow_nums=-1, level="op")
    y = layer(torch.full((2, 2), float("nan")))
    hooks = torch.autograd.graph.saved_tensors_hooks(stop_here, lambda packed: packed)
    with hooks, pytest.raises(ZeroDivisionError, match="a hook of the program"):
        y.relu_()


def test_a_checkpoint_that_stops_early_at_a_bad_result() -> None:
    layer = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))
    fastcheck.install(layer, overflow_nums=-1, level="op")
    x = torch.full((2, 2), float("nan"), requires_grad=True)
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert x.grad is not None
