"""Faults of public reports whose losses stay finite, each beside its fixed version, for
invariants.py. A program is one as in ``invariants_programs.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from accuracy.invariants_programs import STEPS, Fault, Program, adam, batch, mlp, train

REPORTS: list[Fault] = []


def report(source: str, text: str) -> Any:
    def add(program: Program) -> Program:
        REPORTS.append(Fault(program.__name__, source, text, program))
        return program

    return add


def _mean(logits: torch.Tensor, y: torch.Tensor, total: int) -> torch.Tensor:
    return F.cross_entropy(logits, y) / 4


def _share(logits: torch.Tensor, y: torch.Tensor, total: int) -> torch.Tensor:
    return F.cross_entropy(logits, y) * int((y >= 0).sum()) / total


@report(
    "meta-pytorch/torchtune#1875, ml-explore/mlx-lm#1413",
    r"averages over 4 to 32 targets in the calls of backward\(\) for one update, in 3 updates",
)
def means_over_other_numbers_of_targets(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    optimizer = adam(model)
    loss_of = _mean if is_faulty else _share
    for _ in range(20):
        optimizer.zero_grad()
        for count in (4, 32, 8, 20):
            x, y = batch()
            y[count:] = -100
            loss_of(model(x), y, 64).backward()
        optimizer.step()


@report(
    "huggingface/accelerate: a window at the end of an epoch",
    r"calls of backward\(\) before an update is 4, and 6 before one in 2 updates",
)
def micro_batches_left_over(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    optimizer = adam(model)
    for number in range(200):
        x, y = batch()
        (F.cross_entropy(model(x), y) / 4).backward()
        of_epoch = number % 10 + 1
        if of_epoch % 4 == 0 or (of_epoch == 10 and not is_faulty):
            optimizer.step()
            optimizer.zero_grad()


@report(
    "huggingface/transformers#34053, ultralytics#21913",
    "continues at update 70 and its GradScaler begins at 65536",
)
def scaler_not_loaded(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    made = [(adam(model), torch.amp.GradScaler("cpu", growth_interval=30)) for _ in range(2)]
    (before, scaler), (optimizer, other) = made
    train(model, before, scaler=scaler, steps=70)
    yield model
    optimizer.load_state_dict(before.state_dict())
    if not is_faulty:
        other.load_state_dict(scaler.state_dict())
    train(model, optimizer, scaler=other)


@report("forums: the best weights by reference", "given the model's own tensors at .*, all 4")
def best_weights_by_reference(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    train(model, adam(model), steps=20)
    best = model.state_dict() if is_faulty else copy.deepcopy(model.state_dict())
    train(model, adam(model), steps=20)
    model.load_state_dict(best)


@report("forums: frozen weights that change", "0.weight has requires_grad=False, and its optimizer")
def frozen_with_a_gradient_of_zero(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    optimizer = adam(model)

    def freeze(step: int) -> None:
        if step == 30:
            model[0].requires_grad_(False)
        optimizer.zero_grad(set_to_none=not is_faulty)

    train(model, optimizer, before=freeze, clears=False)


class _Tied(nn.Module):
    def __init__(self, std: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 128)
        self.head = nn.Linear(128, 50, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=std)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embed(tokens))
        return logits


@report("nanoGPT: a loss that begins at 100", "guessing among the 50 classes of its cross entropy")
def head_tied_with_large_embeddings(is_faulty: bool) -> Iterator[Any]:
    model = _Tied(1.0 if is_faulty else 0.02)
    yield model
    optimizer = adam(model)
    for _ in range(20):
        x = torch.randint(50, (64,))
        optimizer.zero_grad()
        F.cross_entropy(model(x), (x * 7 + 3) % 50).backward()
        optimizer.step()


@report("forums: nn.Dropout(keep_prob)", r"makes most elements 0 .Dropout, 1 module, p=0.9")
def keep_prob_for_dropout(is_faulty: bool) -> Iterator[Any]:
    model = mlp(nn.Dropout(0.9 if is_faulty else 0.1))
    yield model
    train(model, adam(model))


@report("forums: LambdaLR returns a factor", "LambdaLR multiplies by 0.00.* the 0.001 that it was")
def rate_in_the_place_of_a_factor(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    optimizer = adam(model)
    first = 1e-3 if is_faulty else 1.0
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: first * 0.99**step)
    train(model, optimizer, after=lambda step: schedule.step())


class _Checkpoint(torch.autograd.Function):
    """Runs a layer again in backward, as its program wrote it."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, sets_state: bool, x: torch.Tensor, *_: Any) -> Any:
        ctx.layer, ctx.sets_state, ctx.x = layer, sets_state, x
        ctx.state = torch.get_rng_state()
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]  # one result
        x, now = ctx.x.detach().requires_grad_(True), torch.get_rng_state()
        if ctx.sets_state:
            torch.set_rng_state(ctx.state)
        with torch.enable_grad():
            again = ctx.layer(x)
        torch.set_rng_state(now)
        inputs = (x, *ctx.layer.parameters())
        return None, None, *torch.autograd.grad(again, inputs, gradient)


