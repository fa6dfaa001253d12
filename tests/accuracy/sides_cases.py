"""The cases of OpGuard's tables (OSDI '26) that CPUs can show, as a small model with a fault each,
by the numbers there: programs of compare_sides.py. Races, streams, collectives' topology and
hardware are left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastcheck

WIDTH, HEADS, WORDS, TOKENS, ROWS = 32, 4, 40, 12, 4

#: By number: the fault, what the report has to say, and whether bits are asked for: equal numbers
#: but for rounding.
CASES: dict[int, tuple[str, str, bool]] = {
    3: (
        "a transpose is missing where it is recomputed",
        "computed first: attention.out · forward · input[0] at step 0 of actual",
        False,
    ),
    5: ("another implementation of the rotation", "rope · forward · output", True),
    6: ("another place of a cast to bfloat16", "norm · forward · output", True),
    7: ("another implementation of AdamW", "update NO", True),
    8: ("validation overwrites weights", "update NO", False),
    11: (
        "another micro-batch is recomputed",
        "computed first: attention.qkv · forward · output[0] at step 0 of actual",
        False,
    ),
    14: ("other bins of a histogram", "histogram · forward · output", False),
    15: ("the row of padding is not zero", "initial weights NO", False),
    19: ("a kernel takes its input for contiguous", "attention.qkv · forward · output", False),
    20: ("the steps of Adam are 0 after a resume", "update NO", False),
    23: ("padding behind the vocabulary is in the loss", "head", False),
    24: ("another order of a sum in backward", "gradients NO", True),
    26: ("another offset into a workspace", "attention.qkv · forward · output", False),
    27: ("another order of rounding in a grid", "grid · forward · output", True),
    28: ("a cached offset of positions is not reset", "step 1: rope · forward · output", False),
    29: ("positions in another order", "rope · forward · output", False),
    30: ("an extra step of the optimizer", "update NO", False),
}


def is_recomputed() -> bool:
    return torch._C._current_graph_task_id() != -1


class Grid(nn.Module):
    """The coordinates of patches."""

    def __init__(self, fault: int) -> None:
        super().__init__()
        self.fault = fault

    def forward(self, size: torch.Tensor) -> torch.Tensor:
        places = torch.arange(TOKENS)
        return places * (size / TOKENS) if self.fault == 27 else places * size / TOKENS


class Rope(nn.Module):
    def __init__(self, fault: int) -> None:
        super().__init__()
        self.fault = fault
        self.offset: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, places: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        if self.offset is None or self.fault != 28:
            self.offset = offset
        if self.fault == 29:
            places = places.flip(0)
        half = x.shape[-1] // 2
        angles = (places + self.offset)[:, None] * 100.0 ** (-torch.arange(half) / half)
        first, last = x.chunk(2, -1)
        if abs(self.fault) == 5:
            turned = torch.complex(first, last) * torch.polar(torch.ones_like(angles), angles)
            return torch.cat([turned.real, turned.imag], -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - last * sin, last * cos + first * sin], -1)


class Norm(nn.Module):
    def __init__(self, fault: int) -> None:
        super().__init__()
        self.fault, self.weight = fault, nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        if self.fault == 6:
            return (x * self.weight).bfloat16().float()
        return (x.bfloat16() * self.weight.bfloat16()).float()


class Projections(nn.Linear):
    """q, k and v, by a kernel of one's own."""

    fault = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fault == 19:
            x = x.as_strided(x.shape, torch.empty(x.shape).stride())
        made = super().forward(x)
        if self.fault == 26:
            space = torch.cat([made.flatten(), torch.zeros(8)])
            made = space[8:].view(made.shape)
        return made


class Attention(nn.Module):
    def __init__(self, fault: int) -> None:
        super().__init__()
        self.qkv, self.out, self.fault = (
            Projections(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            fault,
        )
        self.qkv.fault = fault
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fault == 11 and is_recomputed() and self.last is not None:
            x = x + (self.last - x).detach()
        self.last = x.detach()
        # Time first, as a view.
        q, k, v = self.qkv(x.transpose(0, 1)).transpose(0, 1).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if not (self.fault == 3 and is_recomputed()):
            y = y.transpose(1, 2)
        made: torch.Tensor = self.out(y.reshape(x.shape))
        return made


class Histogram(nn.Module):
    """How many tokens each expert gets."""

    def __init__(self, fault: int) -> None:
        super().__init__()
        self.fault = fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.histc(x.float(), 4, 0, WORDS if self.fault != 14 else WORDS - 4) / x.numel()


class Experts(nn.Module):
    def __init__(self, fault: int) -> None:
        super().__init__()
        self.scales, self.fault = nn.Parameter(torch.rand(5, WIDTH)), fault

    def forward(self, x: torch.Tensor, load: torch.Tensor) -> torch.Tensor:
        if self.fault == 24:  # the gradient of x is added up at once, not one after another
            parts = list((x.expand(5, *x.shape) * self.scales[:, None, None]).unbind())
        else:
            parts = [x * scale for scale in self.scales]
        return torch.stack(parts).tanh().sum(0) * (1 + load.square().sum())


class Model(nn.Module):
    def __init__(self, fault: int) -> None:
        super().__init__()
        self.fault, self.embedding = fault, nn.Embedding(WORDS, WIDTH)
        self.grid, self.rope, self.norm = Grid(fault), Rope(fault), Norm(fault)
        self.attention, self.histogram = Attention(fault), Histogram(fault)
        self.experts = Experts(fault)
        self.head = nn.Linear(WIDTH, WORDS + 4 * (fault == 23), bias=False)
        if fault != 15:
            nn.init.zeros_(self.embedding.weight[0])

    def forward(self, x: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        y = self.rope(self.embedding(x), self.grid(torch.tensor(7.3)), offset)
        y = self.norm(y)
        if self.fault in (3, 11, -5):
            y = y + checkpoint(self.attention, y, use_reentrant=True)
        else:
            y = y + self.attention(y)
        made: torch.Tensor = self.head(self.experts(y, self.histogram(x)))
        return made


def train_case(log: Path, *, fault: int = 0, steps: int = 4) -> None:
    """Trains with a log; two micro-batches a step. -5: the fault 5, and attention is recomputed."""
    fastcheck.seed_all(0)
    model: Any = Model(fault)
    criterion = nn.CrossEntropyLoss()
    update = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.0, fused=fault == 7)
    if fault == 30:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        update.step()
    draw = torch.Generator().manual_seed(1)
    mean = [parameter.detach().clone() for parameter in model.parameters()]
    with fastcheck.install(model, criterion, log_dir=log):
        for step in range(steps):
            ids = torch.randint(0, WORDS, (2 * ROWS, TOKENS + 1), generator=draw)
            update.zero_grad()
            losses = [
                criterion(model(part[:, :-1], torch.tensor(float(step))).flatten(0, 1), labels)
                for part in ids.chunk(2)
                for labels in [part[:, 1:].flatten()]
            ]
            (sum(losses) / 2).backward()
            update.step()
            if fault == 8 and step == 1:  # what is to be restored is no copy
                kept = [parameter.data for parameter in model.parameters()]
                with torch.no_grad():
                    for parameter, value in zip(model.parameters(), mean):
                        parameter.copy_(0.99 * value + 0.01 * parameter)
                    for parameter, value in zip(model.parameters(), kept):
                        parameter.copy_(value)
