"""Faults of public threads that were written down before it was known whether they are seen, each
beside its fixed version, for invariants.py.

Two more, of ranks (build-nanogpt#30, sd-scripts#924), are in ``invariants.RANK_FAULTS``. A program
is one as in ``invariants_programs.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from accuracy.invariants_programs import STEPS, Fault, Program, adam, batch, mlp, train

THREADS: list[Fault] = []


def thread(source: str, text: str) -> Any:
    def add(program: Program) -> Program:
        THREADS.append(Fault(program.__name__, source, text, program))
        return program

    return add


@thread("yandex-research/tabm#20", "gradients were clipped before backward")
def clip_before_backward(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    optimizer = adam(model)
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if is_faulty:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        loss.backward()
        if not is_faulty:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@thread("bytetriper/RAE#67, open-instruct#1498", "3 of 4 calls of backward.. were cleared")
def cleared_for_each_micro_batch(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    optimizer = adam(model)
    for number in range(4 * STEPS):
        x, y = batch()
        if is_faulty or number % 4 == 0:
            optimizer.zero_grad()
        (F.cross_entropy(model(x), y) / 4).backward()
        if number % 4 == 3:
            optimizer.step()


@thread("fartashf/vsepp#4", "is trained in evaluation mode")
def eval_until_the_epoch_ends(is_faulty: bool) -> Iterator[Any]:
    """Validation after each 50 steps of an epoch of 150, and train() at its beginning alone."""
    model = mlp(nn.Dropout(0.2))
    yield model

    def validate(step: int) -> None:
        if step % 50 == 49:
            model.eval()
            with torch.no_grad():
                model(batch()[0])
            model.train(not is_faulty or step % 150 == 149)

    train(model, adam(model), after=validate)


class _Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.crf, self.fc = mlp(), nn.Linear(10, 10), nn.Linear(10, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.crf(self.body(x)).relu())


@thread("zjunlp/HVPNeT#5", "no optimizer|never moved|have not moved")
def groups_that_were_not_appended(is_faulty: bool) -> Iterator[Any]:
    model = _Heads()
    yield model
    groups: list[dict[str, Any]] = [{"params": model.body.parameters(), "lr": 1e-3}]
    rest = {"params": [*model.crf.parameters(), *model.fc.parameters()], "lr": 5e-2}
    if not is_faulty:
        groups.append(rest)
    train(model, torch.optim.AdamW(groups))


@thread("DALLE-pytorch#230", "the batches repeat every 20 observed steps")
def set_epoch_left_out(is_faulty: bool) -> Iterator[Any]:
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    model = mlp()
    yield model
    optimizer, x = adam(model), torch.randn(640, 16)
    data = TensorDataset(x, x[:, :10].argmax(1))
    sampler = DistributedSampler(data, num_replicas=1, rank=0)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    for epoch in range(16):
        if not is_faulty:
            sampler.set_epoch(epoch)
        for rows, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(rows), labels).backward()
            optimizer.step()


@thread("pytorch#41329", "the batches repeat every 30 observed steps")
def workers_seeded_alike_in_each_epoch(is_faulty: bool) -> Iterator[Any]:
    import numpy as np

    model = mlp()
    yield model
    optimizer = adam(model)
    for epoch in range(12):
        random = np.random.default_rng(0 if is_faulty else epoch)
        for _ in range(30):
            x = torch.from_numpy(random.standard_normal((32, 16), np.float32))
            optimizer.zero_grad()
            F.cross_entropy(model(x), x[:, :10].argmax(1)).backward()
            optimizer.step()


@thread("vllm-project/speculators#765", "1.weight.*(never|not) moved|never moved.*1.weight|spacing")
def norms_of_ones_in_bfloat16(is_faulty: bool) -> Iterator[Any]:
    dtype = torch.bfloat16 if is_faulty else torch.float32
    model = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 10))
    model.to(dtype)
    yield model

    def batches(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = batch()
        return x.to(dtype), y

    train(model, torch.optim.AdamW(model.parameters(), 1e-3), batches=batches)


@thread("CodefyUI#147", "began without a state for the third time")
def optimizer_made_in_each_epoch(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    optimizer = adam(model)
    for _ in range(8):
        if is_faulty:
            optimizer = adam(model)
        train(model, optimizer, steps=20)


@thread("yolov5#292, Automodel#763", "learning rate .*was changed from|begins at 0")
def rate_at_its_start_after_a_resume(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    optimizer = adam(model, 1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    train(model, optimizer, after=lambda step: scheduler.step(), steps=80)
    state, position = optimizer.state_dict(), scheduler.state_dict()
    optimizer = adam(model, 1e-2)
    optimizer.load_state_dict(state)
    again = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    if is_faulty:
        optimizer.param_groups[0]["lr"] = 1e-2
    else:
        again.load_state_dict(position)
    train(model, optimizer, after=lambda step: again.step(), steps=80)


@thread("paiml/aprender#2112", "clip")
def clip_by_hand_that_is_not_applied(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model

    def clip(step: int) -> None:
        gradients = [parameter.grad for parameter in model.parameters()]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            scaled = gradient * (0.1 / norm).clamp(max=1.0)
            if not is_faulty:
                gradient.copy_(scaled)

    train(model, adam(model), between=clip)


class _Classifier(nn.Module):
    def __init__(self, is_faulty: bool) -> None:
        super().__init__()
        self.net, self.is_faulty, self.criterion = mlp(), is_faulty, nn.CrossEntropyLoss()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        output = self.net(x)
        return self.criterion(output.softmax(-1) if self.is_faulty else output, y)


@thread("personal-wiki.pages.dev: PyTorch debugging", "is given the result of softmax")
def softmax_before_cross_entropy(is_faulty: bool) -> Iterator[Any]:
    model = _Classifier(is_faulty)
    yield model
    optimizer = adam(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(*batch()).backward()
        optimizer.step()


@thread("discuss.pytorch.org: a loss without a graph", "no gradient")
def loss_made_of_a_number(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model

    def loss_of(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(output, y)
        return torch.tensor(loss.item(), requires_grad=True) if is_faulty else loss

    train(model, adam(model), loss_of=loss_of)


@thread(
    "princeton-vl/pytorch_stacked_hourglass#44",
    "batch norm updates its statistics in passes without gradients",
)
def statistics_of_the_validation_set(is_faulty: bool) -> Iterator[Any]:
    model = mlp(nn.BatchNorm1d(32))
    yield model

    def validate(step: int) -> None:
        if step % 40 == 39:
            model.train(is_faulty)
            with torch.no_grad():
                for _ in range(5):
                    model(batch()[0])
            model.train()

    train(model, adam(model), after=validate)


@thread("poppinace/indexnet_matting#35", "frozen layers are in training mode")
def frozen_norms_that_count_on(is_faulty: bool) -> Iterator[Any]:
    """train() at each epoch undoes eval() of the frozen layers."""
    model = mlp(nn.BatchNorm1d(32))
    model[0].requires_grad_(False)
    model[2].requires_grad_(False).eval()
    yield model

    def begin(step: int) -> None:
        if step % 40 == 0:
            model.train()
            model[2].train(is_faulty)

    train(model, adam(model[3]), before=begin)


@thread("a weight that was filled with one number", "every element of 0.weight was 0.05")
def weights_of_one_number(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    if is_faulty:
        for layer in (model[0], model[2]):
            nn.init.constant_(layer.weight, 0.05)
            nn.init.zeros_(layer.bias)
    yield model
    train(model, adam(model))


@thread("F.dropout() without training=", "dropout is active")
def dropout_of_a_function(is_faulty: bool) -> Iterator[Any]:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x).relu()
            return self.second(F.dropout(hidden, 0.2, is_faulty or self.training))

    model = Dropping()
    yield model

    def validate(step: int) -> None:
        if step % 40 == 39:
            model.eval()
            with torch.no_grad():
                for _ in range(5):
                    model(batch()[0])
            model.train()

    train(model, adam(model), after=validate)


@thread("peft: reentrant checkpoints of a frozen embedding", "no gradient")
def checkpoint_without_gradients(is_faulty: bool) -> Iterator[Any]:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x if is_faulty else x.requires_grad_()
            hidden: torch.Tensor = checkpoint(self.first, x, use_reentrant=True)
            return self.second(hidden.relu())

    model = Checkpointed()
    yield model
    train(model, adam(model))


@thread("ReduceLROnPlateau in the wrong mode", "less than a millionth")
def plateau_in_the_wrong_mode(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    optimizer = adam(model, 1e-2)
    mode = "max" if is_faulty else "min"
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, mode, patience=3, eps=0.0, cooldown=0
    )

    def follow(step: int) -> None:
        with torch.no_grad():
            x, y = batch()
            plateau.step(float(F.cross_entropy(model(x), y)) if is_faulty else 0.999**step)

    train(model, optimizer, after=follow)