class _Recomputed(nn.Module):
    def __init__(self, sets_state: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(32, 10)
        drop = nn.Dropout(0.5)
        self.block = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), drop, nn.Linear(32, 32), drop)
        self.sets_state = sets_state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = (self.block, self.sets_state, self.first(x), *self.block.parameters())
        logits: torch.Tensor = self.last(_Checkpoint.apply(*given))
        return logits


@report(
    "openai/guided-diffusion#167, allenai/OLMo-core#828", r"block.2 .Dropout. drops other elements"
)
def dropout_recomputed(is_faulty: bool) -> Iterator[Any]:
    model = _Recomputed(sets_state=not is_faulty)
    yield model
    train(model, adam(model), steps=20)


@report("huggingface/diffusers#1864", "teacher, which .* kept 0.5 of itself")
def average_of_the_last_updates(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    teacher, decay = copy.deepcopy(model), 0.9999
    yield model

    def average(step: int) -> None:
        nonlocal decay
        warm = min(decay, (1 + step) / (10 + step))
        decay = 1 - warm if is_faulty else decay
        kept = 1 - decay if is_faulty else warm
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), model.parameters()):
                old.lerp_(new, 1 - kept)

    train(model, adam(model), after=average, steps=STEPS)


class _Reader(nn.Module):
    """Reads sequences of tokens. ``how``: what is made of what is read."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.embed = nn.Embedding(20, 8)
        self.read = nn.LSTM(8, 8, num_layers=2, batch_first=True, bidirectional=True)
        part = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=how != "seq")
        self.attend = nn.TransformerEncoder(part, 1, enable_nested_tensor=False)
        self.head = nn.Linear(32 if how in ("view", "states") else 16 if how == "last" else 8, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        if self.how in ("seq", "batch"):
            x = self.attend(x).mean(1)
        else:
            made, (states, _) = self.read(x)
            if self.how == "states":
                states = states.transpose(0, 1)
            x = made[:, -1] if self.how == "last" else states.reshape(len(tokens), -1)
        logits: torch.Tensor = self.head(x)
        return logits


def _read(how: str) -> Iterator[Any]:
    model = _Reader(how)
    used = (model.embed, model.head, model.attend if how in ("seq", "batch") else model.read)
    for part in model.children():
        part.requires_grad_(part in used)
    yield model
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), 1e-3)
    for _ in range(30):
        tokens = torch.randint(20, (12, 7))
        optimizer.zero_grad()
        F.cross_entropy(model(tokens), tokens.sum(1) % 3).backward()
        optimizer.step()


@report("forums: h_n.view(batch, -1)", r"stacked in dimension 0, .* viewed as \[12, 32\]")
def states_viewed_as_samples(is_faulty: bool) -> Iterator[Any]:
    yield from _read("view" if is_faulty else "states")


@report("yalesong/pvse#13", r"weight_hh_l1_reverse, .* backward direction has taken one step")
def last_output_of_two_directions(is_faulty: bool) -> Iterator[Any]:
    yield from _read("last" if is_faulty else "states")


@report("forums: nn.TransformerEncoder of (batch, time, features)", "samples attend to each other")
def attention_among_samples(is_faulty: bool) -> Iterator[Any]:
    yield from _read("seq" if is_faulty else "batch")


@report("forums: nn.ModuleList([layer] * n)", "holds one Linear 3 times")
def one_layer_three_times(is_faulty: bool) -> Iterator[Any]:
    layer = nn.Linear(16, 16)
    more = [layer if is_faulty else nn.Linear(16, 16) for _ in range(2)]
    model = nn.Sequential(layer, *more, nn.Linear(16, 10))
    yield model
    train(model, adam(model), steps=20)


@report(
    "pytorch#29697", "StepLR of Adam continues at step 71, and that optimizer began at update 0"
)
def optimizer_not_loaded(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    made = [adam(model) for _ in range(2)]
    rates = [torch.optim.lr_scheduler.StepLR(one, 30) for one in made]
    train(model, made[0], steps=70, after=lambda _: rates[0].step())
    yield model
    rates[1].load_state_dict(rates[0].state_dict())
    if not is_faulty:
        made[1].load_state_dict(made[0].state_dict())
    train(model, made[1], steps=20, after=lambda _: rates[1].step())
