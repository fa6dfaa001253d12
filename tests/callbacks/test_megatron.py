"""The adapter on a stand-in for Megatron Core's optimizers: the public interface of megatron-core
0.16 (step() returns success, norm and zeros; get_loss_scale(); config; param_groups). Those of
Megatron itself need CUDA.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Optional

import pytest
import torch
from torch import nn

import fastcheck
from support.programs.training import Net, batches, nan_gradient, stopped, where

pytestmark = pytest.mark.usefixtures("fresh_start")


class MainGradOptimizer:
    """Updates float32 copies from ``main_grad``, into which backward hooks accumulate."""

    def __init__(self, model: nn.Module, scale: Optional[float] = None) -> None:
        self.parameters = list(model.parameters())
        for parameter in self.parameters:
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)

            def accumulate(p: Any) -> None:
                p.main_grad.add_(p.grad)
                p.grad = None

            parameter.register_post_accumulate_grad_hook(accumulate)
        self.main = [nn.Parameter(p.detach().clone().float()) for p in self.parameters]
        self.optimizer = torch.optim.SGD(self.main, lr=0.1)
        self.config = SimpleNamespace(fp16=scale is not None)
        self.scale = torch.tensor([scale or 1.0])

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def get_loss_scale(self) -> torch.Tensor:
        return self.scale

    @torch.no_grad()
    def step(self) -> Any:
        gradients: list[Any] = [p.main_grad / self.scale for p in self.parameters]
        if self.config.fp16 and not all(bool(g.isfinite().all()) for g in gradients):
            self.scale = self.scale / 2
            return False, None, None
        for main, gradient in zip(self.main, gradients):
            main.grad = gradient
        self.optimizer.step()
        for parameter, main in zip(self.parameters, self.main):
            parameter.copy_(main)
        return True, 1.0, None

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.main_grad.zero_()


def loop(model: nn.Module, optimizer: MainGradOptimizer, steps: int, bad: int = -1) -> list[float]:
    losses = []
    for step, x in enumerate(batches(steps)):
        optimizer.zero_grad()
        out = model(x)
        loss = (nan_gradient(out) if step == bad else out).square().mean()
        (loss * optimizer.get_loss_scale()).backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_main_gradients_are_read_once_a_step() -> None:
    model = Net()
    optimizer = MainGradOptimizer(model)
    monitor = fastcheck.callbacks.megatron([model], optimizer)
    loop(model, optimizer, 3)
    sites = [monitor.sites[r["site"]] for r in monitor.records() if r["step"] == 1]
    keys = [site.key for site in sites if site.role == "param_grad"]
    assert keys == [name for name, _ in model.named_parameters()]
    rows = monitor.step_table()
    assert [row.learning_rate for row in rows] == [0.1] * 3 and all(r.gradient_norm for r in rows)
    monitor.remove()


def test_losses_and_weights_are_the_same() -> None:
    found = []
    for observed in (False, True):
        torch.manual_seed(0)
        model = Net()
        optimizer = MainGradOptimizer(model)
        if observed:
            fastcheck.callbacks.megatron(model, optimizer)
        found.append((loop(model, optimizer, 4), [p.detach() for p in model.parameters()]))
    assert found[0][0] == found[1][0] and all(map(torch.equal, found[0][1], found[1][1]))


def test_a_nan_stops_before_the_update() -> None:
    model = Net()
    optimizer = MainGradOptimizer(model)
    fastcheck.callbacks.megatron(model, optimizer)
    stop = stopped(loop, model, optimizer, 5, bad=2)
    assert stop.step == 2 and where(stop.culprit)[:2] == ("head", "grad_output")
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_a_step_that_the_scaler_skips_is_no_event() -> None:
    model = Net()
    optimizer = MainGradOptimizer(model, scale=1024.0)
    monitor = fastcheck.callbacks.megatron(model, optimizer)
    loop(model, optimizer, 4, bad=1)
    rows = monitor.step_table()
    assert [row.overflow for row in rows] == [False, True, False, False]
    assert [row.scale for row in rows] == [1024, 1024, 512, 512]
    assert monitor.event_count == 0
    monitor.remove()


def test_an_optimizer_of_torch_is_an_error() -> None:
    model = Net()
    with pytest.raises(fastcheck.ConfigError, match="Megatron Core"):
        fastcheck.callbacks.megatron(model, torch.optim.SGD(model.parameters(), lr=0.1))
