"""The callback in real runs of composer.Trainer; skipped without Composer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fastcheck
from support.composer_imports import import_composer, replaced
from support.programs.training import Net, overflow_at_update, poison, where
from support.trackers import Kept

pytestmark = [
    pytest.mark.usefixtures("fresh_start"),
    pytest.mark.filterwarnings("default:::(?!fastcheck)"),
]

composer = import_composer()


_trainers: list[Any] = []


@pytest.fixture(autouse=True)
def without_what_does_not_fit() -> Iterator[None]:
    with replaced():
        yield
        for trainer in _trainers:
            trainer.close()
            for one in trainer.state.callbacks:
                if isinstance(one, composer.callbacks.CheckpointSaver):
                    one.tmp_dir_for_symlink.cleanup()  # Composer leaves it to the collector
        _trainers.clear()


class Model(composer.ComposerModel):  # type: ignore[misc,name-defined]  # untyped
    def __init__(self, bad_batch: int = -1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Net()
        self.bad_batch, self.count = bad_batch, -1
        self.losses: list[float] = []

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.count += 1
        out = self.net(batch)
        return poison(out) if self.count == self.bad_batch else out

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        loss = outputs.square().mean()
        self.losses.append(loss.item())
        return loss


class Logger(composer.loggers.LoggerDestination):  # type: ignore[misc,name-defined]  # untyped
    def __init__(self) -> None:
        self.rows: list[tuple[Any, dict[str, Any]]] = []

    def log_metrics(self, metrics: dict[str, Any], step: Any = None) -> None:
        if "fastcheck/events" in metrics:
            self.rows.append((step, metrics))


def fit(model: Model, *callbacks: Any, rate: float = 0.0, **options: Any) -> Any:
    torch.manual_seed(1)
    data = torch.utils.data.DataLoader(torch.randn(24, 8), batch_size=4)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if rate:
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    trainer = composer.Trainer(
        model=model,
        train_dataloader=data,
        optimizers=optimizer,
        callbacks=list(callbacks),
        device="cpu",
        progress_bar=False,
        **{"max_duration": "6ba", **options},
    )
    _trainers.append(trainer)
    trainer.fit()
    return trainer


@pytest.mark.parametrize("micro", [4, 2])
def test_losses_and_weights_are_the_same(micro: int) -> None:
    plain, watched = Model(), Model()
    callback = fastcheck.callbacks.Composer()
    fit(plain, device_train_microbatch_size=micro)
    fit(watched, callback, device_train_microbatch_size=micro)
    assert plain.losses == watched.losses and len(plain.losses) == 24 // micro
    for one, other in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one, other)
    assert callback.monitor is not None and callback.monitor.events == ()
    assert callback.monitor.step_index == 5


def test_a_fault_stops_the_fit() -> None:
    model, callback = Model(bad_batch=3), fastcheck.callbacks.Composer()
    with pytest.raises(fastcheck.OverflowDetected) as caught:
        fit(model, callback)
    assert caught.value.step == 3
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_scalars_reach_the_loggers_and_the_sinks_that_are_given() -> None:
    logger, kept = Logger(), Kept()
    fit(Model(), fastcheck.callbacks.Composer(), loggers=logger)
    assert [step for step, _ in logger.rows][-1] == 5 and "fastcheck/loss" in logger.rows[-1][1]
    fit(Model(), fastcheck.callbacks.Composer(sinks=kept))
    assert [step for step, _ in kept.rows] == list(range(6))


@pytest.mark.parametrize("seal", ["mark", "refuse", False])
def test_checkpoints_are_sealed(seal: Any) -> None:
    """Those of the trainer's interval, and those that the program asks for."""
    model, callback = Model(), fastcheck.callbacks.Composer(seal=seal)
    trainer = fit(model, callback, save_folder="saved", save_interval="2ba")
    files = sorted(path for path in Path("saved").glob("*.pt") if not path.is_symlink())
    trainer.save_checkpoint("own/{batch}.pt")
    trainer.close()
    trainer.save_checkpoint("own/later.pt")
    assert len(files) == 3 and Path("own/later.pt").exists()
    for file in [*files, Path("own/6.pt")]:
        if not seal:
            assert not Path(f"{file}.fastcheck.json").exists()
            continue
        found = fastcheck.verify(str(file), trust=True)
        assert found and found.equal == len(model.state_dict()) and f"{found.step}" in file.name
    assert not Path("own/later.pt.fastcheck.json").exists(), "the trainer was closed"


