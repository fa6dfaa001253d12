"""A small model whose operators come in another order, once more, or between casts: the programs of
compare_sides.py whose sides have another schedule.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastcheck

WIDTH, TOKENS = 24, 10


class Branches(nn.Module):
    """Branches of one input whose operators have the same names, each with a weight of its own."""

    def __init__(self, schedule: str) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, WIDTH, WIDTH) * 0.2)
        self.dropout, self.schedule = nn.Dropout(0.25), schedule

    def one(self, x: torch.Tensor, number: int) -> torch.Tensor:
        weight = self.weights[number]
        if self.schedule == "another weight" and number < 2:
            weight = self.weights[1 - number]
        if self.schedule.startswith("rounds otherwise"):
            return torch.stack([x[i] @ weight for i in range(len(x))])
        if self.schedule == "bfloat16" and number == 1:
            return (x.bfloat16() @ weight.bfloat16()).float()
        if self.schedule == "casts":
            return (x.double() @ weight.double()).float().clone()
        return x @ weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = [2, 0, 1] if "reversed" in self.schedule else [0, 1, 2]
        parts = {number: self.one(x, number) for number in order}
        if self.schedule == "a branch is left out":
            parts[2] = parts[1]
        if self.schedule == "a view more":
            parts = {n: p.mT.contiguous().mT.contiguous() for n, p in parts.items()}
        made: torch.Tensor = self.dropout(parts[0].tanh() + parts[1].tanh() * parts[2].sigmoid())
        return made


class Model(nn.Module):
    def __init__(self, schedule: str) -> None:
        super().__init__()
        self.first, self.last = Branches(schedule), nn.Linear(WIDTH, 7)
        self.schedule = schedule

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.schedule.startswith("recomputed"):
            keeps = self.schedule != "recomputed with other dropout"
            y: torch.Tensor = checkpoint(
                self.first, x, use_reentrant=False, preserve_rng_state=keeps
            )
        else:
            y = self.first(x)
        made: torch.Tensor = self.last(x + y)
        return made


def dump_schedule(log: Path, *, schedule: str = "", seed: int = 1) -> None:
    """Dumps the operators of a step, without values. "noise": a tensor is drawn anew in each run,
    as by a sum in no fixed order.
    """
    fastcheck.seed_all(0)
    model = Model(schedule)
    update = torch.optim.SGD(model.parameters(), 0.1)
    x, labels = torch.randn(4, TOKENS, WIDTH), torch.randint(0, 7, (4, TOKENS))
    with fastcheck.Dumper(log, step=0):
        y = model(x)
        if schedule.startswith("noise"):
            draw = torch.Generator().manual_seed(seed)
            y = y * (1 + 3e-3 * torch.rand(y.shape, generator=draw))
        if schedule.endswith("and another scale"):
            y = y * 1.1
        F.cross_entropy(y.flatten(0, 1), labels.flatten()).backward()
        update.step()
