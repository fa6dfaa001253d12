"""A model that observes two tensors by name, and what is read of them."""

from __future__ import annotations

import torch
from torch import nn

import fastcheck
from fastcheck import observe
from support.programs.training import batches

__all__ = ["EXPECTED", "Attention", "net", "readings", "train"]


class Attention(nn.Module):
    """A square root between two linear layers, with a hole before and after what is observed."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(8, 8)
        self.out = nn.Linear(8, 8)
        self.before = self.after = lambda x: x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.before(self.q(x).square())
        scores = self.after(observe("attn.logits", scores))
        return self.out(scores.tanh())


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), Attention())


def train(model: nn.Module, steps: int = 2, device: str = "cpu") -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x in batches(steps):
        optimizer.zero_grad()
        loss = observe("loss.mse", model(x.to(device)).square().mean())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def readings(monitor: fastcheck.Monitor, text: str = "(observe)") -> list[str]:
    found = (str(monitor.sites[record["site"]]) for record in monitor.records())
    return [name for name in found if text in name]


EXPECTED = [
    "1.attn.logits (observe) · forward · output",
    "loss.mse (observe) · forward · output",
    "loss.mse (observe) · backward · gradient of output",
    "1.attn.logits (observe) · backward · gradient of output",
]
