"""Ranks of the tests of trainers under DDP and FSDP2. Each is a process of its own, as torchrun
starts it.
"""

from __future__ import annotations

import os
import warnings
from typing import Any, Callable, Optional

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import fastcheck
from fastcheck.utils.torch.sharding import local
from support.composer_imports import import_composer, replaced
from support.programs.training import Net, poison, where
from support.tiny_llama import TEXTS, llama, tokenizer

STEPS, BAD_STEP, BAD_RANK = 4, 2, 1


class _Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, count: int) -> None:
        self.rows = torch.randn(count, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


class _Loss(nn.Module):
    """A model that returns its loss, as Trainer expects it, and keeps the losses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Net()
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = self.net(x).square().mean()
        self.losses.append(loss.item())
        return {"loss": loss}


def trains(rank: int, trainer: str, is_observed: bool, is_bad: bool) -> Any:
    """A training of STEPS steps with a batch of 4 rows for each rank; one batch may have a NaN."""
    _as_of_torchrun(rank)
    ranks = dist.get_world_size()
    collated = 0

    def collate(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        nonlocal collated
        x = torch.stack(rows)
        x = poison(x) if is_bad and (rank, collated) == (BAD_RANK, BAD_STEP) else x
        collated += 1
        return {"x": x}

    model = _Loss()
    train = {
        "huggingface": _huggingface,
        "lightning": _lightning,
        "lightning-fsdp2": _lightning_sharded,
        "accelerate": _accelerate,
        "composer": _composer,
    }
    data = _Rows(4 * ranks * STEPS)
    return _outcome(model, model.losses, lambda: train[trainer](model, data, collate, is_observed))


def _as_of_torchrun(rank: int) -> None:
    """The process group is there already: the address is looked for, and not used."""
    warnings.simplefilter("ignore")
    os.environ.update(
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(dist.get_world_size()),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
    )


def _outcome(model: nn.Module, losses: list[float], train: Callable[[], Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"stop": None}
    try:
        found["monitor"] = train()
    except fastcheck.OverflowDetected as stop:
        found["stop"] = stop.step, stop.report.rank, where(stop.culprit)[1]
    found["losses"] = losses
    found["names"] = {name.rpartition("net.")[2] for name, _ in model.named_parameters()}
    found["weights"] = [local(parameter).tolist() for parameter in model.parameters()]
    found["is_intact"] = all(bool(local(p).isfinite().all()) for p in model.parameters())
    return found


Collate = Callable[[list[torch.Tensor]], dict[str, torch.Tensor]]


def _seen(monitor: Optional[fastcheck.Monitor]) -> Any:
    """The last step, the events, and the parameters whose gradients were read."""
    if monitor is None:
        return None
    sites = [monitor.sites[row["site"]] for row in monitor.records()]
    keys = {site.key.rpartition("net.")[2] for site in sites if site.role == "param_grad"}
    return monitor.step_index, monitor.event_count, keys


def _huggingface(model: _Loss, data: _Rows, collate: Collate, is_observed: bool) -> Any:
    import transformers

    arguments = transformers.TrainingArguments(
        "out",
        max_steps=STEPS,
        per_device_train_batch_size=4,
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
        save_strategy="no",
        remove_unused_columns=False,
    )
    callback = fastcheck.callbacks.HuggingFace() if is_observed else None
    transformers.Trainer(
        model,
        arguments,
        train_dataset=data,
        data_collator=collate,
        callbacks=[callback] if callback is not None else [],
    ).train()
    return _seen(callback.monitor if callback is not None else None)


def _lightning_sharded(model: _Loss, data: _Rows, collate: Collate, is_observed: bool) -> Any:
    from lightning.pytorch.strategies import ModelParallelStrategy

    ranks = dist.get_world_size()
    strategy = ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
    return _lightning(model, data, collate, is_observed, strategy)


def _lightning(
    model: _Loss, data: _Rows, collate: Collate, is_observed: bool, strategy: Any = "ddp"
) -> Any:
    import lightning

    class Program(lightning.LightningModule):  # type: ignore[misc]  # its base is Any where lightning is missing
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def configure_model(self) -> None:
            if strategy != "ddp":
                for block in self.model.net.blocks:
                    fully_shard(block, mesh=self.device_mesh["data_parallel"])
                fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    callback = fastcheck.callbacks.Lightning() if is_observed else None
    lightning.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        callbacks=[callback] if callback is not None else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Program(), torch.utils.data.DataLoader(data, batch_size=4, collate_fn=collate))
    return _seen(callback.monitor if callback is not None else None)


def _accelerate(model: _Loss, data: _Rows, collate: Collate, is_observed: bool) -> Any:
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    batches: Any = torch.utils.data.DataLoader(data, batch_size=4, collate_fn=collate)
    prepared, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    monitor = fastcheck.callbacks.accelerate(accelerator, prepared) if is_observed else None
    for batch in batches:
        accelerator.backward(prepared(**batch)["loss"])
        accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if monitor is not None:
        monitor.remove()
    return _seen(monitor)


def _composer(model: _Loss, data: _Rows, collate: Collate, is_observed: bool) -> Any:
    composer = import_composer()

    class Program(composer.ComposerModel):  # type: ignore[misc,name-defined]  # untyped
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, batch: dict[str, torch.Tensor]) -> Any:
            return self.model(**batch)["loss"]

        def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
            return outputs

    callback = fastcheck.callbacks.Composer() if is_observed else None
    sampler = torch.utils.data.DistributedSampler(data, shuffle=False)
    with replaced():
        composer.Trainer(
            model=Program(),
            train_dataloader=torch.utils.data.DataLoader(
                data, batch_size=4, collate_fn=collate, sampler=sampler
            ),
            optimizers=torch.optim.AdamW(model.parameters(), lr=0.01),
            callbacks=[callback] if callback is not None else [],
            max_duration=f"{STEPS}ba",
            device="cpu",
            progress_bar=False,
        ).fit()
    return _seen(callback.monitor if callback is not None else None)


def trains_trl(rank: int, is_observed: bool, is_bad: bool) -> Any:
    """``trains()`` with a Llama and SFTTrainer. Tokens hold no NaN: it is put into the embedding of
    a batch.
    """
    _as_of_torchrun(rank)
    import datasets
    import trl

    model = llama()
    losses: list[float] = []

    def spoil(module: nn.Module, inputs: Any) -> Any:
        is_it = is_bad and (rank, len(losses)) == (BAD_RANK, BAD_STEP)
        return (poison(inputs[0]), *inputs[1:]) if is_it else None

    model.model.layers[0].register_forward_pre_hook(spoil)
    model.register_forward_hook(lambda module, inputs, out: losses.append(out.loss.item()))
    callback = fastcheck.callbacks.HuggingFace() if is_observed else None
    arguments = trl.SFTConfig(
        "out",
        max_steps=STEPS,
        per_device_train_batch_size=2,
        max_length=16,
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        report_to="none",
        save_strategy="no",
    )
    run = trl.SFTTrainer(
        model,
        arguments,
        train_dataset=datasets.Dataset.from_dict({"text": TEXTS}),
        processing_class=tokenizer(),
        callbacks=[callback] if callback is not None else [],
    )

    def train() -> Any:
        run.train()
        return _seen(callback.monitor if callback is not None else None)

    return _outcome(model, losses, train)
