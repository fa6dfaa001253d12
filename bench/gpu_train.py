"""Training steps on a GPU in bfloat16, with and without fastcheck: time and model FLOP utilisation.

    python bench/gpu_train.py [--rounds N] [--device cpu --tiny]

Writes bench/results/gpu_train.json, prints a Markdown table and the bars. Every case has a model of
its own, identically initialised and given the same batches. A round takes one step of each, in an
order that rotates, and the host waits for the GPU at its end. Losses have to be bit-identical.
``--tiny`` only shows that the bench runs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np
import torch
from torch import nn

import fastcheck
import harness
from fastcheck.backends import table as backends
from fastcheck.ring.depths import Depths
from fastcheck.ring.device import DeviceRing
from fastcheck.utils.torch.streams import streams_of

# Dense bfloat16 of the tensor cores, from the datasheets of NVIDIA's SXM modules.
PEAK_FLOPS = {"H100": 989.4e12, "H200": 989.4e12, "A100": 312e12}


@dataclass(frozen=True)
class Shape:
    """A decoder: GPT-2's, or blocks alone (``vocabulary`` 0) that are given activations."""

    name: str
    layers: int
    width: int
    heads: int
    vocabulary: int
    batch: int
    sequence: int

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence


GPT2 = Shape("GPT-2 124M", 12, 768, 12, 50304, 8, 1024)
WIDE = Shape("4 blocks, d=4096", 4, 4096, 32, 0, 2, 2048)
TINY = Shape("tiny", 2, 32, 2, 64, 2, 16)
TINY_BLOCKS = Shape("tiny blocks", 2, 32, 2, 0, 2, 16)

# The project's bars, in times a step without a tool.
BARS = {
    ("GPT-2 124M", "gradients and parameters"): 1.02,
    ("GPT-2 124M", "modules, full"): 1.15,
    ("GPT-2 124M", "modules, full, every=10"): 1.02,
    ("4 blocks, d=4096", "modules, full"): 1.05,
}


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.before = nn.LayerNorm(width)
        self.joined = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.between = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.act = nn.GELU(approximate="tanh")
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.joined(self.before(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(self.act(self.up(self.between(x))))


class Decoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width) if shape.vocabulary else None
        self.places = nn.Embedding(shape.sequence, shape.width) if shape.vocabulary else None
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, False) if shape.vocabulary else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tokens is not None and self.places is not None:
            x = self.tokens(x) + self.places.weight
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return x if self.head is None else self.head(x)


class Run:
    """One model, its optimizer, and the tool that observes it."""

    def __init__(self, shape: Shape, device: torch.device, watch: Callable[..., Any]) -> None:
        torch.manual_seed(0)
        self.shape = shape
        self.model = Decoder(shape).to(device, torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.watcher = watch(self.model, self.optimizer, device)
        self.losses: list[torch.Tensor] = []

    def step(self, batch: torch.Tensor) -> None:
        if self.shape.vocabulary:
            logits = self.model(batch[:, :-1]).flatten(0, 1).float()
            loss = nn.functional.cross_entropy(logits, batch[:, 1:].flatten())
        else:
            loss = self.model(batch).float().square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())


def nothing(model: nn.Module, optimizer: Any, device: torch.device) -> None:
    return None


def modules(**options: Any) -> Callable[..., Any]:
    def watch(model: nn.Module, optimizer: Any, device: torch.device) -> Any:
        return fastcheck.install(model, record="full", **options)

    return watch


def lists(model: nn.Module, optimizer: Any, device: torch.device) -> Any:
    """A list call for the parameters and one for the gradients, before each update."""
    streams, backend = streams_of(device), backends.backend_for(device)
    slots = torch.zeros(2 * len(list(model.parameters())), 192, dtype=torch.uint8, device=device)
    ring = (
        None if streams is None or device.type == "cpu" else DeviceRing(streams, backend, Depths(3))
    )

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        parameters = [p for p in model.parameters() if p.grad is not None]
        both = [*parameters, *(p.grad for p in parameters)]
        if ring is None:
            backend.observe_list(both, slots, 0, 3)
            return
        ring.observe_list(both, range(len(both)), 0, 0, 0)
        for segment in ring.cut()[1]:
            waiting.append(segment)
        while waiting and waiting[0].is_ready:
            ring.take(waiting.pop(0))

    waiting: list[Any] = []
    return optimizer.register_step_pre_hook(before)


