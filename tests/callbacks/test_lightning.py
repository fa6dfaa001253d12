"""The callback in real runs of lightning.Trainer."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
from torch import nn

import fastcheck
from support.programs.training import overflow_at_update, where

lightning = pytest.importorskip("lightning")

pytestmark = [
    pytest.mark.usefixtures("fresh_start"),
    pytest.mark.filterwarnings("default:::(?!fastcheck)"),
]


class Program(lightning.LightningModule):  # type: ignore[misc]  # its base is Any where lightning is missing
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


def fit(
    program: Program, *callbacks: Any, steps: int = 6, resume: Optional[str] = None, **options: Any
) -> Any:
    torch.manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(32, 8))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"logger": False, "enable_checkpointing": False, **options},
    )
    trainer.fit(program, loader, loader, ckpt_path=resume)
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
    name = "5 of epoch 0" if accumulation == 1 else "2 of epoch 1, 3 of epoch 1"
    assert callback.monitor._core.meta.batches.of(5) == name


def test_a_fault_stops_the_fit() -> None:
    program, callback = Program(bad_step=3), fastcheck.callbacks.Lightning()
    with pytest.raises(fastcheck.OverflowDetected) as caught:
        fit(program, callback)
    assert caught.value.step == 3
    assert caught.value.report.batch == "3 of epoch 0"
    assert caught.value.culprit.site.module.startswith("layers")
    assert all(bool(parameter.isfinite().all()) for parameter in program.parameters())
    assert "removed" in repr(callback.monitor)


@pytest.fixture
def entry_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of pyproject.toml, as an installation writes them."""
    text = Path(__file__).resolve().parents[2].joinpath("pyproject.toml").read_text()
    group = "lightning.pytorch.callbacks_factory"
    (line,) = re.findall(rf'^\[project.entry-points."{group}"\]\n(.+)$', text, re.MULTILINE)
    folder = tmp_path / "site" / "own_fastcheck-1.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Name: own-fastcheck\nVersion: 1\n")
    (folder / "entry_points.txt").write_text(f"[{group}]\n{line.replace(chr(34), '')}\n")
    monkeypatch.syspath_prepend(str(folder.parent))


