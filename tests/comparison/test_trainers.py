"""A run that a trainer resumes is compared with the one that it did not interrupt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastcheck

pytestmark = [
    pytest.mark.usefixtures("fresh_start"),
    # What the trainers warn of themselves.
    pytest.mark.filterwarnings("default:::(?!fastcheck)"),
]


class Net(nn.Module):
    """Its loss is the output, as the trainers take it."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.last(self.dropout(self.first(x).relu())).square().mean()}


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, count: int = 64) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(index)
        return {"x": torch.randn(8, generator=draw)}


def train_hugging_face(place: Path, log: Path, resume: bool, fault: str) -> None:
    transformers = pytest.importorskip("transformers")
    arguments = transformers.TrainingArguments(
        output_dir=str(place),
        per_device_train_batch_size=4,
        max_steps=8,
        save_steps=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        learning_rate=1e-2,
        seed=3,
    )
    model = Net(dropout=0.2)
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Rows())
    if fault == "optimizer":
        saved = place / "checkpoint-4" / "optimizer.pt"
        torch.save({**torch.load(saved), "state": {}}, saved)
    with fastcheck.install(model, log_dir=log):
        trainer.train(resume_from_checkpoint=str(place / "checkpoint-4") if resume else None)


def train_accelerate(place: Path, log: Path, resume: bool, fault: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    torch.manual_seed(3)
    accelerator = accelerate.Accelerator(cpu=True)
    model = Net(dropout=0.2 if fault == "dropout" else 0.0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    loader = torch.utils.data.DataLoader(Rows(), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    start = 0
    if resume:
        accelerator.load_state(str(place))
        start = 4
        if fault == "optimizer":
            optimizer.state.clear()
    batches = accelerator.skip_first_batches(loader, start)
    with fastcheck.install(model, log_dir=log):
        for step, batch in enumerate(batches, start):
            if step == 4 and not resume:
                accelerator.save_state(str(place))
            if step == 8:
                break
            optimizer.zero_grad()
            accelerator.backward(model(batch["x"])["loss"])
            optimizer.step()


def train_lightning(place: Path, log: Path, resume: bool, fault: str) -> None:
    lightning = pytest.importorskip("lightning")

    class Program(lightning.LightningModule):  # type: ignore[misc, name-defined]  # its base is Any where lightning is missing
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, index: int) -> Any:
            return self.net(batch["x"])["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-2)

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            if fault == "optimizer":
                checkpoint["optimizer_states"][0]["state"] = {}

    program = Program()
    # An epoch ends where the checkpoint is: Lightning restores no place within one.
    loader = torch.utils.data.DataLoader(Rows(16), batch_size=4)
    saves = lightning.pytorch.callbacks.ModelCheckpoint(
        place, filename="saved-{step}", every_n_train_steps=4, save_top_k=-1
    )
    trainer = lightning.Trainer(
        max_steps=8,
        accelerator="cpu",
        callbacks=[saves],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with fastcheck.install(program.net, log_dir=log):
        saved = str(place / "saved-step=4.ckpt") if resume else None
        trainer.fit(program, loader, ckpt_path=saved)


@pytest.mark.parametrize("train", [train_hugging_face, train_accelerate, train_lightning])
def test_a_resume_of_a_trainer_is_paired_and_equal(tmp_path: Path, train: Any) -> None:
    place = tmp_path / "saved"
    train(place, tmp_path / "whole", False, "")
    train(place, tmp_path / "resumed", True, "")
    found = fastcheck.compare(tmp_path / "resumed", tmp_path / "whole")
    assert found.agrees, str(found)
    assert found.steps == (4, 5, 6, 7)
    train(place, tmp_path / "faulty", True, "optimizer")
    found = fastcheck.compare(tmp_path / "faulty", tmp_path / "whole")
    assert found["initial weights"].answer == found["forward"].answer == "yes", str(found)
    assert found["update"].answer == "no"


def test_random_numbers_that_a_loader_draws_after_the_resume_are_seen(tmp_path: Path) -> None:
    """Accelerate restores the generators, and the loader draws a seed from them before the step."""
    for name, resume in (("whole", False), ("resumed", True)):
        train_accelerate(tmp_path / "saved", tmp_path / name, resume, "dropout")
    found = fastcheck.compare(tmp_path / "resumed", tmp_path / "whole")
    assert found["batches"].answer == found["initial weights"].answer == "yes"
    assert found["forward"].answer == "no"
    assert found.first is not None and found.first.row.name == "dropout · forward · output[0]"