CASES: dict[str, Callable[..., Any]] = {
    "nothing": nothing,
    "nothing again (A/A)": nothing,
    "gradients and parameters": lists,
    "modules, full": modules(),
    "modules, full, every=10": modules(every=10),
    "modules, full, stats_every=10": modules(stats_every=10),
}


def flops(shape: Shape, model: nn.Module) -> float:
    """Of one step: 6 for each weight and token, and attention's products over all pairs (Chowdhery
    et al., "PaLM", 2022, appendix B; what the mask leaves out is counted).
    """
    weights = sum(p.numel() for p in model.parameters())
    if shape.vocabulary:
        weights -= shape.sequence * shape.width + shape.vocabulary * shape.width
    return shape.tokens * (6.0 * weights + 12.0 * shape.layers * shape.width * shape.sequence)


def peak(device: torch.device) -> Optional[float]:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((value for key, value in PEAK_FLOPS.items() if key in name), None)


def batch_of(shape: Shape, device: torch.device, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(index)
    if shape.vocabulary:
        size = (shape.batch, shape.sequence + 1)
        return torch.randint(shape.vocabulary, size, generator=generator).to(device)
    size = (shape.batch, shape.sequence, shape.width)
    return torch.randn(size, generator=generator).to(device, torch.bfloat16)


def measure(shape: Shape, device: torch.device, rounds: int) -> list[dict[str, Any]]:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    runs = {name: Run(shape, device, watch) for name, watch in CASES.items()}
    # Ten steps each time, so that every=10 reads one of them, and stats_every=10 one whole.
    steps = 10
    seconds = {name: np.empty(rounds) for name in runs}
    for index in range(-1, rounds):
        batches = [batch_of(shape, device, steps * index + k) for k in range(steps)]
        shift = index % len(runs)
        for name in [*runs][shift:] + [*runs][:shift]:
            wait()
            start = time.perf_counter()
            for batch in batches:
                runs[name].step(batch)
            wait()
            if index >= 0:
                seconds[name][index] = (time.perf_counter() - start) / steps
    at_best = peak(device)
    work = flops(shape, runs["nothing"].model)
    wanted = [loss.item() for loss in runs["nothing"].losses]
    rows = []
    for name, run in runs.items():
        median = float(np.median(seconds[name]))
        rows.append(
            {
                "model": shape.name,
                "case": name,
                "seconds": harness.spread(seconds[name]),
                "times_nothing": harness.ratio(seconds[name], seconds["nothing"]),
                "model_flop_utilisation": None if at_best is None else work / median / at_best,
                "identical_losses": [loss.item() for loss in run.losses] == wanted,
                "bar": BARS.get((shape.name, name)),
            }
        )
        if isinstance(run.watcher, fastcheck.Monitor):
            run.watcher.remove()
    return rows


def bars_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    bars = [
        harness.bar(
            f"{row['model']}, {row['case']}: times a step without",
            row["times_nothing"]["median"],
            at_most=row["bar"],
        )
        for row in rows
        if row["bar"] is not None
    ]
    for row in rows:
        what = f"{row['model']}, {row['case']}: losses that differ"
        bars.append(harness.bar(what, float(not row["identical_losses"]), at_most=0.0))
    return bars


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda":
        problem = backends.cuda.cuda_problem()
        if problem is not None:
            raise SystemExit(f"no kernels to measure: {problem}")
        device = torch.device("cuda", torch.cuda.current_device())
    rows: list[dict[str, Any]] = []
    for shape in (TINY, TINY_BLOCKS) if arguments.tiny else (GPT2, WIDE):
        rows += measure(shape, device, arguments.rounds)
        harness.write_results("gpu_train", rows, bars=bars_of(rows))
        if device.type == "cuda":
            torch.cuda.empty_cache()
    cells = [
        [
            row["model"],
            row["case"],
            f"{1e3 * row['seconds']['median']:.2f}",
            harness.with_spread(row["times_nothing"], 3),
            "-"
            if row["model_flop_utilisation"] is None
            else f"{100 * row['model_flop_utilisation']:.1f} %",
            "yes" if row["identical_losses"] else "no",
        ]
        for row in rows
    ]
    header = ["model", "watched by", "ms a step", "times nothing", "MFU", "same losses to the bit"]
    print(harness.table(header, cells), "", sep="\n")
    harness.print_bars(bars_of(rows))


if __name__ == "__main__":
    main()
