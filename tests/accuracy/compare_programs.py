"""Small training programs for compare_healthy.py, and the faults that are put into one operator of
each.

A program trains from the weights and batches of one file, so that two runs differ in the machine
alone. A fault changes a module after its weights are loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, TOKENS, CLASSES, BATCH = 32, 12, 5, 4
Fault = Callable[[nn.Module], None]


class Attention(nn.Module):
    """Separate projections, so that the gradient of the key's bias is zero but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.scale, self.is_causal = (WIDTH // 4) ** -0.5, True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def heads(y: torch.Tensor) -> torch.Tensor:
            return y.unflatten(-1, (4, -1)).transpose(1, 2)

        mixed = F.scaled_dot_product_attention(
            heads(self.query(x)),
            heads(self.key(x)),
            heads(self.value(x)),
            is_causal=self.is_causal,
            scale=self.scale,
        )
        made: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return made


class Block(nn.Module):
    def __init__(self, is_post_norm: bool = False) -> None:
        super().__init__()
        self.attention, self.is_post_norm = Attention(), is_post_norm
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_post_norm:
            x = self.norm1(x + self.attention(x))
            made: torch.Tensor = self.norm2(x + self.mlp(x))
        else:
            x = x + self.attention(self.norm1(x))
            made = x + self.mlp(self.norm2(x))
        return made


class Transformer(nn.Module):
    def __init__(self, is_post_norm: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.blocks = nn.Sequential(Block(is_post_norm), Block(is_post_norm))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(self.norm(self.blocks(self.embedding(x))).mean(1))
        return made


class FusedAttention(nn.Module):
    """``nn.MultiheadAttention``, whose three projections are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.input, self.norm = nn.Linear(8, WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.input(x)
        y = self.norm(x)
        made: torch.Tensor = self.head((x + self.attention(y, y, y)[0]).mean(1))
        return made


class Convolutions(nn.Module):
    """Convolutions with a bias before a norm, which takes it away again."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 16, 3, padding=1), norm(16)
        self.conv2, self.norm2 = nn.Conv2d(16, 16, 3, padding=1), norm(16)
        self.act, self.head = nn.ReLU(), nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.norm1(self.conv1(x)))
        x = x + self.act(self.norm2(self.conv2(x)))
        made: torch.Tensor = self.head(x.mean((2, 3)))
        return made


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.input = nn.Linear(8, WIDTH)
        self.rnn: Any = kind(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(self.rnn(torch.tanh(self.input(x)))[0][:, -1])
        return made


class Residual(nn.Module):
    """A residual stream into a LayerNorm whose outputs are added up evenly: the gradient of the
    stream is zero but for rounding.
    """

    def __init__(self) -> None:
        super().__init__()
        self.input, self.norm = nn.Linear(8, WIDTH), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.final = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.input(x)
        x = self.final(x + self.mlp(self.norm(x)))
        made: torch.Tensor = x.mean((1, 2)).unsqueeze(1) * torch.arange(CLASSES, dtype=x.dtype)
        return made


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 2 * WIDTH),
        nn.GELU(),
        nn.LayerNorm(2 * WIDTH),
        nn.Linear(2 * WIDTH, WIDTH),
        nn.SiLU(),
        nn.Linear(WIDTH, CLASSES),
    )


def _images(draw: torch.Generator) -> torch.Tensor:
    return torch.randn(BATCH, 3, 10, 10, generator=draw)


def _rows(draw: torch.Generator) -> torch.Tensor:
    return torch.randn(BATCH, 8, generator=draw)


def _series(draw: torch.Generator) -> torch.Tensor:
    return torch.randn(BATCH, TOKENS, 8, generator=draw)


def _tokens(draw: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 50, (BATCH, TOKENS), generator=draw)


@dataclass(frozen=True)
class Program:
    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], torch.Tensor]
    dtype: torch.dtype = torch.float32
    is_adam: bool = True


PROGRAMS = {
    "conv BatchNorm": Program(lambda: Convolutions(nn.BatchNorm2d), _images),
    "conv GroupNorm": Program(
        lambda: Convolutions(lambda n: nn.GroupNorm(4, n)), _images, is_adam=False
    ),
    "conv InstanceNorm": Program(
        lambda: Convolutions(lambda n: nn.GroupNorm(n, n)), _images, torch.bfloat16
    ),
    "attention": Program(Transformer, _tokens),
    "attention, norm after": Program(
        lambda: Transformer(is_post_norm=True), _tokens, is_adam=False
    ),
    "attention bfloat16": Program(Transformer, _tokens, torch.bfloat16),
    "MultiheadAttention": Program(FusedAttention, _series),
    "LSTM": Program(lambda: Recurrent(nn.LSTM), _series, is_adam=False),
    "GRU": Program(lambda: Recurrent(nn.GRU), _series),
    "residual": Program(Residual, _series),
    "MLP": Program(mlp, _rows, is_adam=False),
    "MLP float16": Program(mlp, _rows, torch.float16, is_adam=False),
    "MLP bfloat16": Program(mlp, _rows, torch.bfloat16),
}


def set_attribute(path: str, name: str, value: Any) -> Fault:
    def change(model: nn.Module) -> None:
        setattr(model.get_submodule(path), name, value)

    return change


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, by: float) -> torch.Tensor:
        ctx.by = by
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.by, None


