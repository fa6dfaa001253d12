"""A small language model, each of whose parts can be computed in several ways: the programs of
compare_sides.py.
"""

from __future__ import annotations

import copy
import math
import multiprocessing
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastcheck

WIDTH, HEADS, VOCABULARY, TOKENS, ROWS = 32, 4, 61, 16, 4


class Norm(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight, self.kind = nn.Parameter(torch.ones(WIDTH)), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        eps = 1e-4 if self.kind == "eps" else 1e-6
        if self.kind == "torch":
            return F.rms_norm(x, (WIDTH,), self.weight, eps)
        if self.kind == "max":  # another norm of about the same size
            return self.weight * x / x.abs().amax(-1, keepdim=True) * 2
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        return x * scale * self.weight if self.kind == "order" else self.weight * x * scale


class Attention(nn.Module):
    def __init__(self, kind: str, rope: str) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )
        self.kind, self.rope = kind, rope

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, _ = x.shape
        if self.kind == "fused qkv":
            weights = torch.cat([self.query.weight, self.key.weight, self.value.weight])
            q, k, v = F.linear(x, weights).chunk(3, -1)
        else:
            q, k, v = self.query(x), self.key(x), self.value(x)
        if self.kind == "key and value":
            k, v = v, k
        q, k, v = (
            part.view(rows, tokens, HEADS, WIDTH // HEADS).transpose(1, 2) for part in (q, k, v)
        )
        q, k = rotated(q, self.rope), rotated(k, self.rope)
        y = self.attend(q, k, v)
        if self.kind == "heads":  # two heads stand in each other's place
            y = y[:, [1, 0, 2, 3]]
        if self.kind == "tokens":
            y = torch.cat([y[:, :, 1:2], y[:, :, :1], y[:, :, 2:]], 2)
        made: torch.Tensor = self.out(y.transpose(1, 2).reshape(rows, tokens, WIDTH))
        return made

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.kind in ("sdpa", "fused qkv"):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.kind == "not causal":
            return F.scaled_dot_product_attention(q, k, v)
        scale = math.sqrt(WIDTH if self.kind == "scale" else q.shape[-1])
        if self.kind == "einsum":
            weights = torch.einsum("bhqd,bhkd->bhqk", q / scale, k)
        else:
            weights = q @ k.transpose(-1, -2) / scale
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
        if self.kind == "window":  # the first token isn't seen by the last
            mask[-1, 0] = False
        return weights.masked_fill(~mask, float("-inf")).softmax(-1) @ v


def rotated(x: torch.Tensor, kind: str) -> torch.Tensor:
    half = x.shape[-1] // 2
    steps = torch.arange(half, dtype=x.dtype)
    frequencies = 1.0 / 10000 ** (steps / half)
    positions = torch.arange(x.shape[2], dtype=x.dtype) + 300
    if kind == "bfloat16 positions":
        positions = positions.bfloat16().to(x.dtype)
    if kind == "shift":
        positions = torch.cat([positions[:1], positions[:-1]])
    if kind == "base":
        frequencies = 1.0 / 10001 ** (steps / half)
    angles = positions[:, None] * frequencies
    if kind == "interleaved":
        left, right = x[..., ::2], x[..., 1::2]
        turned = [left * angles.cos() - right * angles.sin()]
        turned.append(right * angles.cos() + left * angles.sin())
        return torch.stack(turned, -1).flatten(-2)
    if kind == "complex":
        numbers = torch.view_as_complex(torch.stack([x[..., :half], x[..., half:]], -1))
        numbers = numbers * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([numbers.real, numbers.imag], -1)
    left, right = x[..., :half], x[..., half:]
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat([left * cosine - right * sine, right * cosine + left * sine], -1)


class Mlp(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up, self.down, self.kind = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        if self.kind == "formula":
            x = 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
        else:
            x = F.gelu(x, approximate="tanh" if self.kind == "tanh" else "none")
        if self.kind == "addmm":
            flat = torch.addmm(self.down.bias, x.flatten(0, 1), self.down.weight.t())
            return flat.view(*x.shape[:2], -1)
        if self.kind == "no bias":
            return F.linear(x, self.down.weight)
        made: torch.Tensor = self.down(x)
        return made


class Block(nn.Module):
    def __init__(
        self, norm1: nn.Module, norm2: nn.Module, attention: nn.Module, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention, self.mlp = norm1, norm2, attention, mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        made: torch.Tensor = x + self.mlp(self.norm2(x))
        return made


class Model(nn.Module):
    def __init__(self, norm: str, attention: str, rope: str, mlp: str, recompute: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            Block(Norm(norm), Norm(norm), Attention(attention, rope), Mlp(mlp)) for _ in range(2)
        )
        self.norm, self.head = Norm(norm), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.dropout, self.recompute = nn.Dropout(0.0), recompute
        self.temperature = 1
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.embedding(x))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        made: torch.Tensor = self.head(self.norm(x))
        return made if self.temperature == 1 else made / self.temperature


class Loss(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits, labels = logits.flatten(0, 1), labels.flatten()
        if self.kind == "chunks":
            parts = zip(logits.chunk(3), labels.chunk(3))
            total = sum(F.cross_entropy(x, y, reduction="sum") for x, y in parts)
            return torch.as_tensor(total) / len(labels)
        if self.kind == "mean of means":  # of chunks of different sizes
            parts = zip(logits.tensor_split([15, 30]), labels.tensor_split([15, 30]))
            return torch.stack([F.cross_entropy(x, y) for x, y in parts]).mean()
        if self.kind == "log_softmax":
            return F.nll_loss(logits.log_softmax(-1), labels)
        if self.kind == "smoothing":
            return F.cross_entropy(logits, labels, label_smoothing=1e-3)
        return F.cross_entropy(logits, labels)


def optimizer_of(model: nn.Module, kind: str, rate: float) -> Any:
    lists = {"fused": None, "foreach": True}.get(kind, False)
    is_fused = True if kind == "fused" else None
    made: Any = torch.optim.AdamW(model.parameters(), rate, foreach=lists, fused=is_fused)
    if kind == "SGD":
        made = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
    weight = model.get_parameter("blocks.1.attention.value.weight")
    update = made.step

    def step() -> None:
        old = weight.detach().clone()
        assert weight.grad is not None
        if kind == "transposed gradient":
            weight.grad = weight.grad.t().contiguous()
        if kind == "rows of the gradient":
            weight.grad = weight.grad[[1, 0, *range(2, WIDTH)]]
        update()
        with torch.no_grad():
            if kind == "frozen":
                weight.copy_(old)
            if kind == "wrong way":
                weight.copy_(2 * old - weight)
            if kind == "twice":
                weight.copy_(2 * weight - old)
            if kind == "half":
                weight.copy_((weight + old) / 2)
            if kind == "one element":
                weight[0, 0] += 1e-4

    made.step = step
    return made


def train(
    log: Path,
    *,
    norm: str = "",
    attention: str = "",
    rope: str = "",
    mlp: str = "",
    loss: str = "",
    optimizer: str = "loop",
    rate: float = 1e-3,
    recompute: bool = False,
    dtype: torch.dtype = torch.float32,
    batch: str = "",
    temperature: str = "",
    steps: int = 4,
) -> None:
    """Trains with a log. ``temperature``: of 2, "within" the model or "behind" it;
    ``optimizer="put back"``: the weights of the first step are loaded before the last.
    """
    fastcheck.seed_all(0)
    model = Model(norm, attention, rope, mlp, recompute).to(dtype)
    criterion, update = Loss(loss), optimizer_of(model, optimizer, rate)
    draw = torch.Generator().manual_seed(1)
    model.temperature = 2 if temperature == "within" else 1
    kept = copy.deepcopy(model.state_dict())
    with fastcheck.install(model, criterion, log_dir=log):
        for step in range(steps):
            if optimizer == "put back" and step == steps - 1:
                model.load_state_dict(kept)
            ids = torch.randint(0, VOCABULARY, (ROWS, TOKENS + 1), generator=draw)
            x, labels = ids[:, :-1], ids[:, 1:]
            if batch == "labels":  # two labels stand in each other's place
                labels = torch.cat([labels[:, 1:2], labels[:, :1], labels[:, 2:]], 1)
            if batch == "rows":
                x, labels = x.flip(0), labels.flip(0)
            update.zero_grad()
            logits = model(x)
            if temperature == "behind":
                logits = logits / 2
            criterion(logits, labels).backward()
            update.step()


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.norm, self.head = nn.GroupNorm(4, 8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.norm(self.first(x)).relu()).relu()
        made: torch.Tensor = self.head(x.mean((2, 3)))
        return made


def train_images(log: Path, *, layout: str = "", fault: str = "", steps: int = 3) -> None:
    fastcheck.seed_all(0)
    model: Any = Convolutions()
    criterion = nn.CrossEntropyLoss()
    update = torch.optim.SGD(model.parameters(), 0.1)
    draw = torch.Generator().manual_seed(1)
    format_ = torch.channels_last if layout == "channels_last" else torch.contiguous_format
    model = model.to(memory_format=format_)
    with fastcheck.install(model, criterion, log_dir=log):
        for _ in range(steps):
            x = torch.randn(4, 3, 10, 10, generator=draw)
            labels = torch.randint(0, 5, (4,), generator=draw)
            if fault == "transposed":
                x = x.transpose(2, 3).contiguous()
            if fault == "channels":
                x = x.flip(1).contiguous()
            if fault == "read as another layout":
                x = x.permute(0, 2, 3, 1).contiguous().view(x.shape)
            if fault == "rows":
                x = x.flip(0)
            if fault == "range":
                x = x * 2 - 1
            update.zero_grad()
            criterion(model(x.to(memory_format=format_)), labels).backward()
            update.step()


class Normed(nn.Module):
    """Dropout, and statistics of the batches before in buffers; two weights of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(12, 12), nn.BatchNorm1d(12)
        self.second, self.dropout = nn.Linear(12, 12), nn.Dropout(0.2)
        self.head = nn.Linear(12, 5)
        self.register_buffer("scale", torch.tensor([1.0, 2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.norm(self.first(x)).relu())
        made: torch.Tensor = self.head(self.second(x).relu())
        return made


class Trainer:
    """A model, its optimizer and schedule, as a checkpoint has to hold them."""

    def __init__(self, optimizer: str) -> None:
        fastcheck.seed_all(0)
        self.model, self.criterion = Normed(), nn.CrossEntropyLoss()
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), 1e-2)
        if optimizer == "SGD":
            self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        self.schedule: Any = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10)
        draw = torch.Generator().manual_seed(1)
        self.batches = [
            (torch.randn(8, 12, generator=draw), torch.randint(0, 5, (8,), generator=draw))
            for _ in range(8)
        ]

    def run(self, start: int, end: int, shift: int = 0) -> None:
        for step in range(start, end):
            x, labels = self.batches[(step + shift) % len(self.batches)]
            self.optimizer.zero_grad()
            self.criterion(self.model(x), labels).backward()
            self.optimizer.step()
            self.schedule.step()

    def save(self) -> dict[str, Any]:
        return copy.deepcopy(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "schedule": self.schedule.state_dict(),
                "rng": torch.get_rng_state(),
            }
        )


def train_resumed(log: Path, *, fault: str = "", optimizer: str = "", begin: int = 3) -> None:
    """The steps from ``begin`` to 7, of a run that was saved there and loaded; "whole": that was
    not interrupted.
    """
    trainer = Trainer(optimizer)
    if fault == "whole":
        with fastcheck.install(trainer.model, trainer.criterion, log_dir=log):
            trainer.run(0, 7)
        return
    trainer.run(0, begin)
    saved = trainer.save()
    trainer = Trainer(optimizer)
    _load(trainer, saved, fault, optimizer)
    with fastcheck.install(trainer.model, trainer.criterion, log_dir=log):
        shift = {"batches from the beginning": -begin, "a batch left out": 1, "a batch twice": -1}
        trainer.run(begin, 7, shift.get(fault, 0))


def _load(trainer: Trainer, saved: dict[str, Any], fault: str, optimizer: str) -> None:
    fresh = trainer.save()
    weights = saved["model"]
    if fault == "weights":
        weights = {**fresh["model"], "scale": weights["scale"]}
    if fault == "one weight":
        weights["head.weight"] = fresh["model"]["head.weight"]
    if fault == "two weights swapped":
        one, other = weights["first.weight"], weights["second.weight"]
        weights["first.weight"], weights["second.weight"] = other, one
    if fault == "bfloat16":
        weights["head.weight"] = weights["head.weight"].bfloat16().float()
    if fault == "buffers":
        weights["norm.running_mean"] = fresh["model"]["norm.running_mean"]
    if fault == "constant buffer":
        weights["scale"] = weights["scale"] * 2
    trainer.model.load_state_dict(weights)
    state = saved["optimizer"]["state"]
    if fault == "moments of two parameters swapped":
        state[0], state[4] = state[4], state[0]
    if fault == "steps of Adam":
        for values in state.values():
            values["step"].zero_()
    if fault == "second moments":
        for values in state.values():
            values["exp_avg_sq"].zero_()
    if fault == "moments of one parameter":
        del state[6]
    rate = saved["optimizer"]["param_groups"][0]["lr"]
    if fault != "moments":
        trainer.optimizer.load_state_dict(saved["optimizer"])
    if fault != "schedule":
        trainer.schedule.load_state_dict(saved["schedule"])
    for group in trainer.optimizer.param_groups:
        group["lr"] = 1e-2 if fault == "learning rate" else rate
        if fault == "weight decay":
            group["weight_decay"] = 0.0
    if fault != "random numbers":
        torch.set_rng_state(saved["rng"])


def train_split(
    log: Path, *, parts: int = 1, fault: str = "", clip: float = 0.0, optimizer: str = ""
) -> None:
    """Each batch in some parts, whose gradients are added up. Some labels are ignored."""
    fastcheck.seed_all(0)
    model = Model("", "", "", "", False)
    criterion = nn.CrossEntropyLoss(ignore_index=-100, reduction="sum")
    update = optimizer_of(model, optimizer, 1e-3)
    draw = torch.Generator().manual_seed(1)
    with fastcheck.install(model, criterion, log_dir=log):
        for step in range(4):
            ids = torch.randint(0, VOCABULARY, (8, TOKENS + 1), generator=draw)
            labels = ids[:, 1:].clone()
            labels[torch.rand(labels.shape, generator=draw) < 0.3] = -100
            count = int((labels != -100).sum())
            update.zero_grad()
            for number, (x, y) in enumerate(zip(ids[:, :-1].chunk(parts), labels.chunk(parts))):
                if fault == "another batch" and step == 2 and number == 0:
                    x = (x + 1) % VOCABULARY
                if fault == "labels of another part" and number == 0:
                    y = labels.chunk(parts)[-1]
                own = int((y != -100).sum()) * parts
                divisor = {"mean of means": own, "not divided": count / parts}.get(fault, count)
                loss = criterion(model(x).flatten(0, 1), y.flatten()) / divisor
                if not (fault == "the last part is lost" and number == parts - 1):
                    loss.backward()
                if fault == "the sum is lost" and number < parts - 1:
                    update.zero_grad()
                if fault == "clipped by part":
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
            if clip and fault != "clipped by part":
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            update.step()


def _rank(rank: int, world: int, log: str, fault: str, port: int) -> None:
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    fastcheck.seed_all(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 5))
    criterion = nn.CrossEntropyLoss()
    update = torch.optim.AdamW(model.parameters(), 1e-2)
    if rank and fault == "learning rate of rank 1":
        update.param_groups[0]["lr"] = 2e-2
    draw = torch.Generator().manual_seed(1)
    with fastcheck.install(model, criterion, log_dir=log):
        for step in range(4):
            if rank and step == 2 and fault == "another weight on rank 1":
                with torch.no_grad():
                    model.get_parameter("2.weight").mul_(0.9)
            part = 0 if fault == "the batch of rank 0" else rank
            x = torch.randn(8, 12, generator=draw).chunk(world)[part]
            labels = torch.randint(0, 5, (8,), generator=draw).chunk(world)[part]
            update.zero_grad()
            criterion(model(x), labels).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                if fault == "one gradient is not reduced" and parameter.shape == (5, 16):
                    continue
                dist.all_reduce(parameter.grad)
                if fault != "not averaged":
                    parameter.grad /= world
            update.step()
    dist.destroy_process_group()


def train_ranks(log: Path, *, ranks: int = 1, fault: str = "") -> None:
    """Data parallel by hand."""
    start_ranks(_rank, ranks, str(log), fault)


def start_ranks(train: Callable[..., None], ranks: int, *given: Any) -> None:
    """``train(rank, ranks, *given, port)`` in each rank, to their ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # A server that has imported torch forks each rank: quicker than a new interpreter.
    multiprocessing.get_context("forkserver").set_forkserver_preload(["fastcheck", "torch._dynamo"])
    processes: Any = torch.multiprocessing
    given = (ranks, *given, port)
    processes.start_processes(train, given, nprocs=ranks, start_method="forkserver")
