"""compare() of record logs: what differs is found, in the right step and at the right place, and
nothing before it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from compare_runs import (
    QUESTIONS,
    answers,
    assert_weight_gradient_is_first,
    fused_net,
    log_run,
    use_main_grad,
    zero_main_grad,
)
from training import Net


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
    assert "optimizer · weight" not in report  # no op, no weight: these follow


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
    assert f"{layer} · optimizer · gradient of weight" in str(comparison)


def test_main_grad_is_in_the_log(tmp_path: Path) -> None:
    log = log_run(tmp_path / "log", steps=2, model=lambda: fused_net(None))
    sites = {str(site) for site in fastcheck._logread.read_log(log).sites.values()}
    assert "0 (FusedLinear) · optimizer · gradient of weight.main_grad" in sites


def test_logs_of_op_level_name_the_op(tmp_path: Path) -> None:
    def run(name: str, by: float) -> str:
        return log_run(tmp_path / name, steps=3, model=net_with(2, by), level="op")

    reference = run("reference", 0.0)
    assert fastcheck.compare(run("same", 0.0), reference).is_identical
    comparison = fastcheck.compare(run("actual", 0.003), reference)
    first = comparison.first
    assert first is not None and comparison["forward"].answer == "no"
    assert (first.row.step, first.row.name) == (2, "2.aten.mul.Tensor · forward · output[0]")


class _Wrong(nn.Module):
    """A linear layer that is right in all but one step."""

    def __init__(self, wrong_call: int, by: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.calls, self.wrong_call, self.by = 0, wrong_call, by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.linear(x)
        return y * (1 + self.by) if self.calls - 1 == self.wrong_call else y


def net_with(wrong_call: int, by: float) -> Any:
    return lambda: nn.Sequential(
        nn.Linear(8, 8), nn.Tanh(), _Wrong(wrong_call, by), nn.ReLU(inplace=True), nn.Linear(8, 4)
    )


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
    assert comparison.first.row.name == "head · optimizer · weight"
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
    assert first.row.step == 1 and first.row.name == "head · optimizer · gradient of weight"
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
    assert "environment, which you accept" in str(accepted)


def regression(
    directory: Path, *, target: Any = lambda step, y: y, factor: float = 1.0, scale: float = 1.0
) -> str:
    """Its targets are floats, as what it computes between model and criterion is."""
    torch.manual_seed(0)
    model, criterion = nn.Linear(8, 4), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(1)
    with fastcheck.install(model, criterion, optimizer=optimizer, log_dir=directory):
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


def test_names_that_differ_are_mapped(tmp_path: Path) -> None:
    class Renamed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.blocks = self.blocks, nn.ModuleList()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.body:
                x = self.dropout(block(x))
            return self.head(x)

    actual = log_run(tmp_path / "actual", model=Renamed)
    reference = log_run(tmp_path / "reference")
    unmapped = fastcheck.compare(actual, reference)
    assert not unmapped.agrees
    assert {one.name.split(" ")[0].split(".")[0] for one in unmapped.missing} == {"body", "blocks"}
    assert any("body.0.a · optimizer · weight is blocks.0.a" in note for note in unmapped.notes)
    mapping = tmp_path / "names.json"
    for rename in ({"body.*": "blocks.*"}, {"body": "blocks"}):
        mapping.write_text(json.dumps(rename))
        assert fastcheck.compare(actual, reference, rename=mapping).is_identical, rename
    with pytest.raises(fastcheck.ConfigError, match="did you mean 'body'"):
        fastcheck.compare(actual, reference, rename={"body": "blocks", "bodi": "blocks"})


def test_missing_and_extra_calls_are_tolerated_and_named(tmp_path: Path) -> None:
    class Twice(nn.Module):
        """Its middle layer runs once more in step 1, for nothing."""

        def __init__(self, extra: bool) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)
            self.extra, self.calls = extra, 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.extra and self.calls == 2:
                with torch.no_grad():
                    self.a(x * 7)
            return self.b(self.a(x))

    actual = log_run(tmp_path / "actual", model=lambda: Twice(True))
    reference = log_run(tmp_path / "reference", model=lambda: Twice(False))
    comparison = fastcheck.compare(actual, reference)
    assert {(one.name, one.count, one.first_step) for one in comparison.missing} == {
        ("a · forward · output[0]", 1, 1),
        ("a · forward · input[0]", 1, 1),
    }
    assert answers(comparison)["forward"] == "partly" and not comparison.agrees
    assert comparison.first is None  # the right calls were put together
    assert fastcheck.compare(actual, reference, accept="missing").agrees


def test_a_run_that_ends_earlier_agrees_as_far_as_it_goes(tmp_path: Path) -> None:
    actual = log_run(tmp_path / "actual", steps=3)
    reference = log_run(tmp_path / "reference", steps=5)
    comparison = fastcheck.compare(actual, reference)
    assert comparison.is_identical and comparison.steps == (0, 1, 2)
    assert "only reference has steps 3 to 4: not compared" in comparison.notes
    segment = Path(actual) / "records-rank0-000000.bin"
    data = segment.read_bytes()
    segment.write_bytes(data[: len(data) - 10 * 192 - 7])  # killed within step 2
    assert fastcheck.compare(actual, reference).is_identical


def test_a_log_without_checksums_agrees_as_far_as_the_statistics_tell(tmp_path: Path) -> None:
    runs = [log_run(tmp_path / name, record="stats") for name in ("actual", "reference")]
    comparison = fastcheck.compare(*runs)
    assert comparison.verdict == "equal"
    assert "as far as the statistics tell" in comparison["forward"].text
    full = log_run(tmp_path / "full")
    assert fastcheck.compare(runs[0], full).verdict == "equal"


def test_a_wider_dtype_is_named_and_may_be_accepted(tmp_path: Path) -> None:
    actual = log_run(tmp_path / "actual", dtype=torch.bfloat16)
    reference = log_run(tmp_path / "reference")
    comparison = fastcheck.compare(actual, reference)
    found = comparison["batches"].found
    assert found is not None and found.row.reason == "other dtypes"
    accepted = fastcheck.compare(actual, reference, accept="dtype")
    assert answers(accepted)["initial weights"] == "yes"
    assert any("are bfloat16 in actual and float32 in reference" in n for n in accepted.notes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accept": "enviroment"}, "did you mean 'environment'"),
        ({"thresholds": {"bf16": 0.1}}, "expected: a dtype"),
        ({"thresholds": {"bfloat16": -1}}, "a relative error of 0 or more"),
        ({"rename": "mindspoor"}, "did you mean 'mindspore'"),
        ({"rename": "nowhere.json"}, "the mapping file can't be read"),
        ({"rename": {"a": "b.*"}}, r"more \* on the right"),
        ({"rename": {"": "b"}}, "not a pair of names"),
    ],
)
def test_options_that_cannot_be_used_say_so(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    log = log_run(tmp_path / "log", steps=1)
    with pytest.raises(fastcheck.ConfigError, match=message):
        fastcheck.compare(log, log, **options)


def test_sides_that_cannot_be_compared_say_so(tmp_path: Path) -> None:
    log = log_run(tmp_path / "log", steps=1)
    for other, message in (
        (tmp_path / "nothing", "is not there"),
        (tmp_path, "different kinds|nothing that can be compared"),
        ({"a": torch.ones(2)}, "different kinds"),
        (fastcheck.environment(), "different kinds"),
        (3, "nothing that can be compared"),
    ):
        if other == tmp_path:
            other = tmp_path / "empty"
            other.mkdir()
        with pytest.raises(fastcheck.CompareError, match=message):
            fastcheck.compare(other, log)
    with pytest.raises(fastcheck.CompareError, match="has no logg: did you mean 'log'") as caught:
        fastcheck.compare(tmp_path / "logg", log)
    assert str(tmp_path) in str(caught.value)
    with pytest.raises(fastcheck.CompareError, match="nowhere is not there either"):
        fastcheck.compare(tmp_path / "nowhere" / "log", log)
    with pytest.raises(fastcheck.CompareError, match="nothing in common"):
        fastcheck.compare({"a": torch.ones(2)}, {"b": torch.ones(2)})


def test_a_log_limit_that_has_evicted_the_beginning_is_said(tmp_path: Path) -> None:
    """Wherever in a step the oldest segment that is left begins."""
    limited = log_run(tmp_path / "limited", steps=12, log_limit=64 * 1024)
    whole = log_run(tmp_path / "whole", steps=12)
    segments = sorted(Path(limited).glob("records-rank0-*.bin"))
    firsts = set()
    while len(segments) > 2:
        comparison = fastcheck.compare(limited, whole)
        assert comparison.is_identical, str(comparison)
        assert comparison.steps[0] > 0 and comparison.steps[-1] == 11
        assert any("log_limit has evicted" in note for note in comparison.notes)
        firsts.add(comparison.steps[0])
        segments.pop(0).unlink()
    assert len(firsts) > 2
