"""The adapter in real loops of Accelerate, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fastcheck
from support.programs.training import Net, nan_gradient, overflow_at_update, poison, stopped, where
from support.trainers import in_lab

accelerate = pytest.importorskip("accelerate")


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    """The precision is that of the first Accelerator of a process."""
    accelerate.state.AcceleratorState._reset_state(True)
    yield
    accelerate.state.AcceleratorState._reset_state(True)


pytestmark = [
    pytest.mark.usefixtures("fresh_start"),
    pytest.mark.filterwarnings("default:::(?!fastcheck)"),
]


class Run:
    def __init__(
        self,
        observed: bool = True,
        *,
        micro: int = 1,
        make: Any = Net,
        precision: str = "no",
        rate: float = 0.0,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        tracking = {"log_with": "tensorboard", "project_dir": "."} if "track" in options else {}
        options.pop("track", None)
        self.accelerator = accelerate.Accelerator(
            cpu=True, gradient_accumulation_steps=micro, mixed_precision=precision, **tracking
        )
        if precision == "fp16":  # Accelerate leaves it out on a CPU
            self.accelerator.native_amp = True
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
        if tracking:
            self.accelerator.init_trackers("project")
        model = make()
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if rate:
            optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        data = torch.utils.data.DataLoader(torch.randn(64, 8, dtype=dtype), batch_size=4)
        self.model, self.optimizer, self.data = self.accelerator.prepare(model, optimizer, data)
        self.monitor = None
        if observed:
            self.monitor = fastcheck.callbacks.accelerate(self.accelerator, self.model, **options)

    def train(self, spoil: Any = None, bad: int = -1, clip: bool = True) -> list[float]:
        losses = []
        for number, x in enumerate(self.data):
            with self.accelerator.accumulate(self.model):
                out = self.model(spoil(x) if number == bad and spoil is poison else x)
                out = nan_gradient(out) if number == bad and spoil is nan_gradient else out
                loss = out.square().mean()
                self.accelerator.backward(loss)
                if clip and self.accelerator.sync_gradients:
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


def test_weights_in_parts_are_a_warning_and_no_seal() -> None:
    """Under FSDP Accelerate gives the hook no weights."""
    run = Run()
    inner = run.accelerator.unwrap_model(run.model)
    inner.head.bias.ds_tensor = inner.head.bias.detach()  # a part, as of ZeRO 3
    with pytest.warns(fastcheck.UnsealedCheckpointWarning, match="spread over the ranks") as caught:
        for hook in run.accelerator._save_model_state_pre_hook.values():
            hook([run.model], [], "state")
            hook([run.model], [], "later")
    assert len(caught) == 1 and not Path("state").exists()


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


class Checkpointed(Net):
    """The activations of its blocks are computed again in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return self.head(x)  # type: ignore[no-any-return]  # a module's call is untyped


def compiled() -> Net:
    model = Net()
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize(
    ("make", "precision"),
    [
        pytest.param(compiled, "no", marks=in_lab),
        (Checkpointed, "no"),
        (Net, "bf16"),
        (Net, "fp16"),
    ],
    ids=["compiled", "gradient checkpointing", "bf16", "fp16"],
)
def test_losses_are_the_same_with_what_changes_the_step(make: Any, precision: str) -> None:
    runs = [Run(observed, make=make, precision=precision) for observed in (False, True)]
    assert runs[0].train() == runs[1].train()
    for one, other in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True):
        assert torch.equal(one, other)
    monitor = runs[1].monitor
    assert monitor is not None and monitor.event_count == 0
    sites = {monitor.sites[r["site"]] for r in monitor.records()}
    assert ("blocks.1", "output") in {(site.module, site.role) for site in sites}
    rows = monitor.step_table()
    if precision == "fp16":
        scaled = {fastcheck.types.Verdict.SCALED}
        assert rows[0].overflow and {event.verdict for event in monitor.events} == scaled
        assert [row.scale for row in rows[:2]] == [2.0**20, 2.0**19] and not rows[-1].overflow
    else:
        assert not any(row.overflow for row in rows)
    monitor.remove()


def test_a_weight_that_overflows_in_float16_is_named() -> None:
    run = Run(make=lambda: Net().half(), rate=100.0, dtype=torch.float16)
    overflow_at_update(run.model.blocks[1].a.bias)
    stop = stopped(run.train, clip=False)
    assert stop.step == 1 and where(stop.culprit)[:3] == ("blocks.1.a", "param", "bias")


def test_steps_go_on_after_a_resume() -> None:
    run = Run()
    run.train()
    assert run.monitor is not None
    run.accelerator.save_state("state")
    later = Run()
    later.accelerator.load_state("state")
    assert later.monitor is not None
    later.monitor.begin_at(16)
    stop = stopped(later.train, poison, bad=2)
    assert stop.step == 18
