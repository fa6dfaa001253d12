"""compare() of two dumps finds the first difference in the right step and call."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.cli.main import main
from support.programs.compare_runs import (
    QUESTIONS,
    answers,
    assert_weight_gradient_is_first,
    fused_net,
    log_run,
    use_main_grad,
    zero_main_grad,
)
from support.programs.dumping import dumped_run, place
from support.programs.training import Net

pytest.importorskip("safetensors")


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("tensors", [True, False])
def test_a_transposed_weight_gradient_is_named_at_its_step_and_nothing_earlier(
    tmp_path: Path, layer: int, tensors: bool
) -> None:
    """The example of docs/compare.md."""

    def run(name: str, wrong: Any) -> Path:
        dumped_run(
            tmp_path / name,
            steps=3,
            level="module",
            tensors=tensors,
            model=lambda: fused_net(wrong),
            before_forward=zero_main_grad,
            before_update=use_main_grad,
        )
        return tmp_path / name

    comparison = fastcheck.compare(run("fused", layer), run("plain", None))
    assert_weight_gradient_is_first(comparison, layer)
    first = comparison.first
    assert first is not None
    elements = first.row.elements
    if not tensors:
        # Every norm and extreme is the same: only a checksum that depends on the order shows it.
        assert elements is None and "checksum" in first.row.reason
        return
    assert elements is not None and elements.differing > 50
    assert elements.cosine < 0.9 and elements.distance > 0.1
    assert "element" in first.row.reason
    assert first.row.actual is not None and first.row.actual["shape"] == [8, 8]


@pytest.mark.parametrize("options", [{}, {"tensors": True}, {"level": "module"}])
def test_two_runs_of_one_program_are_identical(tmp_path: Path, options: dict[str, Any]) -> None:
    for name in ("actual", "reference"):
        dumped_run(tmp_path / name, steps=3, **options)
    comparison = fastcheck.compare(tmp_path / "actual", tmp_path / "reference")
    assert comparison.is_identical, str(comparison)
    assert comparison.kind == "dump" and comparison.steps == (0, 1, 2)
    assert answers(comparison) == dict.fromkeys(QUESTIONS, "yes")
    assert fastcheck.compare(tmp_path / "actual" / "step1", tmp_path / "reference").is_identical
    one, other = (place(tmp_path / name, 2) for name in ("actual", "reference"))
    assert fastcheck.compare(one, other).is_identical


class Off(nn.Module):
    """A product that is off by a little."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.linear, self.by = nn.Linear(8, 8), by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x) * (1 + self.by) + 1)


def net_off(by: float) -> Any:
    return lambda: nn.Sequential(Net(), nn.Linear(4, 8), Off(by), nn.Linear(8, 4))


@pytest.mark.parametrize("tensors", [True, False])
def test_the_first_op_whose_inputs_agree_and_whose_outputs_do_not_is_named(
    tmp_path: Path, tensors: bool
) -> None:
    dumped_run(tmp_path / "actual", steps=1, model=net_off(0.003), tensors=tensors)
    dumped_run(tmp_path / "reference", steps=1, model=net_off(0.0), tensors=tensors)
    comparison = fastcheck.compare(tmp_path / "actual", tmp_path / "reference")
    first = comparison.first
    assert first is not None and first.exact_before
    assert first.row.name == "2.aten.mul.Tensor · forward · output[0]"
    assert first.row.error == pytest.approx(0.003, rel=0.05)
    assert (first.row.elements is not None) is tensors
    assert [row.name for row in first.trail[:2]] == [
        "2.aten.add.Tensor · forward · self",
        "2.aten.add.Tensor · forward · output[0]",
    ]
    assert answers(comparison)["batches"] == "yes"


def test_labels_that_differ_are_a_batch_and_not_an_op(tmp_path: Path) -> None:
    """Nobody's module has seen them: they are what no op of the step has made."""

    def run(name: str, label: int) -> None:
        torch.manual_seed(0)
        model = Net()
        with fastcheck.Dumper(tmp_path / name):
            y = model(torch.ones(2, 8))
            nn.functional.cross_entropy(y, torch.tensor([label, 1])).backward()

    run("actual", 2)
    run("reference", 3)
    comparison = fastcheck.compare(tmp_path / "actual", tmp_path / "reference")
    assert answers(comparison)["batches"] == "no"
    found = comparison["batches"].found
    assert found is not None and "nll_loss" in found.row.name and "target" in found.row.name


def test_an_index_that_was_computed_is_no_batch(tmp_path: Path) -> None:
    def run(name: str, by: float) -> None:
        x = torch.arange(12.0).reshape(3, 4)
        with fastcheck.Dumper(tmp_path / name):
            picked = (x + torch.tensor([0.0, by, 0.0, 0.0])).argmax(-1)
            torch.gather(x, 1, picked[:, None])

    run("actual", 9.0)
    run("reference", 0.0)
    comparison = fastcheck.compare(tmp_path / "actual", tmp_path / "reference", ask_all=True)
    first = comparison.first
    assert first is not None
    gather = [row for row in comparison.rows if "gather" in row.name and "index" in row.name]
    assert gather and all(row.phase.name == "FORWARD" for row in gather)


