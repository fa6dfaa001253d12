"""The callback in real runs of transformers.Trainer, of a tiny Llama made from a config."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import pytest
import torch

import fastcheck
from fastcheck.log.reader import read_batches
from support.programs.training import overflow_at_update, where
from support.trackers import Kept
from support.trainers import in_lab, scaled_on_cpu

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = [
    pytest.mark.usefixtures("fresh_start"),
    # What transformers and accelerate warn of themselves.
    pytest.mark.filterwarnings("default:::(?!fastcheck)"),
]


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, 64, (8,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=64,
    )
    return transformers.LlamaForCausalLM(config)


class Poison(transformers.TrainerCallback):  # type: ignore[misc]  # its base is Any where transformers is missing
    """Puts a NaN into what layer 1's MLP reads in one step."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.is_due = False

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        def spoil(module: Any, inputs: Any) -> Optional[tuple[Any, ...]]:
            if not self.is_due:
                return None
            self.is_due = False
            spoilt = inputs[0].clone()
            spoilt[0, 0, 0] = float("nan")
            return (spoilt, *inputs[1:])

        model.model.layers[1].mlp.register_forward_pre_hook(spoil)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.is_due = state.global_step == self.step


def trainer(model: Any, *callbacks: Any, steps: int = 6, **options: Any) -> Any:
    arguments = transformers.TrainingArguments(
        "out",
        max_steps=steps,
        per_device_train_batch_size=4,
        logging_steps=1,
        use_cpu=True,
        disable_tqdm=True,
        **{"report_to": "none", "save_strategy": "no", **options},
    )
    return transformers.Trainer(model, arguments, train_dataset=Tokens(), callbacks=list(callbacks))


def losses(run: Any) -> list[float]:
    return [row["loss"] for row in run.state.log_history if "loss" in row]


@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=in_lab), 2])
def test_losses_and_weights_are_the_same(accumulation: int) -> None:
    plain, watched = llama(), llama()
    callback = fastcheck.callbacks.HuggingFace(log_dir="log")
    bare = trainer(plain, gradient_accumulation_steps=accumulation)
    bare.train()
    observed = trainer(watched, callback, gradient_accumulation_steps=accumulation)
    observed.train()
    assert losses(bare) == losses(observed) and len(losses(bare)) == 6
    for one, other in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one, other)
    assert callback.monitor is not None and callback.monitor.events == ()
    assert set(callback.monitor.records()["step"]) == set(range(6))
    last = f"{5 * accumulation}" + (f" to {6 * accumulation - 1}" if accumulation > 1 else "")
    assert read_batches("log", 0)[5] == f"{last} of epoch 0"


def test_a_fault_stops_before_the_update_and_the_checkpoint() -> None:
    model, callback = llama(), fastcheck.callbacks.HuggingFace()
    run = trainer(model, Poison(3), callback, save_strategy="steps", save_steps=1)
    with pytest.raises(fastcheck.OverflowDetected) as caught:
        run.train()
    assert caught.value.step == 3 == run.state.global_step
    assert caught.value.report.batch == "3 of epoch 0"
    assert caught.value.culprit.site.module.startswith("model.layers.1.mlp")
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    assert sorted(path.name for path in Path("out").iterdir()) == [
        "checkpoint-1",
        "checkpoint-2",
        "checkpoint-3",
    ]


def test_steps_go_on_after_a_resume() -> None:
    trainer(llama(), steps=4, save_strategy="steps", save_steps=4).train()
    callback = fastcheck.callbacks.HuggingFace()
    run = trainer(llama(), Poison(6), callback, steps=8)
    with pytest.raises(fastcheck.OverflowDetected) as caught:
        run.train(resume_from_checkpoint="out/checkpoint-4")
    assert caught.value.step == 6
    assert caught.value.report.batch == "6 of epoch 0"


def test_a_second_training_is_observed_anew() -> None:
    callback, poison = fastcheck.callbacks.HuggingFace(), Poison(1)
    run = trainer(llama(), poison, callback)
    with pytest.raises(fastcheck.OverflowDetected):
        run.train()
    first, poison.step = callback.monitor, -1
    run.train()
    assert callback.monitor is not first and callback.monitor is not None
    assert callback.monitor.events == () and callback.monitor.step_index == 5


def test_options_are_those_of_install() -> None:
    callback = fastcheck.callbacks.HuggingFace(overflow_nums=0)
    with pytest.raises(fastcheck.ConfigError, match="overflow_nums"):
        trainer(llama(), callback).train()


def test_checkpoints_are_sealed() -> None:
    model, callback = llama(), fastcheck.callbacks.HuggingFace()
    trainer(model, callback, steps=4, save_strategy="steps", save_steps=2).train()
    for step in (2, 4):
        found = fastcheck.verify(f"out/checkpoint-{step}")
        assert found and found.step == step and found.verdict == "finite", found
        assert found.equal == len(model.state_dict())
    shutil.copy("out/checkpoint-2/model.safetensors", "out/checkpoint-4/model.safetensors")
    assert "model.norm.weight" in fastcheck.verify("out/checkpoint-4").differing


