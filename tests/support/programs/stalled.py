"""Models with weights that do not move."""

from __future__ import annotations

import warnings
from typing import Any, Callable, Optional

import torch
from torch import nn

import fastcheck
from support.programs.training import batches

STEPS = 24


def said(
    model: nn.Module,
    optimizer: Any = None,
    *,
    steps: int = STEPS,
    accumulate: int = 1,
    scaler: Optional[torch.amp.GradScaler] = None,
    before_update: Callable[[int], None] = lambda step: None,
    **options: Any,
) -> list[str]:
    """The warnings while training, and those in summary()."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", fastcheck.LearningRateWarning)
        with fastcheck.install(model, overflow_nums=-1, **{"watch": False, **options}) as monitor:
            device = next(model.parameters()).device
            for step, x in enumerate(batches(steps * accumulate)):
                loss = model(x.to(device)).float().square().mean()
                (loss if scaler is None else scaler.scale(loss)).backward()
                if (step + 1) % accumulate:
                    continue
                before_update(step)
                if scaler is None:
                    optimizer.step()
                else:
                    scaler.step(optimizer)
                    scaler.update()
                optimizer.zero_grad()
            monitor.flush()
            summary = " ".join(monitor.summary().split())
    texts = [str(one.message) for one in caught]
    assert all(one.category is fastcheck.FastcheckWarning for one in caught), texts
    for text in texts:
        assert " ".join(text.split()) in summary
    return texts


class Frozen(torch.optim.SGD):
    """Holds the parameters that it leaves out, and does not change them."""

    def __init__(self, parameters: Any, out: list[nn.Parameter], **options: Any) -> None:
        super().__init__(parameters, **options)
        self.out = out

    def step(self, closure: Any = None) -> Any:
        before = [parameter.detach().clone() for parameter in self.out]
        super().step(closure)
        with torch.no_grad():
            for parameter, value in zip(self.out, before):
                parameter.copy_(value)


class Branches(nn.Module):
    def __init__(self, join: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.main, self.side = nn.Linear(8, 4), nn.Linear(8, 4)
        self.join = join

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.main(x) + self.join(self.side(x))


class Masked(nn.Module):
    """Its mask changes from one call on; ``mean`` in all of them, if it is there to change."""

    def __init__(self, first: int, *, has_mean: bool = True) -> None:
        super().__init__()
        self.has_mean = has_mean
        self.linear, self.norm = nn.Linear(8, 4), nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.ones(4))
        self.register_buffer("mean", torch.zeros(4))
        self.first, self.count = first, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.linear(x))
        self.count += 1
        if self.count > self.first:
            self.mask.mul_(0.5)
        if self.has_mean:
            self.mean.lerp_(y.detach().mean(0), 0.1)
        return y * self.mask