@pytest.mark.parametrize("model", [Net, lambda: nn.Linear(8, 4)])
def test_other_weights_are_weights_and_no_batch(tmp_path: Path, model: Any) -> None:
    """Those of the model itself, too, whose ops read what it was given."""
    dumped_run(tmp_path / "actual", steps=1, seed=1, model=model)
    dumped_run(tmp_path / "reference", steps=1, seed=0, model=model)
    comparison = fastcheck.compare(tmp_path / "actual", tmp_path / "reference")
    found = answers(comparison)
    assert found["initial weights"] == "no" and found["batches"] == "yes"


def test_other_strides_are_told_from_other_values_where_values_are_there(tmp_path: Path) -> None:
    def run(name: str, is_transposed: bool, **options: Any) -> Path:
        x = torch.arange(12.0).reshape(3, 4)
        x = x.t().contiguous().t() if is_transposed else x
        with fastcheck.Dumper(tmp_path / name, **options):
            x.sum()
        return tmp_path / name

    for options in ({"tensors": True}, {"order": "logical"}):
        kind = next(iter(options))
        actual = run(f"{kind}-actual", True, **options)
        comparison = fastcheck.compare(actual, run(f"{kind}-reference", False, **options))
        assert comparison.is_identical, str(comparison)
    comparison = fastcheck.compare(run("actual", True), run("reference", False))
    assert not comparison.agrees
    # Inputs have to be equal to the bit, which is unknown here.
    accept = ["order", "batches"]
    assert fastcheck.compare(tmp_path / "actual", tmp_path / "reference", accept=accept).agrees


def test_extra_calls_are_listed_and_shift_nothing(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self, is_extra: bool) -> None:
            super().__init__()
            self.a, self.b, self.is_extra = nn.Linear(8, 8), nn.Linear(8, 4), is_extra

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.is_extra:
                with torch.no_grad():
                    self.a(x * 7)
            return self.b(self.a(x))

    dumped_run(tmp_path / "actual", steps=1, model=lambda: Twice(True))
    dumped_run(tmp_path / "reference", steps=1, model=lambda: Twice(False))
    comparison = fastcheck.compare(tmp_path / "actual", tmp_path / "reference")
    assert comparison.first is None
    assert any("aten.mul.Tensor" in one.name for one in comparison.missing)
    # The gradients agree to the bit, so that the extra calls make no difference.
    assert comparison.verdict == "equal" and comparison.agrees
    assert any("another schedule of the same step" in note for note in comparison.notes)


def test_a_dump_that_was_interrupted_agrees_as_far_as_it_goes(tmp_path: Path) -> None:
    for name in ("actual", "reference"):
        dumped_run(tmp_path / name, steps=2, tensors=True)
    cut = place(tmp_path / "actual", 1)
    (cut / "index.json").unlink()
    for name in ("calls.jsonl", "records-rank0-000000.bin"):
        data = (cut / name).read_bytes()
        (cut / name).write_bytes(data[: len(data) // 2])
    for path in cut.glob("*.safetensors"):
        path.rename(f"{path}.part")
    comparison = fastcheck.compare(tmp_path / "actual", tmp_path / "reference")
    assert comparison.agrees, str(comparison)
    assert any("has no end: it was interrupted" in note for note in comparison.notes)


def test_a_module_dump_compares_with_a_log(tmp_path: Path) -> None:
    dumped_run(tmp_path / "dump", steps=1, level="module", model=Net)
    log = log_run(tmp_path / "log", steps=1, model=Net)
    comparison = fastcheck.compare(tmp_path / "dump", log, accept="missing")
    assert comparison.agrees, str(comparison)
    assert answers(comparison)["forward"] in ("yes", "accepted")


def test_the_command_line_takes_dumps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dumped_run(tmp_path / "a", steps=1, model=net_off(0.003))
    dumped_run(tmp_path / "b", steps=1, model=net_off(0.0))
    arguments = ["compare", str(tmp_path / "a"), str(tmp_path / "b")]
    assert main([*arguments, "--csv", str(tmp_path / "all.csv")]) == 1
    assert "2.aten.mul.Tensor · forward · output[0]" in capsys.readouterr().out
    assert main(["compare", arguments[1], arguments[1]]) == 0
    shutil.rmtree(tmp_path / "a" / "step0")
    assert main(arguments) == 2


def test_two_dumps_without_records_are_empty(tmp_path: Path) -> None:
    """A full disk ends a dump before its first record."""
    dumped_run(tmp_path / "a", steps=1, model=net_off(0.0))
    for path in (tmp_path / "a").rglob("records-*.bin"):
        path.write_bytes(b"")
    with pytest.raises(fastcheck.CompareError, match="the two sides hold no tensors"):
        fastcheck.compare(tmp_path / "a", tmp_path / "a")