class Break(transformers.TrainerCallback):  # type: ignore[misc]  # its base is Any where transformers is missing
    """Writes an infinity to a weight after an update, as a wrong optimizer would."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        if state.global_step == 1:
            with torch.no_grad():
                model.model.norm.weight[3] = float("inf")


@pytest.mark.parametrize("seal", ["mark", "refuse", False])
def test_a_checkpoint_that_is_not_finite(seal: Any) -> None:
    callback = fastcheck.callbacks.HuggingFace(seal=seal)
    run = trainer(llama(), Break(), callback, steps=2, save_strategy="steps", save_steps=2)
    if seal == "refuse":
        with pytest.raises(fastcheck.NonFiniteWeightsError, match="step 2 is not written"):
            run.train()
        assert not Path("out/checkpoint-2").exists()
        return
    run.train()
    assert Path("out/checkpoint-2/fastcheck.json").exists() is bool(seal)
    if seal:
        found = fastcheck.verify("out/checkpoint-2")
        assert not found and found.nonfinite["model.norm.weight"] == 1
        assert found.verdict == "non-finite" and found.differing == {}


def test_weights_that_cannot_be_read_are_saved_with_a_warning() -> None:
    """They do not keep the others from being checked."""
    callback = fastcheck.callbacks.HuggingFace(seal="refuse")
    model = torch.nn.Module()
    model.far = torch.nn.Parameter(torch.ones(2, device="meta"))
    model.near = torch.nn.Parameter(torch.ones(2))

    def end_a_step() -> None:
        state = transformers.TrainerState(global_step=3)
        control = transformers.TrainerControl(should_save=True)
        arguments = transformers.TrainingArguments("out", use_cpu=True)
        callback.on_step_end(arguments, state, control, model=model)

    with pytest.warns(fastcheck.FastcheckWarning, match="far is saved unchecked: .*meta"):
        end_a_step()
    model.near.data[0] = float("nan")
    with pytest.raises(fastcheck.NonFiniteWeightsError, match=r"got: +near"):
        end_a_step()


def test_the_option_seal_is_checked() -> None:
    with pytest.raises(fastcheck.ConfigError, match="unknown seal"):
        fastcheck.callbacks.HuggingFace(seal="always")


def test_a_seal_that_fails_does_not_end_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("fastcheck.callbacks.seals.seal", fail)
    run = trainer(
        llama(), fastcheck.callbacks.HuggingFace(), steps=2, save_strategy="steps", save_steps=2
    )
    with pytest.warns(fastcheck.FastcheckWarning, match="not sealed: OSError: No space"):
        run.train()
    assert run.state.global_step == 2


def test_scalars_reach_the_trackers_that_the_trainer_reports_to() -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = trainer(llama(), fastcheck.callbacks.HuggingFace(), steps=3, report_to="tensorboard")
    run.train()
    events = EventAccumulator("out/runs/fastcheck")
    events.Reload()
    found = events.Scalars("fastcheck/loss")
    assert [e.step for e in found] == [0, 1, 2]
    assert [round(e.value, 4) for e in found] == [round(loss, 4) for loss in losses(run)]


def test_sinks_that_are_given_take_the_place_of_the_trackers() -> None:
    pytest.importorskip("tensorboard")
    kept = Kept()
    callback = fastcheck.callbacks.HuggingFace(sinks=kept)
    trainer(llama(), callback, steps=2, report_to="tensorboard").train()
    assert [step for step, _ in kept.rows] == [0, 1] and not Path("out/runs/fastcheck").exists()


def same_with_and_without(
    make: Callable[..., Any] = trainer, **options: Any
) -> tuple[Any, fastcheck.Monitor]:
    """Two trainings of two steps with the same losses and weights; the observed one, and its
    monitor.
    """
    plain, watched = llama(), llama()
    callback = fastcheck.callbacks.HuggingFace()
    bare, observed = make(plain, steps=4, **options), make(watched, callback, steps=4, **options)
    bare.train()
    observed.train()
    assert losses(bare) == losses(observed) and len(losses(bare)) == 4
    for one, other in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one, other)
    assert callback.monitor is not None and callback.monitor.event_count == 0
    return observed, callback.monitor


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"torch_compile": True, "torch_compile_backend": "eager"}, marks=in_lab),
        {"gradient_checkpointing": True},
        pytest.param({"bf16": True}, marks=in_lab),
    ],
    ids=["compiled", "gradient checkpointing", "bf16"],
)
def test_options_of_the_trainer(options: dict[str, Any]) -> None:
    _, monitor = same_with_and_without(**options)
    outputs = {monitor.sites[r["site"]] for r in monitor.records() if r["step"] == 3}
    assert ("model.layers.1.mlp.down_proj", "output") in {
        (site.module, site.role) for site in outputs
    }


def with_scaler(*args: Any, **options: Any) -> Any:
    return scaled_on_cpu(trainer(*args, fp16=True, **options), init_scale=2.0**26)


def test_steps_that_the_scaler_skips_are_no_events() -> None:
    """The scaled gradients overflow until the scale has come down."""
    _, monitor = same_with_and_without(with_scaler)
    rows = monitor.step_table()
    assert rows[0].overflow and [row.scale for row in rows[:2]] == [2.0**26, 2.0**25]
    assert {event.verdict for event in monitor.events} == {fastcheck.types.Verdict.SCALED}


def test_a_weight_that_overflows_in_float16_is_named() -> None:
    callback = fastcheck.callbacks.HuggingFace()
    model = llama().half()
    overflow_at_update(model.model.norm.weight)
    run = trainer(model, callback, optim="sgd", learning_rate=100.0, max_grad_norm=0.0)
    with pytest.raises(fastcheck.OverflowDetected) as caught:
        run.train()
    culprit = caught.value.culprit
    assert caught.value.step == 1 and where(culprit)[:3] == ("model.norm", "param", "weight")
    assert culprit.record["posinf_count"] == 32
