"""The launches that fastcheck adds to a step, counted on the fake accelerator of the tests.

    python bench/launches.py     writes bench/results/launches.json, prints tables and missed bars

The CUDA binding and its kernels run there as on a GPU (built on first use, needs g++). A step with
fastcheck is counted beside the same step without it, after steps in which it finds out what may
wait (csrc/torch/read/waiting.h). Beside the count is a model of it, from the shapes of what
modules take and return: it has to give the same number, and then tells what GPT-2 124M needs at its
real width, where tensors above 256 KB are read one by one.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass
from math import ceil
from typing import Any, Callable

import torch
import torch.nn.functional as F
from torch import nn

import fastcheck
import harness

LAYERS = harness.size(12, 2)
SMALL_MODULES = harness.size(500, 20)  # as many outputs, and as many gradients
#: Steps before those that are counted, and those that are.
WARM_UP, COUNTED = 5, 3

#: Launches of a step, by model and level.
BARS = {
    ("GPT-2 124M", "module"): 40,
    ("GPT-2 124M", "op"): 250,
    ("1,000 small tensors", "module"): 60,
}

#: Of csrc/torch/read/waiting.h, and how many tensors a launch takes in its arguments.
WAITING_BYTES, WAITING = 256 * 1024, 32
COPIED = 64  # elements of a factor that is kept as it was before its update
SEGMENT = 1024  # records that are copied to the host at once


@dataclass(frozen=True)
class Size:
    width: int = 16
    heads: int = 2
    vocabulary: int = 32
    batch: int = 1
    tokens: int = 8
    dtype: torch.dtype = torch.float32


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.c_attn = nn.Linear(size.width, 3 * size.width)
        self.c_proj = nn.Linear(size.width, size.width)
        self.attn_dropout = nn.Dropout(0.1)
        self.resid_dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> Any:
        batch, tokens, width = x.shape
        shape = (batch, tokens, self.heads, width // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.c_attn(x).split(width, 2))
        weights = self.attn_dropout(torch.softmax(q @ k.transpose(2, 3) * 0.125, -1))
        y = (weights @ v).transpose(1, 2).reshape(batch, tokens, width)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.c_fc = nn.Linear(size.width, 4 * size.width)
        self.act = nn.GELU()
        self.c_proj = nn.Linear(4 * size.width, size.width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(size.width)
        self.attn = Attention(size)
        self.ln_2 = nn.LayerNorm(size.width)
        self.mlp = MLP(size)

    def forward(self, x: torch.Tensor) -> Any:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    """The modules of GPT-2 124M, of any size."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.wte = nn.Embedding(size.vocabulary, size.width)
        self.wpe = nn.Embedding(size.tokens, size.width)
        self.drop = nn.Dropout(0.1)
        self.h = nn.ModuleList([Block(size) for _ in range(LAYERS)])
        self.ln_f = nn.LayerNorm(size.width)
        self.lm_head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight
        self.register_buffer("place", torch.arange(size.tokens))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.wte(ids) + self.wpe(self.place))
        for block in self.h:
            x = block(x)
        logits: torch.Tensor = self.lm_head(self.ln_f(x))
        return logits


class Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> Any:
        return x * self.weight


Made = tuple[nn.Module, torch.Tensor]


def gpt2(size: Size, device: str) -> Made:
    model = GPT2(size).to(device, size.dtype)
    return model, torch.zeros(size.batch, size.tokens, dtype=torch.long).to(device)


def small_tensors(size: Size, device: str) -> Made:
    model = nn.Sequential(*(Scale(size.width) for _ in range(SMALL_MODULES)))
    return model.to(device), torch.ones(size.tokens, size.width).to(device)


MODELS: dict[str, Callable[[Size, str], Made]] = {
    "GPT-2 124M": gpt2,
    "1,000 small tensors": small_tensors,
}


# ---- The count -----------------------------------------------------------------------------------


def loss_of(model: nn.Module, x: torch.Tensor) -> Any:
    out = model(x).flatten(0, -2)
    return F.cross_entropy(out, torch.zeros_like(out[:, 0]).long())


