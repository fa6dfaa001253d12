"""Small models of other fields, each computed in several ways: images, diffusion, recurrent nets,
experts, averaged weights, low-rank adapters, dropout that is recomputed, and a module that is
called for each part of its batch. Programs of compare_sides.py.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastcheck

WIDTH, ROWS, CLASSES = 16, 12, 5


class Images(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        momentum = 0.01 if kind == "momentum" else 0.1
        self.kind, self.norm = kind, nn.BatchNorm2d(8, momentum=momentum)
        self.first = nn.Conv2d(1, 8, 3, padding="valid" if "pad" in kind else "same")
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(-1, 1, 4, 4)
        if "pad" in self.kind:
            x = F.pad(x, (1, 1, 1, 1), "constant" if self.kind == "pad" else "reflect")
        made: torch.Tensor = self.head(self.norm(self.first(x)).relu().mean((2, 3)))
        return made


class Diffusion(nn.Module):
    """Says what noise there is; the first element of a row is its time."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.time = kind, nn.Linear(WIDTH, WIDTH)
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half, time = WIDTH // 2, (x[:, :1] * 100).round() + (self.kind == "a step later")
        places = torch.arange(half)
        if self.kind == "a power":
            frequencies = 10_000.0 ** (-places / half)
        else:
            ends = half - 1 if self.kind == "another end" else half
            frequencies = torch.exp(-math.log(10_000) * places / ends)
        parts = [(time * frequencies).sin(), (time * frequencies).cos()]
        if self.kind == "cosines first":
            parts.reverse()
        made: torch.Tensor = self.head(F.silu(self.first(x) + self.time(torch.cat(parts, -1))))
        return made


class Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.lstm = kind, nn.LSTM(4, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(-1, 4, 4)
        if self.kind in ("cells", "gates"):
            y = self.cells(x)
        elif self.kind:
            first, state = self.lstm(x[:, :2])
            if self.kind == "state lost":
                state = None
            if self.kind == "state detached":
                state = tuple(value.detach() for value in state)
            y = torch.cat([first, self.lstm(x[:, 2:], state)[0]], 1)
        else:
            y = self.lstm(x)[0]
        made: torch.Tensor = self.head(y.mean(1))
        return made

    def cells(self, x: torch.Tensor) -> torch.Tensor:
        hidden = memory = x.new_zeros(len(x), WIDTH)
        weights, made = dict(self.lstm.named_parameters()), []
        for step in range(x.shape[1]):
            gates = F.linear(x[:, step], weights["weight_ih_l0"], weights["bias_ih_l0"])
            gates = gates + F.linear(hidden, weights["weight_hh_l0"], weights["bias_hh_l0"])
            taken, kept, new, shown = gates.chunk(4, -1)
            if self.kind == "gates":
                taken, kept = kept, taken
            memory = kept.sigmoid() * memory + taken.sigmoid() * new.tanh()
            hidden = shown.sigmoid() * memory.tanh()
            made.append(hidden)
        return torch.stack(made, 1)


class Experts(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first, self.router = kind, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        shares = self.router(x).softmax(-1)
        values, chosen = shares.topk(2, -1)
        if self.kind != "shares as they are":
            values = values / values.sum(-1, keepdim=True)
        if self.kind == "shares detached":
            values = values.detach()
        all_shares = torch.zeros_like(shares).scatter(-1, chosen, values)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            own = all_shares[:, number : number + 1]
            if self.kind == "each reads all rows":
                y = y + own * expert(x)
                continue
            rows = own.flatten().nonzero().flatten()
            if self.kind == "rows left out":
                rows = rows[:4]
            y = y.index_add(0, rows, own[rows] * expert(x[rows]))
        made: torch.Tensor = self.head(x + y)
        return made


class Averaged(nn.Module):
    """A teacher follows its student, and returns what the student is to return."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.student = kind, nn.Linear(WIDTH, WIDTH)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(self.student(x).tanh() - self.teacher(x))
        return made

    @torch.no_grad()
    def follow(self) -> None:
        kept = 0.99 if self.kind == "slower" else 0.9
        for mine, other in zip(self.teacher.parameters(), self.student.parameters()):
            if self.kind == "lerp":
                mine.lerp_(other, 1 - kept)
            else:
                mine.mul_(kept).add_(other, alpha=1 - kept)


class Adapted(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.base = kind, nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(4, WIDTH) / 8)
        self.b = nn.Parameter(torch.randn(WIDTH, 4) / 8)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 8 / (math.sqrt(4) if self.kind == "another scale" else 4)
        if self.kind == "merged":
            y = F.linear(x, self.base.weight + scale * (self.b @ self.a), self.base.bias)
        else:
            y = self.base(x) + scale * (x @ self.a.t() @ self.b.t())
        made: torch.Tensor = self.head(y.relu())
        return made


class Dropped(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first, self.second = kind, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout, self.head = nn.Dropout(0.3), nn.Linear(WIDTH, CLASSES)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.second(self.dropout(self.first(x).relu()))
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind:
            keeps = self.kind == "recomputed"
            x = checkpoint(self.part, x, use_reentrant=False, preserve_rng_state=keeps)
        else:
            x = self.part(x)
        made: torch.Tensor = self.head(x.relu())
        return made


class Called(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first, self.head = kind, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        sizes = {"quarters": [3] * 4, "uneven": [2, 3, 7], "whole": [ROWS]}.get(self.kind, [6, 6])
        parts = list(torch.split(x, sizes))
        if self.kind == "one twice":
            parts[1] = parts[0]
        made = [self.mlp(part) for part in parts]
        if self.kind == "swapped":
            made.reverse()
        found: torch.Tensor = self.head(x + torch.cat(made))
        return found


MODELS: dict[str, Callable[[str], nn.Module]] = {
    "images": Images,
    "diffusion": Diffusion,
    "recurrent": Recurrent,
    "experts": Experts,
    "averaged": Averaged,
    "adapted": Adapted,
    "dropout": Dropped,
    "calls": Called,
}


def train_field(log: Path, *, field: str, kind: str = "") -> None:
    """Trains with a log."""
    fastcheck.seed_all(0)
    model: Any = MODELS[field](kind)
    criterion = nn.CrossEntropyLoss()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    update = torch.optim.AdamW(trained, 1e-3)
    draw = torch.Generator().manual_seed(1)
    with fastcheck.install(model, criterion, log_dir=log):
        for _ in range(4):
            x = torch.rand(ROWS, WIDTH, generator=draw)
            labels = torch.randint(0, CLASSES, (ROWS,), generator=draw)
            update.zero_grad()
            criterion(model(x), labels).backward()
            update.step()
            if field == "averaged":
                model.follow()
