"""Two logs of one program that was run with other options: another loss scale, seed, wrapper of a
layer or part that is observed. None of these is a difference, and a fault beside them is one.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import fastcheck


def train(
    directory: Path,
    *,
    scale: float = 0.0,
    seed: int = 0,
    is_recomputed: bool = False,
    cast: bool = False,
    spoiled: bool = False,
    **options: Any,
) -> str:
    """``spoiled``: the gradient of what the second layer takes is wrong at step 2."""
    fastcheck.seed_all(seed)
    draw = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    model.append(nn.Linear(8, 4))
    for parameter in model.parameters():
        parameter.data.normal_(generator=draw)
    layer = model[2]
    if is_recomputed:
        model[2] = checkpoint_wrapper(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=bool(scale))
    with fastcheck.install(model, log_dir=directory, **options):
        for step in range(4):
            x = torch.randn(16, 8, generator=draw)
            optimizer.zero_grad()
            with torch.autocast("cpu") if cast else contextlib.nullcontext():
                if spoiled and step == 2:
                    hook = layer.register_full_backward_hook(lambda *given: (given[1][0] * 1.1,))
                loss = model(x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if spoiled and step == 2:
                hook.remove()
    return str(directory)


@pytest.mark.parametrize("scale", [0.0, 65536.0])
def test_gradients_are_divided_by_another_loss_scale(scale: float, tmp_path: Path) -> None:
    reference = train(tmp_path / "reference", scale=1024.0)
    found = fastcheck.compare(train(tmp_path / "actual", scale=scale), reference)
    mine = f"{scale:,g}" if scale else "none"
    assert found.agrees and not found.missing
    assert any(f"scale is {mine} in actual and 1,024 in reference" in note for note in found.notes)
    wrong = fastcheck.compare(train(tmp_path / "wrong", scale=scale, spoiled=True), reference)
    assert wrong.first is not None
    assert (wrong.first.row.step, wrong.first.row.name) == (
        2,
        "1 · backward · gradient of output[0]",
    )
    assert wrong.first.row.error == pytest.approx(0.1, rel=1e-4)


def test_a_hash_seed_is_a_note(tmp_path: Path) -> None:
    found = fastcheck.compare(
        train(tmp_path / "actual", seed=1), train(tmp_path / "reference", seed=0)
    )
    assert found.is_identical
    assert "variables.PYTHONHASHSEED is 1 in actual and 0 in reference: a seed" in found.notes


@pytest.mark.parametrize("rename", [None, {"2": "2"}])
def test_a_wrapper_of_a_layer_is_no_part_of_its_names(rename: Any, tmp_path: Path) -> None:
    sides = train(tmp_path / "wrapped", is_recomputed=True), train(tmp_path / "plain")
    assert fastcheck.compare(*sides, rename=rename).is_identical
    assert fastcheck.compare(*sides[::-1], rename=rename).is_identical
    state = {"layers.0.weight": torch.ones(3)}
    for inside in ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"):
        wrapped = {f"layers.0.{inside}.weight": torch.ones(3)}
        assert fastcheck.compare(wrapped, state).is_identical
        own = {f"layers.0.{inside}": "blocks.0"}
        renamed = {"blocks.0.weight": torch.ones(3)}
        assert fastcheck.compare(wrapped, renamed, rename=own).is_identical


@pytest.mark.parametrize("options", [{"include": ["2"]}, {"exclude": ["2.*"]}])
def test_parameters_of_modules_that_are_not_observed_are_in_their_groups(
    options: dict[str, Any], tmp_path: Path
) -> None:
    found = fastcheck.compare(train(tmp_path / "actual", **options), train(tmp_path / "reference"))
    assert found["hyper-parameters"].answer == "yes"
    assert found.counts["weights"]["only_reference"]


def test_steps_that_are_left_out_are_not_called_a_range(tmp_path: Path) -> None:
    found = fastcheck.compare(train(tmp_path / "actual", every=3), train(tmp_path / "reference"))
    assert found.steps == (0, 3) and "2 steps from 0 to 3" in str(found)
    assert found.notes == (
        "only reference has steps 1 to 2: not compared",
        "the two were recorded with other options of install(): every is 3 in actual and 1 in "
        "reference",
    )


def test_counts_alone_are_said_to_be_few(tmp_path: Path) -> None:
    found = fastcheck.compare(
        train(tmp_path / "actual", record="health"), train(tmp_path / "reference")
    )
    assert any("a side has the counts alone" in note for note in found.notes)


def test_another_dtype_is_the_cause_of_other_bits(tmp_path: Path) -> None:
    found = fastcheck.compare(
        train(tmp_path / "actual", cast=True), train(tmp_path / "reference"), accept=["dtype"]
    )
    (cause, *_) = found.advice
    assert cause.endswith("it is bfloat16 in actual and float32 in reference")