def launches_of(
    fake: Any, model: nn.Module, x: torch.Tensor, settle: Callable[[], object] = lambda: None
) -> Counter[str]:
    """The launches of a training step, by name: the median of some steps. ``settle`` is called
    before these: a site waits when the records of its trial have arrived, sooner or later.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        loss_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()

    counts = []
    for index in range(WARM_UP + COUNTED):
        with fake.recorded_launches() as names:
            step()
        fake.synchronize()
        if index == WARM_UP - 1:
            settle()
        if index >= WARM_UP:
            counts.append(Counter(name.partition(" ")[2] for name in names))
    return sorted(counts, key=lambda count: sum(count.values()))[COUNTED // 2]


def count(fake: Any, name: str, level: str) -> dict[str, Any]:
    size = Size()
    plain = launches_of(fake, *MODELS[name](size, fake.name()))
    model, x = MODELS[name](size, fake.name())
    monitor = fastcheck.install(model, level=level, log=fastcheck.Log(None, history=2))
    added = launches_of(fake, model, x, monitor.flush)
    monitor.flush()
    records = monitor.records()
    monitor.remove()
    added.subtract(plain)
    by_name = {launch: number for launch, number in sorted(added.items()) if number}
    bar, total = BARS.get((name, level)), sum(by_name.values())
    predicted = expected(name, size) if level == "module" else None
    each = sum(expected(name, size, waits=False).values()) if level == "module" else None
    return {
        "model": name,
        "level": level,
        "launches": total,
        "predicted": None if predicted is None else sum(predicted.values()),
        "terms": predicted,
        "each": each,
        "records": int((records["step"] == records["step"].max() - 1).sum()),
        "by_name": by_name,
        "bar": bar,
        "is_met": None if bar is None else total <= bar,
    }


# ---- The model of it -----------------------------------------------------------------------------


def expected(name: str, size: Size, waits: bool = True) -> dict[str, int]:
    """The launches of a step at module level, term by term, from shapes alone. ``waits``: small
    tensors do.
    """
    model, x = MODELS[name](size, "meta")
    seen: dict[int, torch.Tensor] = {id(x): x}  # kept: another one would get its number
    forward: list[torch.Tensor] = []
    backward: list[torch.Tensor] = []

    def see(tensor: torch.Tensor, among: list[torch.Tensor]) -> None:
        if not tensor.is_floating_point() or id(tensor) in seen:
            return
        seen[id(tensor)] = tensor
        among.append(tensor)
        if tensor.requires_grad:
            watch: Any = tensor.register_hook  # torch leaves it untyped
            watch(lambda gradient: see(gradient, backward))

    for module in model.modules():
        module.register_forward_pre_hook(lambda module, args: see(args[0], forward))
        module.register_forward_hook(lambda module, args, output: see(output, forward))
    loss_of(model, x).backward()
    parameters = len(list(model.parameters()))
    small = [
        [tensor for tensor in among if waits and tensor.nbytes <= WAITING_BYTES]
        for among in (forward, backward)
    ]
    factors = [module for module in model.modules() if isinstance(module, Scale)]
    buffers = len(list(model.buffers()))
    read = 2 + len(forward) + len(backward) + 2 * parameters + buffers
    copies = ceil(read / SEGMENT)
    return {
        "input and loss": 2,
        "forward, together": ceil(len(small[0]) / WAITING),
        "backward, together": ceil(len(small[1]) / WAITING),
        "one by one": len(forward) + len(backward) - len(small[0]) - len(small[1]),
        "copy of small factors": int(any(f.weight.numel() <= COPIED for f in factors)),
        "list of what the model stores": 1 + (2 * parameters > WAITING) + min(buffers, 1),
        "lists that a segment's end divides": copies - 1,
        "copies to the host": copies,
    }


SHAPES = ((1, 16), (1, 64), (1, 128), (4, 128), (8, 1024))


def at_width(batch: int, tokens: int) -> dict[str, Any]:
    """The launches of GPT-2 124M at module level, by dtype of what it computes with."""
    row: dict[str, Any] = {"batch": batch, "tokens": tokens}
    for dtype in (torch.float32, torch.bfloat16):
        size = Size(768, 12, 50257, batch, tokens, dtype)
        row[str(dtype).removeprefix("torch.")] = sum(expected("GPT-2 124M", size).values())
    return row


# ---- Tables --------------------------------------------------------------------------------------

KEYS = ("model", "level", "launches", "predicted", "each", "records", "bar")


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    from fakes import cuda_on_fake, fake_device

    fake = fake_device.load()
    cuda_on_fake.use()
    torch.set_num_threads(1)
    cases = [*((name, "module") for name in MODELS), ("GPT-2 124M", "op")]
    rows = [count(fake, name, level) for name, level in cases]
    wide = [at_width(*shape) for shape in SHAPES]
    header = ["model", "level", "launches", "from shapes", "one a tensor", "records", "bar"]
    print(harness.table(header, [[str(row[key] or "") for key in KEYS] for row in rows]))
    print("\n" + harness.table(list(wide[0]), [list(map(str, row.values())) for row in wide]))
    missed = [
        f"{row['model']}, {row['level']}: {row['launches']} > {row['bar']}"
        for row in rows
        if row["is_met"] is False
    ]
    missed += [
        f"{row['model']}: {row['launches']} launches, {row['predicted']} from shapes"
        for row in rows
        if row["predicted"] not in (None, row["launches"])
    ]
    print("\n" + ("Bars missed: " + "; ".join(missed) if missed else "All bars reached."))
    harness.write_results("launches", rows, at_width=wide, missed_bars=missed)


if __name__ == "__main__":
    main()
