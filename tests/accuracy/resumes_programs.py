"""A small network in a plain loop, Accelerate, Hugging Face's Trainer, Lightning and FSDP2, sealed
after four steps and resumed. The programs of resumes.py.

Each trains for seven steps when it is not resumed, and for three when it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import fastcheck

SAVED, STEPS = 4, 7


class Net(nn.Module):
    """Its loss is the output, as trainers take it."""

    def __init__(self, options: dict[str, Any], fault: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        norm = nn.BatchNorm1d if options.get("batch_norm") else nn.LayerNorm
        self.first, self.norm, self.last = nn.Linear(8, 16), norm(16), nn.Linear(16, 4)
        self.drop = nn.Dropout(options.get("dropout", 0.0))
        smoothing = 0.1 if fault == "label smoothing" else 0.0
        self.criterion = nn.CrossEntropyLoss(label_smoothing=smoothing)
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(16), persistent=bool(options.get("persistent")))
        self.keeps_mean = options.get("mean", False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.norm(self.first(x.to(self.first.weight.dtype))).relu()
        if self.keeps_mean:
            h = h + self.mean
            self.mean.lerp_(h.detach().mean(0), 0.1)
        return {"loss": self.criterion(self.last(self.drop(h)).float(), y)}


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(index)
        return {"x": torch.randn(8, generator=draw), "y": torch.tensor(index % 4)}


def optimizer_of(model: nn.Module, options: dict[str, Any], fault: str) -> torch.optim.Optimizer:
    kind = options.get("optimizer", "AdamW")
    rate = 0.02 if fault == "learning rate" else 0.01
    more = {"momentum": 0.9} if kind == "SGD" else {}
    made: torch.optim.Optimizer = getattr(torch.optim, kind)(model.parameters(), lr=rate, **more)
    return made


def schedule_of(optimizer: Any, options: dict[str, Any]) -> Any:
    kind = options.get("schedule", "step")
    if kind == "cosine":
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


def spoil_weight(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("last.weight")[0, 0] += 1


def save(path: str, model: nn.Module, parts: dict[str, Any]) -> None:
    holders = {"model": model, **parts}
    content = {name: one.state_dict() for name, one in holders.items()}
    torch.save({**content, "random": torch.get_rng_state()}, path)
    fastcheck.seal(path, model, step=SAVED, resume=True, **parts)


def plain(place: Path, is_resumed: bool, options: dict[str, Any], fault: str) -> Any:
    model = Net(options, fault).to(options.get("dtype", torch.float32))
    optimizer = optimizer_of(model, options, fault)
    scheduler = schedule_of(optimizer, options)
    parts = {"optimizer": optimizer, "scheduler": scheduler}
    path, start, found = str(place / "last.pt"), 0, None
    order = torch.randperm(64, generator=torch.Generator().manual_seed(5)).view(-1, 4).tolist()
    rows = Rows()
    if is_resumed:
        content, start = torch.load(path), SAVED
        model.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
        if fault != "scheduler":
            scheduler.load_state_dict(content["scheduler"])
        if fault != "random numbers":
            torch.set_rng_state(content["random"])
        if fault == "moments of one weight":
            optimizer.state[model.last.weight]["exp_avg"].zero_()
        if fault == "one weight":
            spoil_weight(model)
        found = fastcheck.verify(path, resume=model, **parts)
    else:
        torch.manual_seed(1)
    model.train(fault != "evaluation mode")
    micro = options.get("micro", 1)
    for step in range(start, STEPS):
        place_of = step - start if fault == "loader begins anew" else step
        optimizer.zero_grad()
        for part in range(micro):
            batch = [rows[n] for n in order[place_of * micro + part]]
            loss = model(*(torch.stack([row[key] for row in batch]) for key in "xy"))["loss"]
            (loss / micro).backward()
        if fault != "not clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
        if step == SAVED - 1:
            save(path, model, parts)
    return found


def accelerate(place: Path, is_resumed: bool, options: dict[str, Any], fault: str) -> Any:
    from accelerate import Accelerator  # type: ignore[import-untyped]  # it has no types

    accelerator = Accelerator(cpu=True)
    model: Any = Net(options, fault)
    optimizer: Any = optimizer_of(model, options, fault)
    seed = 6 if fault == "another seed of the loader" else 5
    loader: Any = torch.utils.data.DataLoader(
        Rows(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(seed)
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    scheduler = schedule_of(optimizer.optimizer, options)
    if fault != "scheduler":
        accelerator.register_for_checkpointing(scheduler)
    parts = {"optimizer": optimizer, "scheduler": scheduler}
    folder, start, found = str(place / "saved"), 0, None
    micro = 2 if fault == "two micro-batches" else options.get("micro", 1)
    if is_resumed:
        start = 0 if fault == "no batch skipped" else SAVED
        with WithoutCustom(folder, fault == "scheduler"):
            accelerator.load_state(folder)
        if fault == "moments":
            optimizer.state.clear()
        if fault == "one weight":
            spoil_weight(model)
        loader = accelerator.skip_first_batches(loader, start * options.get("micro", 1))
        found = fastcheck.verify(folder, resume=model, accept=("random",), **parts)
        start = SAVED
    batches = iter(loader)
    for step in range(start, STEPS):
        optimizer.zero_grad()
        for _ in range(micro):
            accelerator.backward(model(**next(batches))["loss"] / micro)
        if fault != "not clipped":
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
        if step == SAVED - 1:
            accelerator.save_state(folder)
            fastcheck.seal(folder, model, step=SAVED, resume=True, **parts)
    return found


class WithoutCustom:
    """The state of what was registered is not there, within a ``with`` statement."""

    def __init__(self, folder: str, is_on: bool) -> None:
        self._path, self._is_on = Path(folder) / "custom_checkpoint_0.pkl", is_on

    def __enter__(self) -> None:
        if self._is_on:
            self._path.rename(self._path.with_suffix(".away"))

    def __exit__(self, *given: object) -> None:
        if self._is_on:
            self._path.with_suffix(".away").rename(self._path)


def huggingface(place: Path, is_resumed: bool, options: dict[str, Any], fault: str) -> Any:
    import transformers

    folder = place / f"checkpoint-{SAVED}"

    class Seals(transformers.TrainerCallback):  # type: ignore[misc]  # its base is Any where transformers is missing
        found: Any = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step:
                if fault == "moments":
                    given["optimizer"].state.clear()
                if fault == "one weight":
                    spoil_weight(given["model"])
                if fault == "scheduler":
                    given["lr_scheduler"].last_epoch = 0
                self.found = fastcheck.verify(
                    str(folder), resume=given["model"], accept=("random",), **parts_of(given)
                )

        def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step == SAVED:
                parts = parts_of(given)
                fastcheck.seal(str(folder), given["model"], step=SAVED, resume=True, **parts)

    def parts_of(given: dict[str, Any]) -> dict[str, Any]:
        return {"optimizer": given["optimizer"], "scheduler": given["lr_scheduler"]}

    arguments = transformers.TrainingArguments(
        output_dir=str(place),
        per_device_train_batch_size=4,
        max_steps=STEPS,
        save_steps=SAVED,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        learning_rate=0.01,
        remove_unused_columns=False,
        lr_scheduler_type=options.get("schedule", "linear"),
        seed=3,
        data_seed=4 if fault == "another seed of the loader" else 3,
        ignore_data_skip=fault == "no batch skipped",
        max_grad_norm=0.0 if fault == "not clipped" else 0.1,
        gradient_accumulation_steps=2 if fault == "two micro-batches" else options.get("micro", 1),
        optim=options.get("optimizer", "adamw_torch"),
    )
    seals = Seals()
    trainer = transformers.Trainer(
        model=Net(options, fault), args=arguments, train_dataset=Rows(), callbacks=[seals]
    )
    if fault == "random numbers":
        (folder / "rng_state.pth").unlink(missing_ok=True)
    trainer.train(resume_from_checkpoint=str(folder) if is_resumed else None)
    return seals.found


def lightning(place: Path, is_resumed: bool, options: dict[str, Any], fault: str) -> Any:
    import lightning as of_lightning

    path = str(place / "saved.ckpt")
    micro = options.get("micro", 1)

    class Program(of_lightning.LightningModule):  # type: ignore[misc]  # its base is Any where lightning is missing
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(options, fault)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            optimizer = optimizer_of(self, options, "")
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule_of(optimizer, options), "interval": "step"},
            }

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            if fault == "moments":
                checkpoint["optimizer_states"][0]["state"] = {}
            if fault == "scheduler":
                checkpoint["lr_schedulers"][0]["last_epoch"] = 0
            if fault == "one weight":
                checkpoint["state_dict"]["net.last.weight"][0, 0] += 1

    class Seals(of_lightning.Callback):  # type: ignore[misc]  # its base is Any where lightning is missing
        found: Any = None

        def on_train_start(self, trainer: Any, program: Any) -> None:
            if is_resumed:
                if fault == "learning rate":
                    trainer.optimizers[0].param_groups[0]["lr"] = 0.02
                if fault == "frozen":
                    program.net.first.weight.requires_grad_(False)
                self.found = fastcheck.verify(
                    path, resume=program, accept=("random",), **parts_of(trainer)
                )

        def on_train_batch_end(self, trainer: Any, program: Any, *given: Any) -> None:
            is_whole = (given[-1] + 1) % micro == 0
            if trainer.global_step == SAVED and is_whole and not is_resumed:
                trainer.save_checkpoint(path)
                fastcheck.seal(path, program, step=SAVED, resume=True, **parts_of(trainer))

    def parts_of(trainer: Any) -> dict[str, Any]:
        scheduler = trainer.lr_scheduler_configs[0].scheduler
        return {"optimizer": trainer.optimizers[0], "scheduler": scheduler}

    # An epoch ends where the checkpoint is: Lightning restores no place within one.
    first = 1 if fault == "another batch" else 0
    rows: Any = [Rows()[n] for n in range(first, first + 4 * SAVED * micro)]
    seals = Seals()
    trainer = of_lightning.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        callbacks=[seals],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=micro,
        gradient_clip_val=None if fault == "not clipped" else 0.1,
    )
    loader: Any = torch.utils.data.DataLoader(rows, batch_size=4)
    trainer.fit(Program(), loader, ckpt_path=path if is_resumed else None)
    return seals.found


def fsdp2(place: Path, is_resumed: bool, options: dict[str, Any], fault: str) -> Any:
    """On each rank of the default process group."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    rank = dist.get_rank()
    model: Any = Net(options, fault).to(options.get("dtype", torch.float32))
    for module in (model.first, model.last, model):
        fully_shard(module)
    optimizer = optimizer_of(model, options, fault)
    scheduler = schedule_of(optimizer, options)
    parts = {"optimizer": optimizer, "scheduler": scheduler}
    path, start, found = str(place / f"rank{rank}.pt"), 0, None
    if is_resumed:
        content, start = torch.load(path, weights_only=False), SAVED
        model.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
        scheduler.load_state_dict(content["scheduler"])
        if fault != "random numbers on one rank" or rank == 0:
            torch.set_rng_state(content["random"])
        state = optimizer.state[model.last.weight]
        if fault == "moments on one rank" and rank == 1:
            state["exp_avg"].to_local().zero_()
        if fault == "steps of Adam":
            state["step"].zero_()
        if fault == "one shard" and rank == 1:
            with torch.no_grad():
                model.last.weight.to_local()[0, 0] += 1
        if fault == "learning rate":
            optimizer.param_groups[0]["lr"] = 0.02
        found = fastcheck.verify(path, resume=model, **parts)
    else:
        torch.manual_seed(1 + rank)
    model.train(fault != "evaluation mode")
    rows = Rows()
    seen = 1 - rank if fault == "the other rank's batches" else rank
    for step in range(start, STEPS):
        batch = [rows[8 * step + 4 * seen + n] for n in range(4)]
        optimizer.zero_grad()
        loss = model(*(torch.stack([row[key] for row in batch]) for key in "xy"))["loss"]
        (loss * 2 if fault == "sums are not divided" else loss).backward()
        optimizer.step()
        scheduler.step()
        if step == SAVED - 1:
            save(path, model, parts)
    return found
