"""Tests for the Hugging Face callback in TRL's trainers, on a tiny Llama; skipped without TRL."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fastcheck
from support.processes import run_python
from support.programs.training import overflow_at_update, poison, where
from support.tiny_llama import TEXTS, llama, tokenizer
from support.trainers import scaled_on_cpu

for _name in ("trl", "datasets", "tokenizers"):
    pytest.importorskip(_name)
transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.usefixtures("fresh_start"),
    pytest.mark.filterwarnings("default:::(?!fastcheck)"),
]


def options(**more: Any) -> dict[str, Any]:
    return {
        "output_dir": "out",
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "report_to": "none",
        "save_strategy": "no",
        **more,
    }


def sft(model: Any, *callbacks: Any, **more: Any) -> Any:
    trl: Any = importlib.import_module("trl")
    datasets: Any = importlib.import_module("datasets")
    return trl.SFTTrainer(
        model,
        args=trl.SFTConfig(**options(max_length=16, **more)),
        train_dataset=datasets.Dataset.from_dict({"text": TEXTS}),
        processing_class=tokenizer(),
        callbacks=list(callbacks),
    )


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


def grpo(model: Any, *callbacks: Any) -> Any:
    trl: Any = importlib.import_module("trl")
    datasets: Any = importlib.import_module("datasets")
    arguments = options(num_generations=2, max_completion_length=4)
    return trl.GRPOTrainer(
        model,
        reward_funcs=reward,
        args=trl.GRPOConfig(**arguments),
        train_dataset=datasets.Dataset.from_dict({"prompt": TEXTS}),
        processing_class=tokenizer(),
        callbacks=list(callbacks),
    )


def losses(run: Any) -> list[float]:
    return [row["loss"] for row in run.state.log_history if "loss" in row]


@pytest.mark.parametrize("make", [sft, grpo])
def test_losses_and_weights_are_the_same(make: Any) -> None:
    """GRPO generates between the updates, with the same model."""
    plain, watched, callback = llama(), llama(), fastcheck.callbacks.HuggingFace()
    bare = make(plain)
    bare.train()
    observed = make(watched, callback)
    observed.train()
    assert losses(bare) == losses(observed) and len(losses(bare)) == 3
    for one, other in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one, other)
    changed = [not torch.equal(*pair) for pair in zip(plain.parameters(), llama().parameters())]
    assert any(changed), "the rewards differ, and so there is something to learn"
    assert callback.monitor is not None and callback.monitor.events == ()
    assert callback.monitor.step_index == 2
    assert set(callback.monitor.records()["step"]) == {0, 1, 2}


class Poison(transformers.TrainerCallback):  # type: ignore[misc,name-defined]  # untyped
    """Puts a NaN into what layer 1's MLP reads, from one step on."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        if state.global_step == self.step:
            layer = model.model.layers[1].mlp
            layer.register_forward_pre_hook(
                lambda module, inputs: (poison(inputs[0]),) if module.training else None
            )


@pytest.mark.parametrize("make", [sft, grpo])
def test_a_fault_stops_before_the_update(make: Any) -> None:
    model = llama()
    run = make(model, Poison(1), fastcheck.callbacks.HuggingFace())
    with pytest.raises(fastcheck.OverflowDetected) as caught:
        run.train()
    assert caught.value.step == 1 == run.state.global_step
    assert where(caught.value.culprit)[0].startswith("model.layers.1.mlp")
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def with_scaler(*args: Any, **more: Any) -> Any:
    return scaled_on_cpu(sft(*args, fp16=True, **more), init_scale=2.0**26)


@pytest.mark.parametrize(
    ("make", "more"),
    [
        (sft, {"gradient_accumulation_steps": 2}),
        (sft, {"gradient_checkpointing": True}),
        (sft, {"gradient_checkpointing": False}),
        (sft, {"torch_compile": True, "torch_compile_backend": "eager"}),
        (with_scaler, {}),
    ],
    ids=["accumulation", "gradient checkpointing", "no checkpointing", "compiled", "fp16"],
)
def test_options_of_the_trainer(make: Any, more: dict[str, Any]) -> None:
    plain, watched, callback = llama(), llama(), fastcheck.callbacks.HuggingFace()
    bare, observed = make(plain, **more), make(watched, callback, **more)
    bare.train()
    observed.train()
    assert losses(bare) == losses(observed) and len(losses(bare)) == 3
    assert all(map(torch.equal, plain.parameters(), watched.parameters()))
    monitor = callback.monitor
    assert monitor is not None and monitor.event_count == 0 and monitor.step_index == 2
    sites = {monitor.sites[row["site"]] for row in monitor.records()}
    assert ("model.layers.1.mlp.down_proj", "output") in {
        (site.module, site.role) for site in sites
    }
    rows = monitor.step_table()
    if make is with_scaler:
        assert rows[0].overflow and [row.scale for row in rows[:2]] == [2.0**26, 2.0**25]
        assert {event.verdict for event in monitor.events} == {fastcheck.types.Verdict.SCALED}
    else:
        assert monitor.events == () and not any(row.overflow for row in rows)


def test_a_weight_that_overflows_in_float16_is_named() -> None:
    model = llama().half()
    overflow_at_update(model.model.norm.weight)
    callback = fastcheck.callbacks.HuggingFace()
    run = sft(model, callback, optim="sgd", learning_rate=100.0, max_grad_norm=0.0)
    with pytest.raises(fastcheck.OverflowDetected) as caught:
        run.train()
    assert caught.value.step == 1
    assert where(caught.value.culprit)[:3] == ("model.norm", "param", "weight")


def test_steps_go_on_after_a_resume() -> None:
    sft(llama(), max_steps=2, save_strategy="steps", save_steps=2).train()
    run = sft(llama(), Poison(3), fastcheck.callbacks.HuggingFace(), max_steps=5)
    with pytest.raises(fastcheck.OverflowDetected) as caught:
        run.train(resume_from_checkpoint="out/checkpoint-2")
    assert caught.value.step == 3 == run.state.global_step


def test_a_script_of_trl_writes_to_the_sinks_of_the_environment(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    for part in (llama(), tokenizer()):
        part.save_pretrained(tmp_path / "model")
    (tmp_path / "data").mkdir()
    lines = "\n".join(json.dumps({"text": text}) for text in TEXTS)
    (tmp_path / "data" / "train.jsonl").write_text(lines)
    given = {"model_name_or_path": "model", "dataset_name": "data", **options()}
    arguments = [word for name, value in given.items() for word in (f"--{name}", value)]
    done = run_python(
        *("-m", "fastcheck", "run", "-m", "trl.scripts.sft", *arguments),
        cwd=tmp_path,
        env={"FASTCHECK_SINKS": "prometheus:sft.prom", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert 'fastcheck_step{run="sft"} 2.0' in (tmp_path / "sft.prom").read_text()
