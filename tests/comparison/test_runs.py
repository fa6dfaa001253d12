"""compare() of record logs finds the first difference in the right step and place."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from support.programs.compare_runs import (
    QUESTIONS,
    answers,
    assert_weight_gradient_is_first,
    fused_net,
    log_run,
    net_with,
    use_main_grad,
    zero_main_grad,
)


def test_two_hidden_differences_are_both_named_before_any_op(tmp_path: Path) -> None:
    def adam(beta2: float) -> Any:
        return lambda parameters: torch.optim.Adam(parameters, betas=(0.9, beta2))

    def shuffled(step: int, x: torch.Tensor) -> torch.Tensor:
        return x[torch.tensor([1, 0, 2, 3, 4, 5])] if step == 37 else x

    reference = log_run(tmp_path / "reference", steps=40, optimizer=adam(0.999))
    actual = log_run(tmp_path / "actual", steps=40, optimizer=adam(0.95), batch=shuffled)
    comparison = fastcheck.compare(actual, reference)
    assert not comparison.agrees
    assert [s._asdict() for s in comparison["hyper-parameters"].settings] == [
        {
            "path": "optimizers[0].groups[0].betas[1]",
            "actual": "0.95",
            "reference": "0.999",
        }
    ]
    found = comparison["batches"].found
    assert found is not None
    assert found.row.step == 37 and found.row.name == "the model · forward · input[0]"
    assert "1 of 80 tensors differ" in comparison["batches"].text
    assert answers(comparison) == {
        "environment": "yes",
        "hyper-parameters": "no",
        "batches": "no",
        "initial weights": "yes",
        **dict.fromkeys(QUESTIONS[4:], "not asked"),
    }
    report = str(comparison)
    assert "betas[1]" in report and "step 37" in report
    assert not re.search(r"optimizer · \S*weight", report)  # no op, no weight: these follow


def test_a_shuffled_batch_alone_is_found_where_weights_have_drifted_already(
    tmp_path: Path,
) -> None:
    """The update differs from step 0 on; the batch is still named by its own step."""
    reference = log_run(tmp_path / "reference", steps=6)
    actual = log_run(
        tmp_path / "actual",
        steps=6,
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.002),
        batch=lambda step, x: x.flip(0) if step == 4 else x,
    )
    comparison = fastcheck.compare(actual, reference, accept="hyper-parameters")
    assert comparison["hyper-parameters"].answer == "accepted"
    found = comparison["batches"].found
    assert found is not None and found.row.step == 4
    everything = fastcheck.compare(actual, reference, accept=["hyper-parameters", "batches"])
    assert everything.first is not None
    assert (everything.first.row.step, everything.first.row.phase.name) == (0, "UPDATE")


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_transposed_weight_gradient_is_named_at_its_step_and_nothing_earlier(
    tmp_path: Path, layer: int
) -> None:
    def run(name: str, wrong: Any) -> str:
        return log_run(
            tmp_path / name,
            steps=4,
            model=lambda: fused_net(wrong),
            before_forward=zero_main_grad,
            before_update=use_main_grad,
        )

    comparison = fastcheck.compare(run("actual", layer), run("reference", None))
    assert_weight_gradient_is_first(comparison, layer)
    assert comparison["forward"].text == "up to step 1, to the bit"
    assert f"{layer} · optimizer · gradient of {layer}.weight" in str(comparison)


def test_main_grad_is_in_the_log(tmp_path: Path) -> None:
    log = log_run(tmp_path / "log", steps=2, model=lambda: fused_net(None))
    sites = {str(site) for site in fastcheck.log.reader.read_log(log).sites.values()}
    assert "0 (FusedLinear) · optimizer · gradient of 0.weight.main_grad" in sites


def test_logs_of_op_level_name_the_op(tmp_path: Path) -> None:
    def run(name: str, by: float) -> str:
        return log_run(tmp_path / name, steps=3, model=net_with(2, by), level="op")

    reference = run("reference", 0.0)
    assert fastcheck.compare(run("same", 0.0), reference).is_identical
    comparison = fastcheck.compare(run("actual", 0.003), reference)
    first = comparison.first
    assert first is not None and comparison["forward"].answer == "no"
    assert (first.row.step, first.row.name) == (2, "2.aten.mul.Tensor · forward · output[0]")


def test_the_first_module_whose_outputs_differ_is_named(tmp_path: Path) -> None:
    actual = log_run(tmp_path / "actual", model=net_with(2, 0.003))
    reference = log_run(tmp_path / "reference", model=net_with(2, 0.0))
    comparison = fastcheck.compare(actual, reference)
    first = comparison.first
    assert first is not None and comparison["forward"].answer == "no"
    assert (first.row.step, first.row.name) == (2, "2 · forward · output[0]")
    assert first.exact_before and 0.0025 < first.row.error < 0.0035
    assert comparison["loss"].answer == "not asked"
    growth = {step.step: step.error for step in comparison.growth}
    assert growth[0] == growth[1] == 0 and growth[2] > 0.0025


def test_what_is_within_the_thresholds_agrees_and_says_where_the_bits_part(tmp_path: Path) -> None:
    actual = log_run(tmp_path / "actual", steps=3, model=net_with(1, 1e-6))
    reference = log_run(tmp_path / "reference", steps=3, model=net_with(1, 0.0))
    comparison = fastcheck.compare(actual, reference)
    assert comparison.verdict == "equal" and comparison.agrees and comparison.first is None
    inexact = comparison.first_inexact
    assert inexact is not None
    assert (inexact.row.step, inexact.row.name) == (1, "2 · forward · output[0]")
    strict = fastcheck.compare(actual, reference, exact=True)
    assert not strict.agrees and strict.first is not None
    assert strict.first.key == inexact.key
    tighter = fastcheck.compare(actual, reference, thresholds={"float32": 1e-8})
    assert not tighter.agrees


def test_other_first_weights_stop_the_questions(tmp_path: Path) -> None:
    actual = log_run(tmp_path / "actual", seed=1)
    reference = log_run(tmp_path / "reference", seed=0)
    comparison = fastcheck.compare(actual, reference)
    assert answers(comparison)["initial weights"] == "no"
    assert answers(comparison)["forward"] == "not asked"
    assert any("torch's seeds" in note for note in comparison.notes)
    accepted = fastcheck.compare(actual, reference, accept="weights")
    assert answers(accepted)["forward"] == "no"
    assert accepted.first is not None and accepted.first.row.step == 0
    asked = fastcheck.compare(actual, reference, ask_all=True)
    assert "not asked" not in answers(asked).values()


def test_an_update_that_differs_is_the_update_of_its_step(tmp_path: Path) -> None:
    """Parameters are read a step later than they are written; the forward after it only follows."""

    def meddle(step: int, model: nn.Module) -> None:
        if step == 2:
            with torch.no_grad():
                model.get_parameter("head.weight").add_(0.5)

    actual = log_run(tmp_path / "actual", before_forward=meddle)
    reference = log_run(tmp_path / "reference")
    comparison = fastcheck.compare(actual, reference)
    assert answers(comparison)["forward"] == "yes" and answers(comparison)["gradients"] == "yes"
    assert answers(comparison)["update"] == "no"
    assert comparison.first is not None
    assert comparison.first.row.step == 1
    assert comparison.first.row.name == "head · optimizer · head.weight"
    assert comparison.first.exact_before


def test_nonfinite_on_one_side_is_different_whatever_the_threshold(tmp_path: Path) -> None:
    def poison(step: int, model: nn.Module) -> None:
        if step == 1:
            gradient = model.get_parameter("head.weight").grad
            assert gradient is not None
            gradient[0, 0] = float("nan")

    actual = log_run(tmp_path / "actual", before_update=poison)
    reference = log_run(tmp_path / "reference")
    comparison = fastcheck.compare(actual, reference, thresholds={"float32": 1e9})
    first = comparison.first
    assert first is not None and first.row.reason == "NaN or infinities on one side"
    assert first.row.step == 1 and first.row.name == "head · optimizer · gradient of head.weight"
    assert json.dumps(comparison.to_dict(), allow_nan=False)


def test_an_environment_that_differs_is_named_and_may_be_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = log_run(tmp_path / "reference")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    actual = log_run(tmp_path / "actual")
    comparison = fastcheck.compare(actual, reference)
    assert [tuple(s) for s in comparison["environment"].settings] == [
        ("variables.NVIDIA_TF32_OVERRIDE", "1", "not there")
    ]
    assert answers(comparison)["forward"] == "not asked"
    accepted = fastcheck.compare(actual, reference, accept="environment")
    assert accepted.verdict == "equal"  # not identical: the environment is not
    assert "environment (accepted)" in str(accepted)


def test_an_environment_of_an_unknown_format_is_not_compared_and_a_note_says_so(
    tmp_path: Path,
) -> None:
    reference, actual = log_run(tmp_path / "reference"), log_run(tmp_path / "actual")
    meta = Path(actual, "meta-rank0.json")
    content = json.loads(meta.read_text())
    assert content["environment"]["format"] == 1
    content["environment"] = {"fastcheck": "environment", "format": 2, "versions": []}
    meta.write_text(json.dumps(content))
    comparison = fastcheck.compare(actual, reference)
    assert comparison["environment"].answer == "unknown" and comparison.agrees
    (note,) = (note for note in comparison.notes if "format 2" in note)
    assert note.startswith("actual: its environment is of format 2, which this version")


@pytest.mark.parametrize(
    ("actual", "reference", "texts"),
    [
        (0.1 + 0.2, 1 / 3, ("0.3", "0.333333")),
        (0.1 + 0.2, 0.3, ("0.30000000000000004", "0.3")),
    ],
)
def test_numbers_of_settings_have_as_many_digits_as_tell_them_apart(
    actual: float, reference: float, texts: tuple[str, str], tmp_path: Path
) -> None:
    sides = [
        log_run(tmp_path / name, optimizer=functools.partial(torch.optim.SGD, lr=rate))
        for name, rate in (("actual", actual), ("reference", reference))
    ]
    comparison = fastcheck.compare(*sides)
    assert [tuple(s) for s in comparison["hyper-parameters"].settings] == [
        ("optimizers[0].groups[0].lr", *texts)
    ]


def regression(
    directory: Path, *, target: Any = lambda step, y: y, factor: float = 1.0, scale: float = 1.0
) -> str:
    """Its targets are floats, as what it computes between model and criterion is."""
    torch.manual_seed(0)
    model, criterion = nn.Linear(8, 4), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(1)
    with fastcheck.install(
        model, criterion, training=fastcheck.Training(optimizer=optimizer), log_dir=directory
    ):
        for step in range(4):
            x, y = torch.randn(6, 8, generator=data), torch.randn(6, 4, generator=data)
            optimizer.zero_grad()
            out = model(x * (scale if step == 2 else 1.0))
            criterion(out * (factor if step == 2 else 1.0), target(step, y)).backward()
            optimizer.step()
    return str(directory)


def test_targets_are_a_batch_even_when_they_are_floats(tmp_path: Path) -> None:
    reference = regression(tmp_path / "reference")
    shuffled = regression(
        tmp_path / "shuffled", target=lambda step, y: y.flip(0) if step == 2 else y
    )
    found = fastcheck.compare(shuffled, reference)["batches"].found
    assert found is not None
    assert (found.row.step, found.row.name) == (2, "MSELoss · forward · input[1]")
    # After something computed has gone wrong, what the criterion reads follows from it.
    scaled = regression(tmp_path / "scaled", scale=1.5)
    comparison = fastcheck.compare(scaled, reference)
    batches = [row.name for row in comparison.rows if row.phase.name == "BATCHES"]
    assert batches == ["the model · forward · input[0]"]
    assert "MSELoss · forward · input[0]" in {
        row.name for row in comparison.rows if row.phase.name == "FORWARD"
    }
