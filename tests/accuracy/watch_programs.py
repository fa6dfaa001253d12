"""Training programs for watch.py, with a batch that can be changed and faults to put in."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Callable

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["FAULTS", "PROGRAMS", "Program"]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.act = nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.down(self.act(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 32)
        self.blocks = nn.ModuleList(Block(32) for _ in range(2))
        self.head = nn.Linear(32, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(8, 32, batch_first=True), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0][:, -1])


class Routed(nn.Module):
    """Each token is given to one of four experts, which see only theirs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(width), nn.Linear(width, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(4)
        )
        self.balance = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = self.norm(x).flatten(0, -2)
        share = self.gate(flat).softmax(-1)
        best = share.max(-1)
        found = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            chosen = (best.indices == number).nonzero().squeeze(-1)
            found = found.index_add(0, chosen, expert(flat[chosen]) * best.values[chosen, None])
        load = F.one_hot(best.indices, 4).float().mean(0)
        self.balance = 4 * (load * share.mean(0)).sum()
        return x + found.view_as(x)


class RoutedGpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first = nn.Embedding(32, 32), Block(32)
        self.second, self.head = Routed(32), nn.Linear(32, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(self.embed(tokens))))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
    )


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4),
    )  # fmt: skip


class Program:
    """A model with its data: ``batch()`` draws one, ``loss(batch)`` computes on it."""

    def __init__(self, kind: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.kind = kind
        self.model = {"mlp": mlp, "cnn": cnn, "gru": Recurrent, "gpt": Gpt}[kind]()
        self.teacher = torch.randn(16, 4)
        self.patterns = torch.randn(4, 3, 8, 8)
        self.waves = torch.randn(4, 6, 8)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.kind == "mlp":
            x = torch.randn(32, 16)
            return x, (x @ self.teacher).argmax(1)
        y = torch.randint(4, (32,))
        if self.kind == "cnn":
            return self.patterns[y] + torch.randn(32, 3, 8, 8), y
        if self.kind == "gru":
            return self.waves[y] + torch.randn(32, 6, 8), y
        start = torch.randint(32, (16, 1))
        stride = torch.randint(1, 4, (16, 1))
        tokens = (start + stride * torch.arange(17)) % 32
        noise = torch.randint(32, tokens.shape)
        tokens = torch.where(torch.rand(tokens.shape) < 0.1, noise, tokens)
        return tokens[:, :-1], tokens[:, 1:]

    def loss(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = batch
        logits = self.model(x)
        return F.cross_entropy(logits.flatten(0, -2), y.flatten())

    def layer(self) -> nn.Module:
        """A layer in the middle, for faults in one."""
        return {
            "mlp": lambda m: m[2], "cnn": lambda m: m[3], "gru": lambda m: m.rnn,
            "gpt": lambda m: m.blocks[0].down,
        }[self.kind](self.model)  # fmt: skip

    def layer_name(self) -> str:
        return {"mlp": "2", "cnn": "3", "gru": "rnn", "gpt": "blocks.0.down"}[self.kind]


PROGRAMS = ("mlp", "cnn", "gru", "gpt")
Change = Callable[[Program, int], Any]


def constant_batch(program: Program, batch: Any) -> Any:
    x, y = batch
    return torch.full_like(x, 3), y


def shifted_labels(program: Program, batch: Any) -> Any:
    x, y = batch
    return x, (y + 1) % (32 if program.kind == "gpt" else 4)


def scaled_batch(program: Program, batch: Any) -> Any:
    x, y = batch
    return (x if program.kind == "gpt" else x * 30.0), y


@contextmanager
def learning_rate(program: Program) -> Iterator[None]:
    for group in program.optimizer.param_groups:
        group["lr"] *= 100
    try:
        yield
    finally:
        for group in program.optimizer.param_groups:
            group["lr"] /= 100


@contextmanager
def option(program: Program, **values: Any) -> Iterator[None]:
    groups = program.optimizer.param_groups
    before = [{name: group[name] for name in values} for group in groups]
    for group in groups:
        group.update(values)
    try:
        yield
    finally:
        for group, old in zip(groups, before):
            group.update(old)


@contextmanager
def output_changed(
    program: Program, change: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """The fault is in the layer itself, so that its own output shows it."""
    layer = program.layer()
    plain = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        found = plain(*args, **kwargs)
        if isinstance(found, tuple):
            return (change(found[0]), *found[1:])
        return change(found)

    layer.forward = forward  # type: ignore[method-assign]  # a fault
    try:
        yield
    finally:
        del layer.forward


def one_element(x: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(x.numel())
    mask[x.numel() // 2] = 1e4
    return x + mask.view(x.shape)


@contextmanager
def weights_scaled(program: Program) -> Iterator[None]:
    """A layer is 30 times too large from here on."""
    with torch.no_grad():
        for parameter in program.layer().parameters():
            parameter.mul_(30.0)
    yield


#: By name: how many steps it lasts, what is entered for them, what changes the batch, and the
#: causes that are right.
FAULTS: dict[str, tuple[int, Any, Any, tuple[str, ...]]] = {
    "learning rate x100": (3, learning_rate, None, ("optimizer",)),
    "beta2 0.5": (40, lambda p: option(p, betas=(0.9, 0.5)), None, ("optimizer",)),
    "epsilon 1e-1": (40, lambda p: option(p, eps=0.1), None, ("optimizer",)),
    "a layer x30": (1, weights_scaled, None, ("optimizer", "layer")),
    "one element of a matmul": (1, lambda p: output_changed(p, one_element), None, ("layer",)),
    "a layer x1e6": (1, lambda p: output_changed(p, lambda x: x * 1e6), None, ("layer",)),
    "a dead layer": (40, lambda p: output_changed(p, torch.zeros_like), None, ("layer",)),
    "a batch of one value": (1, None, constant_batch, ("data",)),
    "a batch x30": (1, None, scaled_batch, ("data",)),
    "labels shifted": (8, None, shifted_labels, ("data", "loss")),
}


def rate_at(step: int, steps: int) -> float:
    """Warm-up over 50 steps, then a cosine to a tenth."""
    warm = min(1.0, (step + 1) / 50)
    return warm * (0.55 + 0.45 * math.cos(math.pi * step / steps))
