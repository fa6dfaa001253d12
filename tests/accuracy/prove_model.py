"""A small decoder whose parts can be replaced, and its training step, for prove_programs.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Callable, Optional

import torch
import torch.nn.functional as F
from torch import nn

WORDS, WIDTH, HEADS, ROWS, TOKENS = 40, 16, 2, 5, 8

Batch = dict[str, torch.Tensor]
#: Takes the layer itself, [rows, tokens, width] and the mask [rows, tokens, 1] of 0 and 1.
Mixing = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]
#: Takes queries, keys, values [rows, heads, tokens, width] and the mask [rows, tokens] as bool.
Attending = Callable[..., torch.Tensor]
#: Takes logits [rows, tokens, words] and the batch.
Losing = Callable[[torch.Tensor, Batch], torch.Tensor]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    seen = real[:, None] if real.dim() == 3 else real[:, None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=causal(q) & seen)


def causal(q: torch.Tensor) -> torch.Tensor:
    return torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()


class Attention(nn.Module):
    def __init__(self, attending: Attending = attend) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attending = attending

    def forward(self, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        rows, tokens, _ = x.shape
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (t.view(rows, tokens, HEADS, -1).transpose(1, 2) for t in parts)
        y = self.attending(q, k, v, real).transpose(1, 2)
        return self.out(y.reshape(rows, tokens, WIDTH))  # type: ignore[no-any-return]  # a module's result is Any


class Block(nn.Module):
    def __init__(self, attending: Attending = attend) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(attending)
        self.ahead, self.wide = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow, self.drop = nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attention(self.norm(x), real))
        return x + self.drop(self.narrow(F.gelu(self.wide(self.ahead(x)))))  # type: ignore[no-any-return]  # a module's result is Any


class Mix(nn.Module):
    """A layer between the blocks: the place of most faults."""

    def __init__(self, mixing: Mixing, prepare: Callable[[Any], object] = lambda self: None):
        super().__init__()
        self.inside, self.mixing = nn.Linear(WIDTH, WIDTH), mixing
        prepare(self)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x + self.mixing(self, self.inside(x), mask)


class Model(nn.Module):
    def __init__(self, mix: Optional[nn.Module] = None, attending: Attending = attend) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block(attending)])
        self.mix = mix
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def positions(self, mask: torch.Tensor) -> torch.Tensor:
        return torch.arange(mask.shape[1])

    def run_block(self, block: nn.Module, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        return block(x, real)  # type: ignore[no-any-return]  # a module's result is Any

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.place(self.positions(mask))
        x = self.run_block(self.blocks[0], x, mask.bool())
        if self.mix is not None:
            x = self.mix(x, mask[..., None])
        x = self.run_block(self.blocks[1], x, mask.bool())
        return self.head(self.norm(x))  # type: ignore[no-any-return]  # a module's result is Any


class Packing(Model):
    """A model that is given positions, and the segments that attend to themselves."""

    def forward(  # type: ignore[override]  # of fewer arguments than its base's
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
        segments: torch.Tensor,
    ) -> torch.Tensor:
        x = self.embed(ids) + self.place(positions)
        seen = (segments[:, :, None] == segments[:, None]) & mask.bool()[:, None]
        x = self.blocks[0](x, seen)
        if isinstance(self.mix, Mix):
            self.mix.positions = positions
            x = self.mix(x, mask[..., None])
        return self.head(self.norm(self.blocks[1](x, seen)))  # type: ignore[no-any-return]  # a module's result is Any


def batch() -> Batch:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, WORDS, (ROWS, TOKENS), generator=generator)
    lengths = torch.tensor([8, 4, 6, 2, 7])
    mask = (torch.arange(TOKENS) < lengths[:, None]).long()
    labels = ids.masked_fill(mask == 0, -100)
    return {"ids": ids * mask, "attention_mask": mask, "labels": labels}


def loss_of(logits: torch.Tensor, given: Batch, **options: Any) -> torch.Tensor:
    wanted = given["labels"][:, 1:].flatten()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), wanted, **options)


@dataclass
class Program:
    """A step that can be proved."""

    model: nn.Module
    step: Callable[[Any], Any]
    batch: Any
    optimizer: Any = None
    relations: Any = "auto"


def trained(
    model: nn.Module,
    losing: Losing = loss_of,
    optimizer: Optional[torch.optim.Optimizer] = None,
    before: Callable[[Batch], Batch] = lambda given: given,
) -> Program:
    """The step of a language model."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(given: Batch) -> torch.Tensor:
        given = before(given)
        optimizer.zero_grad()
        loss = losing(model(given["ids"], given["attention_mask"]), given)
        loss.backward()  # type: ignore[no-untyped-call]  # torch has it untyped
        optimizer.step()
        return loss

    return Program(model, step, batch(), optimizer)


def packed(model: Packing, before: Callable[[Batch], Batch] = lambda given: given) -> Program:
    """The step of a model that is given positions and segments."""

    def step(given: Batch) -> torch.Tensor:
        given = before(given)
        names = ("ids", "attention_mask", "positions", "segments")
        return loss_of(model(*(given[name] for name in names)), given)

    given = batch()
    real = given["attention_mask"]
    extra = {"positions": torch.arange(TOKENS).expand_as(real) * real, "segments": real.clone()}
    return Program(model, step, {**given, **extra})


def accumulated(
    model: nn.Module, weights: Callable[[list[Batch]], Sequence[tuple[int, float]]]
) -> Program:
    """The step in micro-batches of two rows; ``weights``: which of them count, and how much."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(given: Batch) -> None:
        optimizer.zero_grad()
        rows = range(0, len(given["ids"]), 2)
        parts = [{name: t[i : i + 2] for name, t in given.items()} for i in rows]
        for index, weight in weights(parts):
            part = parts[index]
            logits = model(part["ids"], part["attention_mask"])
            (loss_of(logits, part, reduction="sum") * weight).backward()
        optimizer.step()

    return Program(model, step, batch(), optimizer)


def targets(part: Batch) -> int:
    """The number of targets that are not ignored."""
    return int((part["labels"][:, 1:] != -100).sum())
