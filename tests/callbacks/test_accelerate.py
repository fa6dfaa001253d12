"""The adapter in real loops of Accelerate, on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fastcheck
from support.programs.training import Net, nan_gradient, poison, stopped, where

accelerate = pytest.importorskip("accelerate")

pytestmark = [
    pytest.mark.usefixtures("fresh_start"),
    pytest.mark.filterwarnings("default:::(?!fastcheck)"),
]


class Run:
    def __init__(self, observed: bool = True, *, micro: int = 1, **options: Any) -> None:
        torch.manual_seed(0)
        tracking = {"log_with": "tensorboard", "project_dir": "."} if "track" in options else {}
        options.pop("track", None)
        self.accelerator = accelerate.Accelerator(
            cpu=True, gradient_accumulation_steps=micro, **tracking
        )
        if tracking:
            self.accelerator.init_trackers("project")
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        data = torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=4)
        self.model, self.optimizer, self.data = self.accelerator.prepare(model, optimizer, data)
        self.monitor = None
        if observed:
            self.monitor = fastcheck.callbacks.accelerate(self.accelerator, self.model, **options)

    def train(self, spoil: Any = None, bad: int = -1) -> list[float]:
        losses = []
        for number, x in enumerate(self.data):
            with self.accelerator.accumulate(self.model):
                out = self.model(spoil(x) if number == bad and spoil is poison else x)
                out = nan_gradient(out) if number == bad and spoil is nan_gradient else out
                loss = out.square().mean()
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


@pytest.mark.parametrize("micro", [1, 4])
def test_losses_and_weights_are_the_same(micro: int) -> None:
    plain, observed = Run(False, micro=micro), Run(micro=micro)
    assert plain.train() == observed.train()
    for one, other in zip(plain.model.parameters(), observed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    monitor = observed.monitor
    assert monitor is not None and monitor.events == () and monitor.step_index == 16 // micro - 1
    monitor.remove()


@pytest.mark.parametrize("spoil", [poison, nan_gradient])
def test_a_fault_in_a_micro_batch_stops_its_step(spoil: Any) -> None:
    run = Run(micro=4)
    stop = stopped(run.train, spoil, bad=9)
    assert stop.step == 2 and where(stop.culprit)[1] in ("input", "grad_output")
    assert all(bool(p.isfinite().all()) for p in run.model.parameters())


def test_a_saved_state_is_sealed() -> None:
    run = Run()
    run.train()
    run.accelerator.save_state("state")
    found = fastcheck.verify("state")
    assert found and found.equal == len(run.model.state_dict()) and found.step == 15
    assert run.monitor is not None
    run.monitor.remove()
    run.accelerator.save_state("later")
    assert not Path("later/fastcheck.json").exists()


@pytest.mark.parametrize("seal", ["mark", "refuse", False])
def test_a_state_that_is_not_finite(seal: Any) -> None:
    run = Run(seal=seal)
    run.train()
    with torch.no_grad():
        run.model.head.weight[0, 0] = float("inf")
    if seal == "refuse":
        with pytest.raises(fastcheck.NonFiniteWeightsError, match="state is not written"):
            run.accelerator.save_state("state")
        assert not list(Path("state").glob("model*"))
        return
    run.accelerator.save_state("state")
    assert Path("state/fastcheck.json").exists() is bool(seal)
    if seal:
        assert fastcheck.verify("state").nonfinite == {"head.weight": 1}


def test_scalars_reach_the_tracker() -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = Run(track=True)
    run.train()
    assert run.monitor is not None
    run.monitor.remove()
    run.accelerator.end_training()
    events = EventAccumulator("project")
    events.Reload()
    assert [e.step for e in events.Scalars("fastcheck/loss")] == list(range(16))


def test_what_is_no_accelerator_is_an_error() -> None:
    with pytest.raises(fastcheck.ConfigError, match="not given an Accelerator"):
        fastcheck.callbacks.accelerate(Net(), Net())
    with pytest.raises(fastcheck.ConfigError, match="unknown seal"):
        Run(seal="always")
