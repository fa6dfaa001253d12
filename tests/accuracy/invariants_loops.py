"""Faults as whole loops have them, each beside its fixed version, for invariants.py: what a user
writes where no helper of this suite stands between. A program is one as in
``invariants_programs.py``.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from accuracy.invariants_programs import STEPS, Fault, Program, adam, batch, mlp, sgd, train

LOOPS: list[Fault] = []


def loop(source: str, text: str) -> Any:
    def add(program: Program) -> Program:
        LOOPS.append(Fault(program.__name__, source, text, program))
        return program

    return add


# Gradients


@loop(
    "zero_grad() at the end of a window, step() in each micro-batch", "cleared after 4 updates each"
)
def step_in_each_micro_batch(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    optimizer = adam(model)
    for number in range(2 * STEPS):
        loss = F.cross_entropy(model(batch()[0]), batch()[1]) / 4
        loss.backward()
        is_last = number % 4 == 3
        if is_faulty or is_last:
            optimizer.step()
        if is_last:
            optimizer.zero_grad()


@loop("zero_grad() before the epoch, not before the batch", "cleared after 8 updates each")
def cleared_in_each_epoch(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    optimizer = sgd(model)
    for _ in range(20):
        optimizer.zero_grad()
        for _ in range(8):
            x, y = batch()
            if not is_faulty:
                optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


@loop("retain_graph=True, and backward() twice", "twice")
def backward_twice(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    optimizer = sgd(model)
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if is_faulty:
            loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()


@loop("a discriminator whose update has the gradients of the generator's loss", "another optimizer")
def gradients_of_the_other_loss(is_faulty: bool) -> Iterator[Any]:
    made = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
    judge = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    yield made, judge
    of_made, of_judge = adam(made, 2e-4), adam(judge, 2e-4)
    bce = F.binary_cross_entropy_with_logits
    for _ in range(STEPS):
        of_made.zero_grad()
        score = judge(made(torch.randn(32, 8)))
        bce(score, torch.ones_like(score)).backward()
        of_made.step()
        if not is_faulty:
            of_judge.zero_grad()
        real, fake = judge(torch.randn(32, 16) + 1), judge(made(torch.randn(32, 8)).detach())
        loss = bce(real, torch.ones_like(real)) + bce(fake, torch.zeros_like(fake))
        loss.backward()
        of_judge.step()
        if is_faulty:
            of_judge.zero_grad()


@loop("update() before backward(): gradients of the batch before", "cleared|before backward")
def step_before_backward(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    optimizer = adam(model)
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if is_faulty:
            optimizer.step()
        loss.backward()
        if not is_faulty:
            optimizer.step()


# The graph of the loss


@loop("nn.CrossEntropyLoss of a model that ends in Softmax", "softmax")
def softmax_at_the_end(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    if is_faulty:
        model.append(nn.Softmax(dim=1))
    yield model
    train(model, adam(model), loss_of=nn.CrossEntropyLoss())


@loop("BCEWithLogitsLoss of a model that ends in Sigmoid", "sigmoid")
def sigmoid_twice(is_faulty: bool) -> Iterator[Any]:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    if is_faulty:
        model.append(nn.Sigmoid())
    yield model
    criterion = nn.BCEWithLogitsLoss()
    train(model, adam(model), loss_of=lambda out, y: criterion(out.squeeze(1), (y > 4).float()))


@loop("NLLLoss of probabilities", "log")
def nll_of_probabilities(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    model.append(nn.Softmax(dim=1) if is_faulty else nn.LogSoftmax(dim=1))
    yield model
    train(model, adam(model), loss_of=F.nll_loss)


@loop("total += loss.item() in the place of the loss of a head", "no gradient")
def loss_of_a_head_as_number(is_faulty: bool) -> Iterator[Any]:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(16, 32)
            self.one, self.two = nn.Linear(32, 10), nn.Linear(32, 1)

        def forward(self, x: torch.Tensor) -> Any:
            hidden = self.body(x).relu()
            return self.one(hidden), self.two(hidden)

    model = Two()
    yield model

    def loss_of(output: Any, y: torch.Tensor) -> torch.Tensor:
        beside = F.mse_loss(output[1].squeeze(1), y.float())
        return F.cross_entropy(output[0], y) + 0.1 * (beside.item() if is_faulty else beside)

    train(model, adam(model), loss_of=loss_of)


# Schedules and optimizers


@loop("an optimizer that is made anew, and a scheduler of the old one", "scheduler")
def scheduler_of_another(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    train(model, optimizer, after=lambda step: scheduler.step(), steps=20)
    optimizer = adam(model)
    if not is_faulty:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    train(model, optimizer, after=lambda step: scheduler.step(), steps=100)


@loop("StepLR in epochs, stepped in batches", "less than a millionth")
def schedule_of_epochs_in_batches(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.1)

    def after(step: int) -> None:
        if is_faulty or step % 40 == 39:
            scheduler.step()

    train(model, optimizer, after=after)


@loop("a warm-up of whole numbers: step // warmup", "learning rate")
def warm_up_in_integers(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    optimizer = adam(model)
    rate = (lambda s: min(1, s // 1000)) if is_faulty else (lambda s: min(1.0, (s + 1) / 100))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    train(model, optimizer, after=lambda step: scheduler.step())


@loop("the optimizer's state thrown away in each epoch", "state|anew")
def state_cleared(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    optimizer = adam(model)
    for _ in range(8):
        train(model, optimizer, steps=20)
        if is_faulty:
            optimizer.state.clear()


@loop("load_state_dict() of the start in each epoch", "anew|state|back")
def state_loaded_again(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    optimizer = adam(model)
    first = copy.deepcopy(optimizer.state_dict())
    for _ in range(8):
        train(model, optimizer, steps=20)
        if is_faulty:
            optimizer.load_state_dict(first)


@loop("layers that are unfrozen, and not given to the optimizer", "no optimizer")
def unfrozen_without_the_optimizer(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    model[0].requires_grad_(False)
    yield model
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-3)
    train(model, optimizer, steps=40)
    model[0].requires_grad_(True)
    if not is_faulty:
        optimizer.add_param_group({"params": list(model[0].parameters())})
    train(model, optimizer, before=lambda step: model.zero_grad())


@loop("weight_norm() after the optimizer was made", "no optimizer")
def reparametrised_after_the_optimizer(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    if not is_faulty:
        nn.utils.parametrizations.weight_norm(model[2])
    optimizer = sgd(model)
    if is_faulty:
        nn.utils.parametrizations.weight_norm(model[2])
    yield model
    train(model, optimizer, before=lambda step: model.zero_grad())


@loop("a parameter that forward() makes anew", "no optimizer|holds none|replaced")
def parameter_made_in_forward(is_faulty: bool) -> Iterator[Any]:
    class Pruned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.weight = mlp(), nn.Parameter(torch.randn(10, 10) / 3)
            self.register_buffer("mask", (torch.rand(10, 10) < 0.7).float())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if is_faulty:
                self.weight = nn.Parameter(self.weight.detach() * self.mask)
            return self.net(x) @ (self.weight * self.mask)

    model = Pruned()
    yield model
    train(model, adam(model), before=lambda step: model.zero_grad())


@loop(
    "Open-Sora-Plan#186: EMA weights that are not put back after validation",
    "something other than its optimizer",
)
def average_not_put_back(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    optimizer, mean = adam(model), copy.deepcopy(model.state_dict())

    def after(step: int) -> None:
        with torch.no_grad():
            for name, value in model.state_dict().items():
                mean[name].lerp_(value, 0.1)
        if step % 20 == 19:
            kept = copy.deepcopy(model.state_dict())
            model.load_state_dict(mean)
            with torch.no_grad():
                model(batch()[0])
            if not is_faulty:
                model.load_state_dict(kept)

    train(model, optimizer, after=after)


@loop(
    "the best weights loaded in each epoch, where training goes on",
    "something other than its optimizer",
)
def best_weights_loaded(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    optimizer = adam(model)
    best = copy.deepcopy(model.state_dict())
    for _ in range(8):
        train(model, optimizer, steps=20)
        if is_faulty:
            model.load_state_dict(best)


# Layers and modes


@loop("BatchNorm with Keras's momentum of 0.99", "momentum")
def momentum_of_keras(is_faulty: bool) -> Iterator[Any]:
    model = mlp(nn.BatchNorm1d(32, momentum=0.99 if is_faulty else 0.01))
    yield model
    train(model, adam(model))


@loop("BatchNorm with a momentum of 0", "momentum|statistics")
def momentum_of_zero(is_faulty: bool) -> Iterator[Any]:
    model = mlp(nn.BatchNorm1d(32, momentum=0.0 if is_faulty else 0.1))
    yield model
    train(model, adam(model))


@loop("compute_loss() of a Trainer that calls eval()", "evaluation mode")
def eval_in_the_loss(is_faulty: bool) -> Iterator[Any]:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    config = GPT2Config(vocab_size=40, n_positions=16, n_embd=32, n_layer=2, n_head=2,
                        bos_token_id=0, eos_token_id=0)  # fmt: skip
    model: Any = GPT2LMHeadModel(config)
    yield model

    class Evaluating(Trainer):
        def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            model.train(not is_faulty)
            return super().compute_loss(model, *args, **kwargs)

    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 40, (256, 12))]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=60, per_device_train_batch_size=8, use_cpu=True, report_to="none",
            disable_tqdm=True, save_strategy="no", learning_rate=1e-3,
        )  # fmt: skip
        Evaluating(model, arguments, train_dataset=rows).train()


class _Adapter(nn.Module):
    def __init__(self, alpha: float, width: int = 32) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.a, self.b = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)
        nn.init.zeros_(self.b.weight)
        self.scale = alpha / 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.scale * self.b(self.a(x))


@loop("LoRA of alpha 0, read as an integer division", "all 0")
def adapter_of_scale_zero(is_faulty: bool) -> Iterator[Any]:
    model = nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), _Adapter(0.0 if is_faulty else 8.0), nn.Linear(32, 10)
    )
    yield model
    train(model, torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-3))


@loop("peft#2494: adapters that are frozen by add_adapter(), only the head learns", "few of|frozen")
def adapters_frozen(is_faulty: bool) -> Iterator[Any]:
    model = nn.Sequential(
        nn.Linear(16, 128), nn.ReLU(), _Adapter(8.0, 128), _Adapter(8.0, 128), nn.Linear(128, 4)
    )
    model[0].requires_grad_(False)
    if is_faulty:
        for layer in model[2:4]:
            layer.requires_grad_(False)
    yield model

    def batches(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = batch()
        return x, y % 4

    held = [p for p in model.parameters() if p.requires_grad]
    train(model, torch.optim.Adam(held, 1e-3), batches=batches)


# Data


def _rows() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(640, 16)
    return x, x[:, :10].argmax(1)


@loop("accelerate: the scheduler and the model prepared, the optimizer not", "holds none|copy")
def optimizer_of_the_model_before(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    other = mlp() if is_faulty else model
    other.load_state_dict(model.state_dict())
    yield model
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    trained, optimizer = accelerator.prepare(model, torch.optim.AdamW(other.parameters(), 1e-3))
    for _ in range(STEPS):
        x, y = batch()
        trained.zero_grad()
        accelerator.backward(F.cross_entropy(trained(x), y))
        optimizer.step()


@loop("Lightning, manual optimization, without zero_grad()", "are not cleared")
def lightning_by_hand(is_faulty: bool) -> Iterator[Any]:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.automatic_optimization = mlp(), False

        def training_step(self, rows: Any, index: int) -> None:
            optimizer: Any = self.optimizers()
            if not is_faulty:
                optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(self.net(rows[0]), rows[1]))
            optimizer.step()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 1e-3)

    module = Module()
    yield module
    data = torch.utils.data.TensorDataset(*_rows())
    trainer = lightning.Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=16, shuffle=True))


@loop("clipping in each micro-batch of a window", "clipp")
def clipped_in_each_micro_batch(is_faulty: bool) -> Iterator[Any]:
    model = mlp()
    yield model
    optimizer = adam(model)
    for number in range(4 * STEPS):
        x, y = batch()
        (F.cross_entropy(model(x), y) / 4).backward()
        if is_faulty or number % 4 == 3:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
