"""The callback in real runs of lightning.Trainer."""

from __future__ import annotations

from typing import Any, Optional

import pytest
import torch
from torch import nn

import fastcheck

lightning = pytest.importorskip("lightning")

pytestmark = [
    pytest.mark.usefixtures("fresh_start"),
    pytest.mark.filterwarnings("default:::(?!fastcheck)"),
]


class Program(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, bad_step: Optional[int] = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
        self.bad_step = bad_step
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> Any:
        x = batch[0]
        if self.global_step == self.bad_step:
            x = x / 0
        loss = self.layers(x).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.layers(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def fit(program: Program, *callbacks: Any, steps: int = 6, **options: Any) -> Any:
    torch.manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(32, 8))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **options,
    )
    trainer.fit(program, loader, loader)
    return trainer


@pytest.mark.parametrize("accumulation", [1, 2])
def test_losses_and_weights_are_the_same(accumulation: int) -> None:
    plain, watched = Program(), Program()
    fit(plain, accumulate_grad_batches=accumulation)
    callback = fastcheck.callbacks.Lightning()
    fit(watched, callback, accumulate_grad_batches=accumulation)
    assert plain.losses == watched.losses and len(plain.losses) >= 6 * accumulation
    for one, other in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one, other)
    assert callback.monitor is not None and callback.monitor.events == ()
    assert callback.monitor.step_index == 5


def test_a_fault_stops_the_fit() -> None:
    program, callback = Program(bad_step=3), fastcheck.callbacks.Lightning()
    with pytest.raises(fastcheck.OverflowDetected) as caught:
        fit(program, callback)
    assert caught.value.step == 3
    assert caught.value.culprit.site.module.startswith("layers")
    assert all(bool(parameter.isfinite().all()) for parameter in program.parameters())
    assert "removed" in repr(callback.monitor)


def test_validation_between_steps_changes_nothing() -> None:
    callback = fastcheck.callbacks.Lightning(log_dir="log")
    fit(Program(), callback, steps=12, val_check_interval=3)
    assert callback.monitor is not None and callback.monitor.step_index == 11