def wrong_backward(path: str, by: float) -> Fault:
    """The gradient of the module's input is wrong, its forward is right."""

    def change(model: nn.Module) -> None:
        module: Any = model.get_submodule(path)
        inner = module.forward
        module.forward = lambda x: inner(_ScaledGradient.apply(x, by))

    return change


def wrong_result(path: str, by: float) -> Fault:
    """The first tensor that the module returns is multiplied."""

    def change(model: nn.Module) -> None:
        module: Any = model.get_submodule(path)
        inner = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            made = inner(*args, **kwargs)
            return (made[0] * by, *made[1:]) if isinstance(made, tuple) else made * by

        module.forward = forward

    return change


def transposed(path: str) -> Fault:
    """A square linear layer multiplies by its weight instead of the weight's transpose."""

    def change(model: nn.Module) -> None:
        module: Any = model.get_submodule(path)
        module.forward = lambda x: F.linear(x, module.weight.t(), module.bias)

    return change


def without_bias(path: str) -> Fault:
    def change(model: nn.Module) -> None:
        module: Any = model.get_submodule(path)
        module.forward = lambda x: F.linear(x, module.weight)

    return change


def another(path: str, function: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    def change(model: nn.Module) -> None:
        module: Any = model.get_submodule(path)
        module.forward = function

    return change


#: Program, the module that is to be named, and the fault. What is computed between modules is named
#: by the module that reads it first, and the gradient that a module's backward makes by the tensor
#: that the module read: the output of the one before it.
FAULTS: list[tuple[str, str, Fault]] = [
    ("conv BatchNorm", "norm1", set_attribute("norm1", "eps", 0.05)),
    ("conv BatchNorm", "norm2", set_attribute("norm2", "eps", 0.05)),
    ("conv BatchNorm", "conv1", set_attribute("conv1", "padding_mode", "circular")),
    ("conv BatchNorm", "act", wrong_backward("conv2", 1.05)),
    ("conv BatchNorm", "head", without_bias("head")),
    ("conv GroupNorm", "norm1", set_attribute("norm1", "num_groups", 2)),
    ("conv GroupNorm", "norm2", set_attribute("norm2", "eps", 0.05)),
    ("conv GroupNorm", "act", another("act", lambda x: F.leaky_relu(x, 0.01))),
    ("conv GroupNorm", "conv2", wrong_result("conv2", 1.002)),
    ("conv GroupNorm", "act", wrong_backward("conv2", 0.99)),
    ("conv InstanceNorm", "norm1", set_attribute("norm1", "eps", 0.1)),
    ("conv InstanceNorm", "conv2", wrong_result("conv2", 1.05)),
    ("conv InstanceNorm", "act", wrong_backward("conv2", 0.9)),
    ("attention", "blocks.0.norm1", set_attribute("blocks.0.norm1", "eps", 0.05)),
    ("attention", "blocks.1.norm2", set_attribute("blocks.1.norm2", "eps", 0.05)),
    ("attention", "blocks.0.attention.out", set_attribute("blocks.0.attention", "scale", 1.0)),
    (
        "attention",
        "blocks.1.attention.out",
        set_attribute("blocks.1.attention", "is_causal", False),
    ),
    ("attention", "blocks.0.attention.value", transposed("blocks.0.attention.value")),
    ("attention", "blocks.1.attention.out", without_bias("blocks.1.attention.out")),
    ("attention", "blocks.0.mlp.1", another("blocks.0.mlp.1", F.silu)),
    ("attention", "blocks.1.norm2", wrong_backward("blocks.1.mlp.0", 1.01)),
    ("attention", "blocks.1", wrong_backward("norm", 1.01)),
    ("attention, norm after", "blocks.0.norm1", set_attribute("blocks.0.norm1", "eps", 0.05)),
    ("attention, norm after", "blocks.0.attention.key", transposed("blocks.0.attention.key")),
    ("attention, norm after", "blocks.1.mlp.2", wrong_result("blocks.1.mlp.2", 1.01)),
    ("attention bfloat16", "blocks.0.norm1", set_attribute("blocks.0.norm1", "eps", 0.1)),
    ("attention bfloat16", "blocks.1.attention.out", wrong_result("blocks.1.attention.out", 1.1)),
    ("attention bfloat16", "blocks.1.norm2", wrong_backward("blocks.1.mlp.0", 1.1)),
    ("MultiheadAttention", "norm", set_attribute("norm", "eps", 0.05)),
    ("MultiheadAttention", "attention", wrong_result("attention", 1.01)),
    ("MultiheadAttention", "input", without_bias("input")),
    ("LSTM", "rnn", wrong_result("rnn", 1.01)),
    ("LSTM", "input", wrong_result("input", 1.001)),
    ("GRU", "rnn", wrong_result("rnn", 0.99)),
    ("GRU", "head", wrong_backward("head", 1.01)),
    ("residual", "norm", set_attribute("norm", "eps", 0.05)),
    ("MLP", "2", set_attribute("2", "eps", 0.05)),
    ("MLP", "2", wrong_backward("3", 1.01)),
    ("MLP float16", "1", another("1", F.silu)),
    ("MLP bfloat16", "2", set_attribute("2", "eps", 0.2)),
]
