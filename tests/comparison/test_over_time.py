"""compare() over time: paired steps, what did not change, and where two losses drift apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fastcheck
from fastcheck.cli.main import main
from support.programs.compare_runs import log_run, net_with


def frozen() -> torch.nn.Module:
    model = net_with(9, 0.0)()
    model.get_parameter("0.weight").requires_grad_(False)
    model.get_parameter("0.bias").requires_grad_(False)
    return model


def test_two_iterations_of_one_run_show_what_did_not_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = log_run(tmp_path / "log", steps=6, model=frozen)
    comparison = fastcheck.compare(log, log, steps="1:4")
    assert not comparison.agrees and comparison.steps == (4,)
    assert {name for name in comparison.unchanged if name.startswith("0 · optimizer")} == {
        "0 · optimizer · 0.weight",
        "0 · optimizer · 0.bias",
    }
    # Both read their own batch; all the same everything is asked.
    assert comparison["batches"].answer == "no" and comparison["update"].answer != "not asked"
    assert main(["compare", log, log, "--steps", "1:4"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "names are equal to the bit" in printed and "0 · optimizer · 0.weight" in printed
    same = fastcheck.compare(log, log, steps=[(2, 2), (3, 3)])
    assert same.is_identical and same.steps == (2, 3) and not same.unchanged


def test_the_only_step_of_each_side_is_paired(tmp_path: Path) -> None:
    def dump(step: int) -> Path:
        with fastcheck.Dumper(tmp_path / str(step), step=step):
            torch.ones(8) * (step + 1)
        return tmp_path / str(step)

    comparison = fastcheck.compare(dump(3), dump(7))
    assert comparison.first is not None and "aten.mul" in comparison.first.row.name
    assert "step 3 of actual is compared with step 7" in str(comparison)
    assert any("aten.ones" in name for name in comparison.unchanged)


def test_steps_that_are_not_there_are_named(tmp_path: Path) -> None:
    log = log_run(tmp_path / "log", steps=3)
    with pytest.raises(fastcheck.CompareError, match="steps 0 to 2 in actual"):
        fastcheck.compare(log, log, steps="1:9")
    for wrong in ("one", "1:2:3", [(1,)], 3):
        with pytest.raises(fastcheck.ConfigError, match="steps= is not a list of pairs of steps"):
            fastcheck.compare(log, log, steps=wrong)


def test_from_which_step_on_two_losses_drift_apart(tmp_path: Path) -> None:
    def sgd(rate: float) -> Any:
        return lambda parameters: torch.optim.SGD(parameters, lr=rate)

    reference = log_run(tmp_path / "reference", steps=20, optimizer=sgd(0.1))
    actual = log_run(tmp_path / "actual", steps=20, optimizer=sgd(0.12))
    comparison = fastcheck.compare(actual, reference)
    errors = [loss.error for loss in comparison.losses]
    assert len(errors) == 20 and errors[0] == 0
    expected = next(step for step, error in enumerate(errors) if error > 0.01)
    assert comparison.drifts_from == expected > 0
    report = str(comparison)
    assert f"drifts apart from step {expected} on" in report
    rows = [line.split() for line in report[report.index("drifts apart") :].splitlines()[2:]]
    shown = [int(row[0]) for row in rows if row and row[0].isdigit()]
    assert {0, 1, expected, 19} <= set(shown) and len(shown) <= 12
    assert fastcheck.compare(actual, reference, loss_drift=10.0).drifts_from is None
    assert fastcheck.compare(actual, actual).to_dict()["losses"][19]["error"] == 0


def scheduled(directory: Path, *, warmup: int = 20, clip: float = 1.0, clip_from: int = 0) -> Path:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with fastcheck.install(
        model, training=fastcheck.Training(optimizer=optimizer), log_dir=directory
    ):
        for step in range(30):
            optimizer.param_groups[0]["lr"] = 0.1 if step < 5 else 0.05 if step < warmup else 0.01
            optimizer.zero_grad()
            model(torch.ones(3, 4)).square().sum().backward()
            limit = clip if step >= clip_from else 1.0
            torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
    return directory


def test_schedules_that_part_are_named_with_both_values(tmp_path: Path) -> None:
    reference = scheduled(tmp_path / "reference")
    assert fastcheck.compare(scheduled(tmp_path / "same"), reference).is_identical
    late = fastcheck.compare(scheduled(tmp_path / "late", warmup=23), reference)
    assert [tuple(setting) for setting in late["hyper-parameters"].settings] == [
        ("optimizers[0].groups[0].lr from step 20 on", "0.05", "0.01")
    ]
    clipped = fastcheck.compare(scheduled(tmp_path / "clip", clip=0.5, clip_from=7), reference)
    assert [tuple(setting) for setting in clipped["hyper-parameters"].settings] == [
        ("clipping.threshold from step 7 on", "0.5", "1")
    ]
    lines = (tmp_path / "reference" / "schedule-rank0.jsonl").read_text().splitlines()
    assert len(lines) == 3  # the threshold, and two changes of the rate


def test_a_schedule_beyond_the_end_of_the_other_side_is_no_difference(tmp_path: Path) -> None:
    def short(directory: Path, steps: int) -> str:
        def drop(step: int, model: torch.nn.Module) -> None:
            if step == 5:
                made[-1].param_groups[0]["lr"] = 0.01

        made: list[torch.optim.Optimizer] = []

        def optimizer(parameters: Any) -> torch.optim.Optimizer:
            made.append(torch.optim.SGD(parameters, lr=0.1))
            return made[-1]

        return log_run(directory, steps=steps, optimizer=optimizer, before_update=drop)

    whole, cut = short(tmp_path / "whole", 8), short(tmp_path / "cut", 4)
    assert fastcheck.compare(whole, cut)["hyper-parameters"].answer == "yes"
    assert fastcheck.compare(cut, whole)["hyper-parameters"].answer == "yes"


def test_environments_of_several_ranks_differ_in_more_than_their_processes(tmp_path: Path) -> None:
    """Where and when a rank ran explains no difference."""
    one, other = (log_run(tmp_path / name, steps=2) for name in ("one", "other"))
    for number, log in enumerate((one, other)):
        for kind in ("meta", "sites", "records"):
            for path in list(Path(log).glob(f"{kind}-rank0*")):
                text = path.read_bytes().replace(b'"pid": ', b'"pid": 1%d' % number)
                path.with_name(path.name.replace("rank0", "rank1")).write_bytes(text)
    comparison = fastcheck.compare(one, other)
    assert comparison["environment"].answer == "yes" and comparison.is_identical


def test_the_first_place_is_the_first_of_all_ranks(tmp_path: Path) -> None:
    """Rank 0 differs a step later than rank 1, or later within the step."""

    def both(name: str, ranks: tuple[str, str]) -> Path:
        place = tmp_path / name
        place.mkdir()
        for number, log in enumerate(ranks):
            for path in Path(log).glob("*-rank0*"):
                (place / path.name.replace("rank0", f"rank{number}")).write_bytes(path.read_bytes())
        return place

    def run(name: str, wrong: int, bias: str = "") -> str:
        def change(step: int, model: torch.nn.Module) -> None:
            if bias and step == wrong:
                gradient = model.get_parameter(bias).grad
                assert gradient is not None
                gradient.mul_(1.5)

        made = net_with(9 if bias else wrong, 0.01)
        return log_run(tmp_path / name, steps=4, model=made, before_update=change)

    right, late, early = run("right", 9), run("late", 2), run("early", 1)
    reference = both("reference", (right, right))
    first = fastcheck.compare(both("steps", (late, early)), reference).first
    assert first is not None and (first.row.step, first.row.rank) == (1, 1)
    backward = run("backward", 1, "0.bias")
    first = fastcheck.compare(both("places", (backward, early)), reference).first
    assert first is not None and (first.row.rank, first.row.phase.name) == (1, "FORWARD")
