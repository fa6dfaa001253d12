"""Cambricon Catch's Dumper in a training loop: which steps it dumps, and values or sums."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.compat.catch import Dumper
from fastcheck.log.reader import read_log
from support.programs.compat import calls_of, run_script


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("catch")
    ran = run_script("catch_loop.py", at=at)
    assert ran.returncode == 0, ran.stderr
    return at


@pytest.mark.parametrize("name", ["values", "sums"])
def test_enabled_steps_are_dumped_under_their_numbers(loop: Path, name: str) -> None:
    assert sorted(path.name for path in (loop / name).iterdir()) == ["step1", "step3"]
    calls = calls_of(loop / name / "step1")
    ops = {(line.get("op"), line["direction"]) for line in calls}
    assert {("aten.addmm", "forward"), ("aten.relu_", "forward")} <= ops
    assert ("aten.addmm", "backward") in ops and "optimizer" in {d for _, d in ops}
    index = json.loads((loop / name / "step3" / "rank0" / "index.json").read_text())
    assert index["is_complete"] and index["reference"]["outputs"] > 10


def test_level_0_has_values_and_level_1_their_sums(loop: Path) -> None:
    from safetensors.torch import load_file

    values = load_file(loop / "values" / "step1" / "rank0" / "tensors-00000.safetensors")
    view = read_log(loop / "values" / "step1" / "rank0")
    by_seq = {int(record["seq"]): record for record in view.records}
    entry = next(
        line["out"][0]
        for line in calls_of(loop / "values" / "step1")
        if line.get("op") == "aten.addmm"
    )
    expected = values[entry["value"][1]].abs().double().sum().item()
    assert np.isclose(by_seq[entry["seq"]]["abs_sum"], expected, rtol=1e-6)
    assert not list((loop / "sums" / "step1" / "rank0").glob("*.safetensors"))
    assert (read_log(loop / "sums" / "step1" / "rank0").records["abs_sum"] > 0).any()


def test_one_that_is_used_again_dumps_the_next_step(loop: Path) -> None:
    assert sorted(path.name for path in (loop / "again").iterdir()) == ["step0", "step1"]


def test_what_the_block_raises_is_what_comes_out(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Dumper(tmp_path, use_cpu=True) as dumper:
        nn.Linear(2, 2)(torch.ones(1, 2))
        raise ZeroDivisionError
    assert dumper.dumper is not None and dumper.dumper.differences == []
    assert calls_of(tmp_path / "step0")


@pytest.mark.parametrize("level", [2, True, "1"])
def test_levels(level: object) -> None:
    with pytest.raises(fastcheck.ConfigError, match=r"0 \(values\) or 1"):
        Dumper("nowhere", level=level)  # type: ignore[arg-type]  # wrong on purpose


def test_disabled_it_writes_nothing(tmp_path: Path) -> None:
    with Dumper(tmp_path / "d", enable=False):
        torch.ones(1) + 1
    assert not (tmp_path / "d").exists()
