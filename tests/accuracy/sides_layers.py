"""A language model with grouped queries, LayerNorm and a gated MLP, each computed in several ways:
further programs of compare_sides.py.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import fastcheck
from accuracy.sides_programs import Block

WIDTH, HEADS, GROUPS, VOCABULARY, TOKENS = 48, 6, 2, 53, 16


class Attention(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, own = kind, WIDTH // HEADS * GROUPS
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, own)
        self.value, self.out = nn.Linear(WIDTH, own), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, _ = x.shape
        q, k, v = (
            part(x).view(rows, tokens, -1, WIDTH // HEADS).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        y = self.attend(q, k, v)
        if self.kind != "not transposed":
            y = y.transpose(1, 2)
        made: torch.Tensor = self.out(y.reshape(rows, tokens, WIDTH))
        return made

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.kind == "grouped":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        times = HEADS // GROUPS
        if self.kind == "other groups":
            k, v = k.repeat(1, times, 1, 1), v.repeat(1, times, 1, 1)
        else:
            k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        weights = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        weights = weights.masked_fill(mask, float("-inf"))
        if self.kind == "softmax written out":
            weights = (weights - weights.amax(-1, keepdim=True)).exp()
            weights = weights / weights.sum(-1, keepdim=True)
        else:
            weights = weights.softmax(-1)
        return weights @ v


class Norm(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.bias = nn.Parameter(torch.randn(WIDTH) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind in ("torch", "eps"):
            eps = 1e-6 if self.kind == "eps" else 1e-5
            return F.layer_norm(x, (WIDTH,), self.weight, self.bias, eps)
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).pow(2).mean(-1, keepdim=True)
        if self.kind == "unbiased":
            variance = variance * WIDTH / (WIDTH - 1)
        if self.kind == "of squares":
            variance = x.pow(2).mean(-1, keepdim=True) - mean * mean
        return (x - mean) / (variance + 1e-5).sqrt() * self.weight + self.bias


class Mlp(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up, self.gate, self.down = (
            nn.Linear(WIDTH, 96),
            nn.Linear(WIDTH, 96),
            nn.Linear(96, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind in ("fused", "read in turns"):
            weight = torch.cat([self.gate.weight, self.up.weight])
            both = F.linear(x, weight, torch.cat([self.gate.bias, self.up.bias]))
            gate, up = both.chunk(2, -1)
            if self.kind == "read in turns":
                gate, up = both[..., ::2], both[..., 1::2]
        else:
            gate, up = self.gate(x), self.up(x)
        if self.kind == "swapped":
            gate, up = up, gate
        if self.kind == "formula":
            gate = gate * torch.sigmoid(gate)
        else:
            gate = F.gelu(gate) if self.kind == "GELU" else F.silu(gate)
        made: torch.Tensor = self.down(gate * up)
        return made


class Model(nn.Module):
    def __init__(self, attention: str, norm: str, mlp: str, embedding: str) -> None:
        super().__init__()
        self.kind = embedding
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(20, WIDTH)
        self.blocks = nn.ModuleList(
            Block(Norm(norm), Norm(norm), Attention(attention), Mlp(mlp)) for _ in range(2)
        )
        self.norm, self.head = Norm(norm), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1]) + (self.kind == "shifted")
        if self.kind == "one-hot":
            made = F.one_hot(x, VOCABULARY).to(self.tokens.weight.dtype) @ self.tokens.weight
        else:
            made = self.tokens(x)
        made = made + self.positions(places)
        for block in self.blocks:
            made = block(made)
        found: torch.Tensor = self.head(self.norm(made))
        return found


def _optimizer(model: nn.Module, kind: str, rate: float) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    if kind in ("SGD", "SGD, fused"):
        is_fused = True if kind == "SGD, fused" else None
        return torch.optim.SGD(parameters, 0.1, momentum=0.9, fused=is_fused)
    if kind == "Adam":
        return torch.optim.Adam(parameters, rate)
    if kind == "in another order":
        parameters = parameters[::-1]
    if kind == "one is missing":
        name = "blocks.1.mlp.down.weight"
        parameters = [value for other, value in model.named_parameters() if other != name]
    decay = 0.0 if kind == "no decay" else 0.01
    given: Any = parameters
    if kind.startswith("groups") and kind != "groups, one of all":
        decays = {"groups of one decay": (0.01, 0.01), "groups, swapped": (0.0, 0.01)}
        sides = (
            [p for p in parameters if (p.dim() > 1) == is_matrix] for is_matrix in (True, False)
        )
        given = [
            {"params": side, "weight_decay": own}
            for side, own in zip(sides, decays.get(kind, (0.01, 0.0)))
        ]
    if kind == "groups in another order":
        given = given[::-1]
    return torch.optim.AdamW(given, rate, weight_decay=decay)


def train_layers(
    log: Path,
    *,
    attention: str = "",
    norm: str = "",
    mlp: str = "",
    embedding: str = "",
    optimizer: str = "",
    clip: str = "",
    loss: str = "",
    autocast: bool = False,
    dtype: torch.dtype = torch.float32,
    rate: float = 1e-3,
    steps: int = 4,
) -> None:
    """Trains with a log."""
    fastcheck.seed_all(0)
    model: Any = Model(attention, norm, mlp, embedding).to(dtype)
    criterion, update = nn.CrossEntropyLoss(), _optimizer(model, optimizer, rate)
    schedule = torch.optim.lr_scheduler.ExponentialLR(update, 0.5)
    draw = torch.Generator().manual_seed(1)
    with fastcheck.install(model, criterion, log_dir=log):
        for _ in range(steps):
            ids = torch.randint(0, VOCABULARY, (4, TOKENS + 1), generator=draw)
            update.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                logits = model(ids[:, :-1]).flatten(0, 1).float()
                found = criterion(logits, ids[:, 1:].flatten())
            more = logits.square().mean() * (0.1 if loss == "another weight" else 0.01)
            if loss == "apart":  # backward() of each part
                found.backward(retain_graph=True)
                more.backward()
            else:
                (found + more if loss else found).backward()
            parts = [[one] for one in model.parameters()] if clip == "each" else []
            for part in parts or ([list(model.parameters())] if clip else []):
                nn.utils.clip_grad_norm_(part, 0.5, foreach=clip == "of lists")
            update.step()
            if optimizer.startswith("groups"):
                schedule.step()