@pytest.mark.usefixtures("entry_points")
@pytest.mark.parametrize(("value", "own"), [("1", False), ("1", True), ("0", False)])
def test_the_environment_variable_adds_the_callback(
    value: str, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTCHECK", value)
    program = Program(bad_step=2)
    callbacks = [fastcheck.callbacks.Lightning(overflow_nums=-1)] if own else []
    if value == "0" or own:  # that of the program does not stop
        trainer = fit(program, *callbacks)
    else:
        with pytest.raises(fastcheck.OverflowDetected, match="layers"):
            fit(program)
        return
    found = [c for c in trainer.callbacks if isinstance(c, fastcheck.callbacks.Lightning)]
    assert [one for one in found if one.monitor is not None] == callbacks
    assert bool(found) is own


@pytest.mark.usefixtures("entry_points")
def test_without_the_environment_variable_nothing_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("FASTCHECK", raising=False)
    code = """
import importlib.metadata, sys
(point,) = importlib.metadata.distribution("own-fastcheck").entry_points
assert point.load()() == []
print({"fastcheck", "torch", "numpy"} & set(sys.modules))
"""
    command, env = [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": sys.path[0]}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


def test_validation_between_steps_changes_nothing() -> None:
    callback = fastcheck.callbacks.Lightning(log_dir="log")
    fit(Program(), callback, steps=12, val_check_interval=3)
    assert callback.monitor is not None and callback.monitor.step_index == 11


def test_scalars_reach_the_trainers_logger() -> None:
    logger = lightning.pytorch.loggers.CSVLogger("csv", flush_logs_every_n_steps=1)
    fit(Program(), fastcheck.callbacks.Lightning(), logger=logger, log_every_n_steps=2)
    with open(Path(logger.log_dir) / "metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("fastcheck/loss")]
    steps = [int(row["step"]) for row in rows]
    # Of several rows that are ready at once the youngest is written.
    assert steps == sorted(set(steps)) and steps[-1] == 5
    assert all(float(row["fastcheck/learning_rate"]) == 0.01 for row in rows)


def test_scalars_and_the_stop_reach_tensorboard() -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = lightning.pytorch.loggers.TensorBoardLogger("tb")
    with pytest.raises(fastcheck.OverflowDetected) as caught:
        fit(Program(bad_step=3), fastcheck.callbacks.Lightning(), logger=logger)
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    assert [e.step for e in events.Scalars("fastcheck/events")] == [0, 1, 2, 3]
    (text,) = events.Tensors("fastcheck/stop/text_summary")
    assert str(caught.value).splitlines()[0] in text.tensor_proto.string_val[0].decode()


def test_a_logger_that_fails_is_left_out() -> None:
    class Broken(lightning.pytorch.loggers.CSVLogger):  # type: ignore[misc]  # its base is Any where lightning is missing
        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            raise OSError("No space left on device")

    program = Program()
    with pytest.warns(fastcheck.FastcheckWarning, match="log_metrics: OSError: No space") as caught:
        fit(program, fastcheck.callbacks.Lightning(), logger=Broken("csv"), log_every_n_steps=1)
    assert len([w for w in caught if "no longer calls" in str(w.message)]) == 1
    assert len(program.losses) == 6


def checkpoints(**options: Any) -> Any:
    return lightning.pytorch.callbacks.ModelCheckpoint(
        "ckpt", save_top_k=-1, every_n_train_steps=2, save_last=True, **options
    )


def test_checkpoints_are_sealed() -> None:
    program = Program()
    fit(program, fastcheck.callbacks.Lightning(), checkpoints(), enable_checkpointing=True)
    files = sorted(Path("ckpt").glob("*.ckpt"))
    assert len(files) == 4  # three, and the last one again
    for file in files:
        found = fastcheck.verify(str(file))
        assert found and found.verdict == "finite" and found.equal == len(program.state_dict())
        assert file.stem == "last" or f"step={found.step}" in file.stem


@pytest.mark.parametrize("seal", ["mark", "refuse", False])
def test_a_checkpoint_that_is_not_finite(seal: Any) -> None:
    class Breaking(Program):
        def on_before_zero_grad(self, optimizer: Any) -> None:
            if self.global_step == 2:
                with torch.no_grad():
                    self.layers[2].bias[0] = float("inf")

    callback = fastcheck.callbacks.Lightning(seal=seal, overflow_nums=-1)
    options = {"enable_checkpointing": True, "steps": 4}
    if seal == "refuse":
        with pytest.raises(fastcheck.NonFiniteWeightsError, match="is not written"):
            fit(Breaking(), callback, checkpoints(), **options)
        assert not list(Path("ckpt").glob("*step=4*"))
        return
    fit(Breaking(), callback, checkpoints(), **options)
    seals = list(Path("ckpt").glob("*.fastcheck.json"))
    assert bool(seals) is bool(seal)
    if seal:
        found = fastcheck.verify("ckpt/last.ckpt")
        assert not found and "layers.2.bias" in found.nonfinite
        assert not any(name.startswith("callbacks") for name in found.nonfinite)


class Checkpointed(Program):
    """The activations of its layers are computed again in backward."""

    def training_step(self, batch: Any, index: int) -> Any:
        x = batch[0]
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        loss = x.square().mean()
        self.losses.append(float(loss.detach()))
        return loss


def compiled() -> Program:
    program = Program()
    program.layers.compile(backend="eager")
    return program


def scaled() -> Any:
    """On a CPU Lightning takes fp16 with a plugin that is made by hand."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17)
    return lightning.pytorch.plugins.MixedPrecision("16-mixed", device="cpu", scaler=scaler)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (compiled, dict),
        (Checkpointed, dict),
        (Program, lambda: {"precision": "bf16-mixed"}),
        (Program, lambda: {"plugins": [scaled()]}),
    ],
    ids=["compiled", "gradient checkpointing", "bf16", "fp16"],
)
def test_losses_are_the_same_with_what_changes_the_step(make: Any, options: Any) -> None:
    plain, watched, callback = make(), make(), fastcheck.callbacks.Lightning()
    fit(plain, **options())
    fit(watched, callback, **options())
    assert plain.losses == watched.losses
    for one, other in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one, other)
    monitor = callback.monitor
    assert monitor is not None and monitor.event_count == 0
    sites = {monitor.sites[r["site"]] for r in monitor.records()}
    assert ("layers.0", "output") in {(site.module, site.role) for site in sites}
    rows = monitor.step_table()
    if "plugins" in options():
        assert [(row.scale, row.overflow) for row in rows[:3]] == [
            (2.0**17, True),
            (2.0**16, True),
            (2.0**15, False),
        ]
        assert {event.verdict for event in monitor.events} == {fastcheck.types.Verdict.SCALED}
    else:
        assert not any(row.overflow for row in rows)


def test_a_weight_that_overflows_in_float16_is_named() -> None:
    class Steep(Program):
        def configure_optimizers(self) -> Any:
            overflow_at_update(self.layers[2].bias)
            return torch.optim.SGD(self.parameters(), lr=100.0)

    with pytest.raises(fastcheck.OverflowDetected) as caught:
        fit(Steep(), fastcheck.callbacks.Lightning(), precision="16-true")
    assert caught.value.step == 1
    assert where(caught.value.culprit)[:3] == ("layers.2", "param", "bias")


def test_steps_go_on_after_a_resume() -> None:
    fit(Program(), checkpoints(), enable_checkpointing=True, steps=4)
    program, callback = Program(bad_step=6), fastcheck.callbacks.Lightning()
    with pytest.raises(fastcheck.OverflowDetected) as caught:
        fit(program, callback, steps=8, resume="ckpt/last.ckpt")
    assert caught.value.step == 6 and len(program.losses) == 2
