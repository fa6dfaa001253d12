"""Two runs from one checkpoint on two kinds of machine, simulated by the instruction sets that
torch may use: rounding is a remark, real faults come first. A sample of
tests/accuracy/compare_healthy.py.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastcheck
from accuracy.compare_healthy import CHECKED, is_named, record, results
from accuracy.compare_worker import save, train
from fastcheck.comparison.names import Name
from fastcheck.comparison.steps.noise import Cancellation
from support.programs.compare_runs import log_run, net_with
from support.records import record_builder as build

CAPABILITY = torch.backends.cpu.get_cpu_capability()
#: A machine whose instructions are others than those of this one.
OTHER = "AVX2" if CAPABILITY == "AVX512" else "SSE4"
several_machines = pytest.mark.skipif(
    CAPABILITY not in ("AVX2", "AVX512"), reason="torch has one set of instructions here"
)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("machines")
    record(directory, machines=("this", OTHER), programs=CHECKED)
    return directory


@several_machines
def test_a_healthy_pair_is_not_accused_and_a_wrong_operator_is_named(logs: Path) -> None:
    healthy, wrong = results(logs, machines=("this", OTHER), programs=CHECKED)
    assert [row for row in healthy if row["verdict"] == "different"] == []
    assert len(healthy) >= 4 and len(wrong) >= 10
    assert [row for row in wrong if not row["is_named"]] == []


def test_in_another_environment_a_difference_of_the_bits_alone_is_a_remark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(name: str, change: Any = None) -> str:
        options = {} if change is None else {"before_update": change}
        return log_run(tmp_path / name, steps=3, **options)

    def flip(step: int, model: torch.nn.Module) -> None:
        weight = model.get_parameter("head.weight")
        assert weight.grad is not None
        if step == 1:
            weight.grad = weight.grad.flip(0)

    reference = run("reference")
    here = fastcheck.compare(run("flipped", flip), reference)
    assert here.expects_bits and here.first is not None
    assert here.first.row.state.name == "REORDERED"
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    elsewhere = fastcheck.compare(run("elsewhere", flip), reference, accept="environment")
    assert not elsewhere.expects_bits
    assert elsewhere.first_inexact is not None
    assert elsewhere.first_inexact.row.name == "head · optimizer · gradient of head.weight"
    # What follows from it is beyond rounding, and leads.
    assert elsewhere.first is not None and elsewhere.first.row.state.name == "DIFFERENT"
    assert "in different ways, which round differently" in " ".join(str(elsewhere).split())


def test_compiled_code_is_not_expected_to_be_equal_to_the_bit(tmp_path: Path) -> None:
    reference = log_run(tmp_path / "reference", model=net_with(9, 0.0))
    compiled = log_run(tmp_path / "compiled", model=net_with(9, 0.0))
    meta = Path(compiled) / "meta-rank0.json"
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "compiled_modules": 4}))
    comparison = fastcheck.compare(compiled, reference)
    assert not comparison.expects_bits and comparison.agrees
    assert any("4 modules ran compiled in actual and 0" in note for note in comparison.notes)


def test_a_log_tells_how_many_modules_ran_compiled(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run: Any = torch.compile(model, backend="aot_eager")
    with fastcheck.install(
        model, training=fastcheck.Training(optimizer=optimizer), log_dir=tmp_path / "log"
    ):
        for _ in range(2):
            run(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    meta = json.loads((tmp_path / "log" / "meta-rank0.json").read_text())
    assert meta["compiled_modules"] == 3


def test_a_float32_that_is_made_of_bfloat16_carries_its_rounding(tmp_path: Path) -> None:
    save("MLP bfloat16", tmp_path / "start.pt")
    train("MLP bfloat16", tmp_path / "start.pt", tmp_path / "reference")

    def nudged(model: torch.nn.Module) -> None:
        module = model.get_submodule("0")
        inner = module.forward
        # One element, by one spacing of bfloat16.
        module.forward = lambda x: inner(x) * (1 + torch.eye(4, 64).to(x.dtype) / 128)  # type: ignore[method-assign]  # a wrong operator, put in by hand

    train("MLP bfloat16", tmp_path / "start.pt", tmp_path / "nudged", nudged)
    comparison = fastcheck.compare(tmp_path / "nudged", tmp_path / "reference")
    loose = [row for row in comparison.rows if row.name.startswith("CrossEntropyLoss")]
    assert comparison.agrees and not loose, str(comparison)

    for name, by in (("right", 1.0), ("wrong", 1.001)):

        def widened(model: torch.nn.Module, by: float = by) -> None:
            model.get_submodule("5").register_forward_hook(lambda m, x, y: y.float() * by)

        train("MLP bfloat16", tmp_path / "start.pt", tmp_path / name, widened)
    # Nothing before it has other bits: it is held to its own dtype.
    found = fastcheck.compare(tmp_path / "wrong", tmp_path / "right").first
    assert found is not None and is_named(found.row.name, "5")


@several_machines
def test_a_gradient_that_is_noise_is_held_against_what_was_summed(logs: Path) -> None:
    pair = (logs / f"attention, {OTHER}", logs / "attention, this")
    comparison = fastcheck.compare(*pair, accept="environment")
    assert comparison.agrees, str(comparison)
    assert any("sums whose terms cancel" in note for note in comparison.notes)


def test_a_gradient_that_only_looks_like_noise_is_named(tmp_path: Path) -> None:
    name = "blocks.0.attention.key.bias"

    def raised(model: torch.nn.Module) -> None:
        model.get_parameter(name).register_hook(lambda gradient: gradient + 1e-3)

    save("attention", tmp_path / "start.pt")
    for log, fault in (("reference", None), ("wrong", raised)):
        train("attention", tmp_path / "start.pt", tmp_path / log, fault)
    first = fastcheck.compare(tmp_path / "wrong", tmp_path / "reference").first
    assert first is not None
    assert first.row.name == f"blocks.0.attention.key · optimizer · gradient of {name}"
    assert first.row.step == 0


def test_extremes_that_are_infinite_on_both_sides_are_no_distance() -> None:
    # Of a damaged record: extremes are finite.
    left, right = (
        build.records(build.record(high=math.inf, low=math.inf, rms=rms, sum=math.inf))
        for rms in (0.5, 0.4)
    )
    gradient = Name("layer", "backward", "grad_input", "input[0]")
    cancelled = Cancellation([gradient], left, right, left["dtype"], np.zeros(1))
    assert cancelled.distances[0] == pytest.approx(math.sqrt(250.0) - math.sqrt(160.0))
