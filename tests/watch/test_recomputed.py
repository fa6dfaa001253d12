"""Modules that run again in a backward, with what they have read before, or with something else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastcheck


class _Solved(torch.autograd.Function):
    """One step of Euler's method, whose backward solves the equation from the end."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, y: torch.Tensor) -> Any:
        with torch.no_grad():
            end = y + 0.1 * layer(y)
        ctx.layer, ctx.end = layer, end
        return end

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]  # one result
        y = ctx.end.detach().requires_grad_()
        with torch.enable_grad():
            again = ctx.layer(y)
        for p, one in zip(
            ctx.layer.parameters(),
            torch.autograd.grad(again, tuple(ctx.layer.parameters()), 0.1 * gradient),
        ):
            p.grad = one
        return None, gradient


class Model(nn.Module):
    def __init__(self, is_solved: bool) -> None:
        super().__init__()
        drop: nn.Module = nn.Tanh() if is_solved else nn.Dropout(0.5)
        self.first = nn.Linear(6, 64)
        self.block = nn.Sequential(nn.Linear(64, 64), drop, nn.Linear(64, 64))
        self.is_solved = is_solved

    def forward(self, x: torch.Tensor) -> Any:
        y = self.first(x)
        if self.is_solved:
            return _Solved.apply(self.block, y)
        return checkpoint(self.block, y, use_reentrant=False, preserve_rng_state=False)


@pytest.mark.filterwarnings("ignore:step 2. block.1 .Dropout. drops other elements")
@pytest.mark.parametrize("is_solved", [True, False])
def test_an_equation_that_is_solved_backwards_is_no_checkpoint(is_solved: bool) -> None:
    torch.manual_seed(0)
    model = Model(is_solved)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with fastcheck.install(model) as monitor:
        for _ in range(8):
            optimizer.zero_grad()
            model(torch.randn(16, 6)).square().mean().backward()
            optimizer.step()
        monitor.flush()
        told = [event.text for event in monitor.watch.events if "computes it again" in event.text]
    assert bool(told) != is_solved
    assert all("block.1 (Dropout) drops other elements" in text for text in told)


class Rounded(nn.Module):
    """Code before the dropout gives other last bits each time, as atomic additions on a GPU do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.calls = nn.Linear(6, 64), nn.Dropout(0.5), 0

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.rounded, self.first(x), use_reentrant=False)

    def rounded(self, y: torch.Tensor) -> Any:
        self.calls += 1
        return self.drop(y * (1 + self.calls % 2 * 1e-6)).square()


def test_the_same_mask_of_numbers_that_are_rounded_otherwise_is_not_told() -> None:
    model = Rounded()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with fastcheck.install(model) as monitor:
        for _ in range(8):
            optimizer.zero_grad()
            model(torch.randn(16, 6)).mean().backward()
            optimizer.step()
        monitor.flush()
        assert model.calls == 16
        assert not [event for event in monitor.watch.events if "again" in event.text]