@pytest.mark.parametrize("seal", ["mark", "refuse"])
def test_a_checkpoint_that_is_not_finite(seal: str) -> None:
    class Break(composer.Callback):  # type: ignore[misc,name-defined]  # untyped
        def batch_end(self, state: Any, logger: Any) -> None:
            if state.timestamp.batch == 4:
                with torch.no_grad():
                    state.model.net.head.bias[0] = float("inf")

    callback = fastcheck.callbacks.Composer(seal=seal, overflow_nums=-1)
    options: dict[str, Any] = {"save_folder": "saved", "save_interval": "2ba"}
    bad = Path("saved/ep0-ba4-rank0.pt")
    if seal == "refuse":
        with pytest.raises(fastcheck.NonFiniteWeightsError, match=r"ba4-rank0.pt is not written"):
            fit(Model(), Break(), callback, **options)
        assert not bad.exists() and Path("saved/ep0-ba2-rank0.pt").exists()
        return
    fit(Model(), Break(), callback, **options)
    found = fastcheck.verify(str(bad), trust=True)
    assert not found and found.nonfinite["net.head.bias"] == 1 and found.verdict == "non-finite"


def test_another_trainers_checkpoints_are_left_alone() -> None:
    fit(Model(), fastcheck.callbacks.Composer())
    fit(Model(), save_folder="saved", save_interval="3ba")
    assert list(Path("saved").glob("*.pt")) and not list(Path("saved").glob("*.json"))


def test_the_option_seal_is_checked() -> None:
    with pytest.raises(fastcheck.ConfigError, match="unknown seal"):
        fastcheck.callbacks.Composer(seal="always")


class Checkpointed(Model):
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(super().forward, batch, use_reentrant=False)  # type: ignore[no-any-return]  # untyped


@pytest.mark.parametrize(
    ("make", "options"),
    [(Model, {"compile_config": {"backend": "eager"}}), (Checkpointed, {})],
    ids=["compiled", "gradient checkpointing"],
)
def test_losses_are_the_same_with_what_changes_the_step(make: Any, options: Any) -> None:
    """Not with mixed precision: Composer refuses it on a CPU."""
    plain, watched, callback = make(), make(), fastcheck.callbacks.Composer()
    fit(plain, **options)
    fit(watched, callback, **options)
    assert plain.losses == watched.losses
    monitor = callback.monitor
    assert monitor is not None and monitor.event_count == 0
    sites = {monitor.sites[r["site"]] for r in monitor.records()}
    assert ("net.blocks.1", "output") in {(site.module, site.role) for site in sites}


def test_a_weight_that_overflows_in_float16_is_named() -> None:
    model = Model()
    model.net.head.half()
    model.net.head.register_forward_pre_hook(lambda module, inputs: (inputs[0].half(),))
    overflow_at_update(model.net.head.bias)
    with pytest.raises(fastcheck.OverflowDetected) as caught:
        fit(model, fastcheck.callbacks.Composer(), rate=100.0)
    assert caught.value.step == 1 and where(caught.value.culprit)[:3] == (
        "net.head",
        "param",
        "bias",
    )


def test_steps_go_on_after_a_resume() -> None:
    fit(Model(), save_folder="saved", save_interval="2ba", max_duration="2ba")
    model = Model(bad_batch=2)  # the fifth batch of the whole training
    with pytest.raises(fastcheck.OverflowDetected) as caught:
        fit(model, fastcheck.callbacks.Composer(), load_path="saved/ep0-ba2-rank0.pt")
    assert caught.value.step == 4
