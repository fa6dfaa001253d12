"""Runs with a log, small and seeded, that the tests of compare() let differ in one thing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable, Optional

import torch
from torch import nn

import fastcheck
from support.programs.training import Net

Change = Callable[[int, torch.Tensor], torch.Tensor]

QUESTIONS = (
    "environment",
    "hyper-parameters",
    "batches",
    "initial weights",
    "forward",
    "loss",
    "gradients",
    "update",
)


def answers(comparison: Any) -> dict[str, str]:
    """By question."""
    return {answer.question: answer.answer for answer in comparison.answers}


def assert_weight_gradient_is_first(comparison: Any, layer: int) -> None:
    """That of a fused_net() whose ``layer`` is wrong, at step 1, and nothing earlier."""
    assert answers(comparison) == {
        **dict.fromkeys(QUESTIONS[:6], "yes"),
        "gradients": "no",
        "update": "not asked",
    }
    first = comparison.first
    assert first is not None and first.exact_before
    assert (first.row.step, first.row.name) == (
        1,
        f"{layer} · optimizer · gradient of {layer}.weight",
    )
    assert comparison.first_inexact is not None and comparison.first_inexact.key == first.key
    assert not [row for row in comparison.rows if row.step < 1]
    assert {
        row.name for row in comparison.rows if row.step == 1 and row.phase.name == "GRADIENTS"
    } == {
        f"{layer} · optimizer · gradient of {layer}.weight",
        f"{layer} · optimizer · gradient of {layer}.weight.main_grad",
    }


def log_run(
    directory: Path,
    *,
    steps: int = 4,
    model: Optional[Callable[[], nn.Module]] = None,
    optimizer: Optional[Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]] = None,
    batch: Change = lambda step, x: x,
    before_forward: Callable[[int, nn.Module], None] = lambda step, model: None,
    before_update: Callable[[int, nn.Module], None] = lambda step, model: None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> str:
    """Trains with cross-entropy on random batches of 6; the directory of the log."""
    torch.manual_seed(seed)
    net = (model or Net)().to(dtype)
    criterion = nn.CrossEntropyLoss()
    update = (optimizer or torch.optim.AdamW)(net.parameters())
    data = torch.Generator().manual_seed(1)
    options = {"overflow_nums": -1, "log": fastcheck.Log(directory), **options}
    training = fastcheck.Training(optimizer=update)
    with fastcheck.install(net, criterion, training=training, **options):
        for step in range(steps):
            x = torch.randn(6, 8, generator=data).to(dtype)
            labels = torch.randint(0, 4, (6,), generator=data)
            before_forward(step, net)
            update.zero_grad()
            criterion(net(batch(step, x)).float(), labels).backward()
            before_update(step, net)
            update.step()
    return os.fspath(directory)


class FusedWeightGradient(torch.autograd.Function):
    """A linear layer whose weight gradient is added up in ``weight.main_grad``, as Megatron's fused
    kernels do. ``transposed``: from the second step on the kernel takes the memory of the gradient,
    a transposed view, for row-major.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, transposed: bool) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.transposed = transposed
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        gradient = (x.t() @ grad).t()  # a view: the kernel computes it the other way round
        if not hasattr(weight, "main_grad"):
            weight.main_grad = gradient.contiguous()
        elif ctx.transposed:
            memory = gradient.t().reshape(-1)
            weight.main_grad.view(-1).add_(memory)
        else:
            weight.main_grad.add_(gradient)
        return grad @ weight, None, None


class FusedLinear(nn.Module):
    def __init__(self, width: int, transposed: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width)
        self.transposed = transposed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return FusedWeightGradient.apply(x, self.weight, self.transposed)


def fused_net(wrong_layer: Optional[int]) -> nn.Module:
    """Three such layers, one of them wrong, and a head."""
    layers = [FusedLinear(8, transposed=index == wrong_layer) for index in range(3)]
    return nn.Sequential(*layers, nn.Linear(8, 4))


def use_main_grad(step: int, model: nn.Module) -> None:
    """What Megatron's optimizer does before it steps."""
    for parameter in model.parameters():
        main = getattr(parameter, "main_grad", None)
        if main is not None:
            parameter.grad = main.clone()


def zero_main_grad(step: int, model: nn.Module) -> None:
    for parameter in model.parameters():
        if hasattr(parameter, "main_grad"):
            parameter.main_grad.zero_()


class _Wrong(nn.Module):
    """A linear layer that is right in all but one step."""

    def __init__(self, wrong_call: int, by: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.calls, self.wrong_call, self.by = 0, wrong_call, by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.linear(x)
        return y * (1 + self.by) if self.calls - 1 == self.wrong_call else y


def net_with(wrong_call: int, by: float) -> Any:
    return lambda: nn.Sequential(
        nn.Linear(8, 8), nn.Tanh(), _Wrong(wrong_call, by), nn.ReLU(inplace=True), nn.Linear(8, 4)
    )
