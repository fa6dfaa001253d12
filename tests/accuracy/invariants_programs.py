"""Faults that raise no error and no NaN, each beside its fixed version, for invariants.py.

A program is a generator: it gives the model, with which fastcheck is installed, and then trains.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Callable, Optional

import torch
import torch.nn.functional as F
from torch import nn

Program = Callable[[bool], Iterator[Any]]
STEPS = 160


@dataclass(frozen=True)
class Fault:
    """``text``: a pattern that a warning or an event of the faulty version has."""

    name: str
    source: str
    text: str
    program: Program


FAULTS: list[Fault] = []


def fault(source: str, text: str) -> Callable[[Program], Program]:
    def add(program: Program) -> Program:
        FAULTS.append(Fault(program.__name__, source, text, program))
        return program

    return add


def mlp(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), *middle, nn.Linear(32, 10))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(32, 16)
    return x, x[:, :10].argmax(1)


def _nothing(step: int) -> None:
    pass


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    before: Callable[[int], object] = _nothing,
    between: Callable[[int], object] = _nothing,
    after: Callable[[int], object] = _nothing,
    batches: Callable[[int], tuple[torch.Tensor, torch.Tensor]] = lambda step: batch(),
    loss_of: Callable[..., torch.Tensor] = F.cross_entropy,
    scaler: Optional[Any] = None,
    clears: bool = True,
    steps: int = STEPS,
) -> None:
    """A training loop, with a place for a fault before the forward pass, between backward() and the
    update, and after the update.
    """
    for step in range(steps):
        before(step)
        x, y = batches(step)
        if clears:
            optimizer.zero_grad()
        loss = loss_of(model(x), y)
        (loss if scaler is None else scaler.scale(loss)).backward()
        between(step)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        after(step)


def sgd(model: nn.Module, rate: float = 0.05) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), rate)


def adam(model: nn.Module, rate: float = 1e-3) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), rate)


# Gradients


@fault("stackoverflow-60335387", "gradients are not cleared")
def zero_grad_missing(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    train(model, adam(model), clears=not is_faulty)


@fault("zero_grad() of another object", "gradients are not cleared")
def zero_grad_of_a_copy(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    other = copy.deepcopy(model) if is_faulty else model
    yield model
    train(model, adam(model), before=lambda step: other.zero_grad(), clears=False)


@fault("zero_grad() of the optimizer's first group alone", "gradients are not cleared")
def zero_grad_of_some(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    cleared = model[2] if is_faulty else model
    train(model, adam(model), before=lambda step: cleared.zero_grad(), clears=False)


@fault("zero_grad() between backward() and step()", "cleared between backward")
def cleared_too_early(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    optimizer = adam(model)
    train(model, optimizer, between=lambda step: optimizer.zero_grad() if is_faulty else None)


@fault("zero_grad(set_to_none=False) between backward() and step()", "gradients that are all 0")
def zeroed_too_early(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    optimizer = adam(model)
    train(model, optimizer, between=lambda s: optimizer.zero_grad(False) if is_faulty else None)


@fault("OPT.09", "clipping was given no gradient")
def clip_of_an_empty_generator(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    used = model.parameters()
    optimizer = torch.optim.Adam(used, 1e-3)

    def clip(step: int) -> None:
        nn.utils.clip_grad_norm_(used if is_faulty else model.parameters(), 1.0)

    train(model, optimizer, between=clip)


@fault("clipping after optimizer.step()", "clipped after the update")
def clip_too_late(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model

    def clip(step: int) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    train(model, adam(model), **{"after" if is_faulty else "between": clip})


@fault("clipping before scaler.unscale_()", "while they were still multiplied by the loss scale")
def clip_of_scaled(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu")

    def clip(step: int) -> None:
        if not is_faulty:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    train(model, optimizer, scaler=scaler, between=clip)


@fault("a threshold of another unit", "every update is clipped to less than a thousandth")
def clip_of_everything(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    threshold = 1e-5 if is_faulty else 1.0
    train(
        model,
        adam(model),
        between=lambda step: nn.utils.clip_grad_norm_(model.parameters(), threshold),
    )


@fault("a threshold of another unit", "clipping changes nothing")
def clip_of_nothing(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    threshold = 1e5 if is_faulty else 1.0
    train(
        model,
        adam(model),
        between=lambda step: nn.utils.clip_grad_norm_(model.parameters(), threshold),
    )


@fault("DeepSpeed#7837, OPT.06", "divided by a loss scale that the loss was not multiplied by")
def scale_not_multiplied(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu")
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        scaled = scaler.scale(loss)
        (loss if is_faulty else scaled).backward()
        scaler.step(optimizer)
        scaler.update()


@fault("espnet#3283", r"holds NaN, and the last 40 calls of backward\(\) added to it")
def nan_gradients_that_are_kept(is_faulty: bool) -> Iterator[Any]:
    """An update with NaN gradients is skipped, and in the faulty version zero_grad() with it."""
    model = mlp()
    yield model
    optimizer = adam(model)
    for step in range(STEPS):
        x, y = batch()
        loss = F.cross_entropy(model(x), y)
        if step == 40:
            loss = loss + (model[0].bias * 0).square().sum().sqrt()
        loss.backward()
        is_finite = all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        if is_finite:
            optimizer.step()
        if is_finite or not is_faulty:
            optimizer.zero_grad()


class _Overflows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * (torch.inf if gradient.abs().max() > 1e-3 else 1.0)


@fault("a scale that is never lowered", "the loss scale stays at|of the last steps were skipped")
def scale_that_is_stuck(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    backoff = 1.0 if is_faulty else 0.5
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10 if is_faulty else 2.0**2)
    scaler.set_backoff_factor(min(backoff, 0.999999))
    optimizer = sgd(model)

    def scale_again(step: int) -> None:
        if is_faulty:
            scaler.update(2.0**10)

    def loss_of(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(_Overflows.apply(output) if is_faulty else output, y)

    train(model, optimizer, scaler=scaler, loss_of=loss_of, after=scale_again)


class _LoRA(nn.Module):
    def __init__(self, is_faulty: bool) -> None:
        super().__init__()
        self.base = nn.Linear(16, 10)
        self.base.requires_grad_(False)
        self.a, self.b = nn.Linear(16, 4, bias=False), nn.Linear(4, 10, bias=False)
        nn.init.zeros_(self.b.weight)
        if is_faulty:
            nn.init.zeros_(self.a.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


@fault("ai-toolkit#1054", "gradients that are all 0: of .*b.weight")
def lora_of_two_zeros(is_faulty: bool) -> Iterator[Any]:
    model = _LoRA(is_faulty)
    yield model
    train(model, torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-2))


class _Branches(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.first, self.second = how, nn.Linear(16, 10), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        second = self.second(x)
        if self.how == "detached":
            second = second.detach()
        if self.how == "no_grad":
            with torch.no_grad():
                second = self.second(x)
        if self.how == "numpy":
            second = torch.from_numpy(second.detach().numpy())
        if self.how == "zero":
            second = second * 0
        if self.how == "left out":
            return self.first(x)
        return self.first(x) + second


def _add_branch(how: str, text: str) -> None:
    def program(is_faulty: bool) -> Iterator[Any]:
        model = _Branches(how if is_faulty else "")
        yield model
        train(model, adam(model))

    FAULTS.append(
        Fault(f"branch_{how.replace(' ', '_')}", "a branch without gradient", text, program)
    )


for _how in ("detached", "no_grad", "numpy", "left out"):
    _add_branch(_how, "no gradient: second.weight")
_add_branch("zero", "gradients that are all 0: of second.weight")


@fault("DeepSpeed#8491", "gradients that are all 0")
def gradients_replaced_by_zeros(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model

    def lose(step: int) -> None:
        if is_faulty:
            model[2].weight.grad.zero_()

    train(model, adam(model), between=lose)


@fault("MFSDP v2", "no gradient: 2.weight")
def gradient_unbound(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model

    def lose(step: int) -> None:
        if is_faulty:
            model[2].weight.grad = None

    train(model, adam(model), between=lose)


# The optimizer and the weights


@fault("accelerate#2665", "holds none of the model's parameters")
def optimizer_of_a_copy(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    held = copy.deepcopy(model) if is_faulty else model
    train(model, adam(held), before=lambda step: model.zero_grad())


@fault("DeepSpeed#8354", "no optimizer that has stepped holds")
def module_replaced(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    optimizer = adam(model)
    if is_faulty:
        model[2] = nn.Linear(32, 10)
    yield model
    train(model, optimizer, before=lambda step: model.zero_grad())


@fault("a module that is not registered is found by its optimizer alone", "no optimizer")
def head_left_out(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    train(model, adam(model[0] if is_faulty else model), before=lambda step: model.zero_grad())


@fault("pytorch-115607", "no bit of it has changed in")
def weight_stands_still(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    kept = []

    def keep(step: int) -> None:
        if step == 60:
            kept.append(model[0].weight.detach().clone())
        if kept and is_faulty:
            model[0].weight.data.copy_(kept[0])

    train(model, adam(model), after=keep)


@fault("pytorch-115607, all of them", "no bit of it has changed in")
def weights_written_back(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    kept: list[Any] = []

    def keep(step: int) -> None:
        if step == 60:
            kept.append(copy.deepcopy(model.state_dict()))
        if kept and is_faulty:
            model.load_state_dict(kept[0])

    train(model, sgd(model), after=keep)


@fault("TrainCheck's case 4 (MPS): a write to a copy", "weights that don't move")
def update_into_a_copy(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    first = model[0].weight.detach().clone()

    def lose(step: int) -> None:
        if is_faulty:
            model[0].weight.data.copy_(first)

    train(model, adam(model), after=lose)


@fault("bfloat16 weights without a master copy", "weights that don't move|kept every bit")
def updates_round_away(is_faulty: bool) -> Iterator[Any]:
    model = mlp(nn.LayerNorm(32)).to(torch.bfloat16 if is_faulty else torch.float32)
    yield model

    def batches(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = batch()
        return x.to(model[0].weight.dtype), y

    train(model, adam(model, 1e-5), batches=batches)


@fault("pytorch-forum-84911", "few of the model's weights are trained")
def only_batch_norm_is_trained(is_faulty: bool) -> Iterator[Any]:
    model = nn.Sequential(
        nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 128), nn.ReLU(),
        nn.Linear(128, 10),
    )  # fmt: skip
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not is_faulty or name.startswith("1."))
    yield model
    train(model, torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-3))


@fault("from_pretrained() without train()", "is trained in evaluation mode")
def eval_from_the_start(is_faulty: bool) -> Iterator[Any]:
    model = mlp(nn.Dropout(0.2)).train(not is_faulty)
    yield model
    train(model, adam(model))


@fault("eval() after the first validation", "is trained in evaluation mode")
def eval_left_on(is_faulty: bool) -> Iterator[Any]:
    model = mlp(nn.BatchNorm1d(32))
    yield model

    def validate(step: int) -> None:
        if step == 40:
            model.eval()
            with torch.no_grad():
                model(batch()[0])
            model.train(not is_faulty)

    train(model, adam(model), after=validate)


@fault("transformers-33844", "dropout is active in passes without gradients")
def dropout_in_evaluation(is_faulty: bool) -> Iterator[Any]:
    model = mlp(nn.Dropout(0.2))
    yield model

    def validate(step: int) -> None:
        if step % 40 == 39:
            model.train(is_faulty)
            with torch.no_grad():
                for _ in range(5):
                    model(batch()[0])
            model.train()

    train(model, adam(model), after=validate)


# Data


def _seeded(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(number))
    return x, x[:, :10].argmax(1)


@fault("stackoverflow-67180955", "each batch comes 2 times in a row")
def each_batch_twice(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    train(model, adam(model), batches=lambda step: _seeded(step // 2 if is_faulty else step))


@fault("workers that return the same", "each batch comes 4 times in a row")
def each_batch_by_each_worker(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    train(model, adam(model), batches=lambda step: _seeded(step // 4 if is_faulty else step))


@fault("an iterator that is made anew in each step", "trained on the same batch")
def always_the_first_batch(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    train(model, adam(model), batches=lambda step: _seeded(0 if is_faulty else step))


@fault("CKPT.18: a sampler that begins again", "the batches repeat every 9 observed steps")
def sampler_that_begins_again(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    train(model, adam(model), batches=lambda step: _seeded(step % 9 if is_faulty else step))


@fault("a loader that returns an empty buffer", "all its elements are 0 in 10 steps in a row")
def inputs_of_zeros(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model

    def batches(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = batch()
        return (x * 0 if is_faulty else x), y

    train(model, adam(model), batches=batches)


class _Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.embedding(ids)).flatten(0, 1)
        total = F.cross_entropy(logits, labels.flatten(), reduction="sum")
        return total / (labels != -100).sum().clamp(min=1)


def _tokens(
    change: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> Iterator[Any]:
    model = _Tokens()
    yield model
    optimizer = adam(model)
    for _ in range(STEPS):
        ids = torch.randint(0, 20, (8, 12))
        optimizer.zero_grad()
        model(*change(ids, (ids + 1) % 20)).backward()
        optimizer.step()


@fault("a chat template that masks all", "every label is -100")
def labels_all_ignored(is_faulty: bool) -> Iterator[Any]:
    return _tokens(lambda ids, y: (ids, torch.full_like(y, -100) if is_faulty else y))


@fault("a tokenizer that returns padding alone", "all its elements are 3 in 10 steps in a row")
def ids_of_padding(is_faulty: bool) -> Iterator[Any]:
    return _tokens(
        lambda ids, y: (
            torch.full_like(ids, 3) if is_faulty else ids,
            y * 0 + (3 if is_faulty else y),
        )
    )


@fault("normalisation left out from a step on", "the loss|abs max|standard deviation|rms")
def scaling_left_out(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model

    def batches(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = batch()
        return (x * 255 if is_faulty and step >= 120 else x), y

    train(model, adam(model), batches=batches)


@fault("labels of another batch", "the loss")
def labels_shifted(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model

    def batches(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = batch()
        return x, (y.roll(1) if is_faulty and step >= 200 else y)

    train(model, adam(model, 1e-2), batches=batches, steps=240)


# Precision


class _Counter(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("count", torch.zeros(4, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.net(x)


@fault("NUM.08", "it counts in bfloat16")
def counter_in_bfloat16(is_faulty: bool) -> Iterator[Any]:
    model = _Counter(torch.bfloat16 if is_faulty else torch.float32)
    yield model
    train(model, adam(model), steps=300)


class _Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 10)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        rates = torch.arange(1, 17) / 16
        angles = positions.float()[:, None] * rates
        return self.head(torch.cat([angles.sin(), angles.cos()], dim=1))


@fault("rotary positions in bfloat16", "in bfloat16, which can't represent all of them")
def positions_in_bfloat16(is_faulty: bool) -> Iterator[Any]:
    model = _Positions()
    yield model

    def batches(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.randperm(1024)
        return positions.to(torch.bfloat16) if is_faulty else positions, positions % 10

    train(model, adam(model), batches=batches)


# Settings


@fault("warm-up left out", "the learning rate was changed|lr was changed|learning rate")
def rate_times_hundred(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    optimizer = adam(model)

    def change(step: int) -> None:
        if step == 120 and is_faulty:
            optimizer.param_groups[0]["lr"] *= 100

    train(model, optimizer, before=change)


@fault("OPT.12: rates of groups overwritten at a resume", r"rate .optimizers.0..groups.1..lr. was")
def rate_of_one_group(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 1e-4}]
    optimizer = torch.optim.Adam(groups, 1e-3)

    def change(step: int) -> None:
        if step == 120 and is_faulty:
            optimizer.param_groups[1]["lr"] = 1e-3

    train(model, optimizer, before=change)


@fault("a schedule that ends at 0", "the learning rate of every parameter group has been 0")
def rate_of_zero(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    optimizer = adam(model)

    def change(step: int) -> None:
        if step == 100 and is_faulty:
            optimizer.param_groups[0]["lr"] = 0.0

    train(model, optimizer, before=change)


@fault("a rate that was never set", "the learning rate of every parameter group was 0")
def rate_of_zero_at_first(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    train(model, adam(model, 0.0 if is_faulty else 1e-3))


def _add_adam(name: str, text: str, **options: Any) -> None:
    def program(is_faulty: bool) -> Iterator[Any]:
        model = mlp()
        yield model
        train(model, torch.optim.Adam(model.parameters(), 1e-3, **(options if is_faulty else {})))

    FAULTS.append(Fault(name, "Adam's options", text, program))


_add_adam("eps_too_large", "eps", eps=0.5)
_add_adam("beta2_too_small", "beta2", betas=(0.9, 0.5))
_add_adam("decay_too_large", "weights|dead|zero|loss", weight_decay=500.0)


@fault("a rate of another optimizer", "weights are .* times as large|loss|explo|learning rate")
def rate_too_large(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    train(model, adam(model, 1.0 if is_faulty else 1e-3))


@fault("OPT: betas overwritten at a resume", "betas")
def betas_overwritten(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    optimizer = adam(model)

    def change(step: int) -> None:
        if step == 100 and is_faulty:
            optimizer.param_groups[0]["betas"] = (0.9, 0.99)

    train(model, optimizer, before=change)


# Layers


@fault("a large negative bias", "zero|dead")
def units_that_die(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model

    def change(step: int) -> None:
        if step == 90 and is_faulty:
            model[0].bias.data.fill_(-50.0)

    train(model, adam(model), before=change)


@fault("a layer of another checkpoint", "loss|abs max")
def layer_overwritten(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model

    def change(step: int) -> None:
        if step == 140 and is_faulty:
            model[0].weight.data.mul_(1000.0)

    train(model, adam(model, 1e-2), before=change)


@fault("a buffer that an in-place operator changes", "a buffer that had been constant has changed")
def constant_written(is_faulty: bool) -> Iterator[Any]:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()
            self.register_buffer("scale", torch.ones(16))
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls == 80 and is_faulty:
                self.scale.mul_(1.5)
            return self.net(x * self.scale)

    model = Scaled()
    yield model
    train(model, adam(model))


# Schedulers, ties, autocast


@fault("a scheduler that is stepped by two parts of a loop", "Lambda.* 2 times")
def scheduler_twice(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)

    def follow(step: int) -> None:
        for _ in range(1 + is_faulty):
            scheduler.step()

    train(model, optimizer, after=follow)


@fault("a scheduler that is stepped for each micro-batch", "CosineAnnealingLR 4 times")
def scheduler_of_micro_batches(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4 * STEPS)
    for number in range(STEPS):
        x, y = batch()
        (F.cross_entropy(model(x), y) / 4).backward()
        is_last = number % 4 == 3
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
        if is_last or is_faulty:
            scheduler.step()


@fault(
    "OPT.12: a resume without the scheduler's state",
    "begins at 0: its state may not have been loaded",
)
def scheduler_not_loaded(is_faulty: bool) -> Iterator[Any]:
    first = mlp()
    optimizer = adam(first)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    train(first, optimizer, after=lambda step: scheduler.step(), steps=40)
    saved = [copy.deepcopy(part.state_dict()) for part in (first, optimizer, scheduler)]
    model = mlp()
    yield model
    optimizer = adam(model)
    again = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    for part, state in zip((model, optimizer) if is_faulty else (model, optimizer, again), saved):
        part.load_state_dict(state)
    train(model, optimizer, after=lambda step: again.step(), steps=40)


@fault("a checkpoint whose moments are all 0", "its whole state is 0 .Adam: exp_avg, exp_avg_sq")
def moments_not_saved(is_faulty: bool) -> Iterator[Any]:
    first = mlp()
    optimizer = adam(first)
    train(first, optimizer, steps=40)
    saved = [copy.deepcopy(part.state_dict()) for part in (first, optimizer)]
    if is_faulty:
        for state in saved[1]["state"].values():
            state["exp_avg"].zero_()
            state["exp_avg_sq"].zero_()
    model = mlp()
    yield model
    optimizer = adam(model)
    for part, state in zip((model, optimizer), saved):
        part.load_state_dict(state)
    train(model, optimizer, steps=40)


@fault(
    "parameters of a shared encoder in two optimizers", "parameters are updated by two optimizers"
)
def held_by_two(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    first, second = adam(model[0]), adam(model if is_faulty else model[2])
    for _ in range(STEPS):
        x, y = batch()
        first.zero_grad()
        second.zero_grad()
        F.cross_entropy(model(x), y).backward()
        first.step()
        second.step()


class _Config:
    tie_word_embeddings = True


class _Tied(nn.Module):
    _tied_weights_keys = ("head.weight",)
    config = _Config()

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 16), nn.Linear(16, 20, bias=False)
        self.head.weight = self.embedding.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids))


@fault(
    "OPT.15, RL-RO.15: untied by to_empty()", "weights that should be tied are separate parameters"
)
def weights_untied(is_faulty: bool) -> Iterator[Any]:
    model = _Tied()
    if is_faulty:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    yield model

    def batches(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.randint(0, 20, (32,))
        return ids, (ids + 1) % 20

    train(model, adam(model), batches=batches)


class _Partly(nn.Module):
    def __init__(self, is_faulty: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))
        self.is_faulty, self.head = is_faulty, nn.Linear(16, 10)

    @torch.autocast("cpu", torch.bfloat16)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number == 3 and self.is_faulty:
                with torch.autocast("cpu", enabled=False):
                    x = layer(x.float()).relu()
            else:
                x = layer(x).relu()
        return self.head(x)


@fault(
    "lightning-thunder-725",
    r"1 of 6 modules of class Linear .* than bfloat16: layers.3 \(float32\)",
)
def layer_outside_of_autocast(is_faulty: bool) -> Iterator[Any]:
    model = _Partly(is_faulty)
    yield model

    def loss_of(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.float(), y)

    train(model, adam(model), loss_of=loss_of)
