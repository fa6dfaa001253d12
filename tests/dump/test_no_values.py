"""Tensors without values in a dump: fake ones, nested ones, and those that a collective has not
written yet.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fastcheck

pytestmark = [
    pytest.mark.usefixtures("fresh_start"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning"),
]

DUMPS = [
    {"level": "op"},
    {"level": "op", "tensors": True},
    {"level": "op", "ops": "addmm"},
    {"level": "module"},
    {"level": "module", "tensors": True},
]


def tensors(place: Path) -> list[dict[str, Any]]:
    """Those of all calls of a complete dump."""
    index = json.loads((place / "step0/rank0/index.json").read_text())
    assert index["is_complete"] and index["problem"] is None
    calls = (place / "step0/rank0/calls.jsonl").read_text().splitlines()
    return [t for line in calls for t in (*json.loads(line)["in"], *json.loads(line)["out"])]


@pytest.fixture(autouse=True)
def no_warning() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error", fastcheck.FastcheckWarning)
        yield


@pytest.mark.parametrize("options", DUMPS, ids=str)
def test_a_fake_mode_within_a_dump(tmp_path: Path, options: dict[str, Any]) -> None:
    """A program that estimates its memory in a step that is dumped."""
    model = nn.Linear(4, 4)
    with fastcheck.Dumper(tmp_path / "dump", model=model, **options) as dumper:
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert model(torch.randn(2, 4)).sum().shape == ()
        model(torch.randn(2, 4)).sum().backward()
    found = tensors(tmp_path / "dump")
    assert any("seq" in one for one in found)
    unread = [one for one in found if "seq" not in one]
    assert all("fake tensor" in one.get("problem", "a fake tensor") for one in unread)
    if options["level"] == "op":
        assert "fake tensors have no values" in {why for _, why in dumper.left_out}


@pytest.mark.parametrize("options", DUMPS, ids=str)
def test_a_dump_within_a_fake_mode(tmp_path: Path, options: dict[str, Any]) -> None:
    with FakeTensorMode():
        model = nn.Linear(4, 4)
        dumper = fastcheck.Dumper(tmp_path / "dump", model=model, **options)
        try:
            with dumper:
                model(torch.randn(2, 4)).sum().backward()
        except fastcheck.ConfigError as error:  # ops=: no call was seen
            assert options.get("ops") and "addmm" in str(error)
    assert not any("seq" in one for one in tensors(tmp_path / "dump"))
    assert model.weight.grad is not None


@pytest.mark.parametrize("options", [one for one in DUMPS if "ops" not in one], ids=str)
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_nested_tensors(tmp_path: Path, options: dict[str, Any], layout: torch.layout) -> None:
    def run() -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        parts = [torch.randn(2, 4), torch.randn(3, 4)]
        x = torch.nested.nested_tensor(parts, layout=layout)
        y = model(x)
        made = y.values() if layout is torch.jagged else torch.nested.to_padded_tensor(y, 0.0)
        made.sum().backward()
        assert model.weight.grad is not None
        return made, model.weight.grad

    with fastcheck.Dumper(tmp_path / "dump", **options):
        dumped = run()
    assert all(map(torch.equal, dumped, run()))
    found = tensors(tmp_path / "dump")
    assert any("seq" in one for one in found)
    nested = [one for one in found if one.get("layout") in ("nested", "jagged")]
    assert all(one["shape"][1] == -1 and "seq" not in one and one["problem"] for one in nested)
    assert nested or options["level"] == "op"


@pytest.mark.parametrize("options", [{}, {"tensors": True}, {"ops": "*c10d*"}], ids=str)
def test_what_a_collective_has_not_written_yet(tmp_path: Path, options: dict[str, Any]) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with fastcheck.Dumper(tmp_path / "dump", level="op", **options):
            of_all = funcol.all_reduce(torch.ones(3), "sum", dist.group.WORLD)
            assert (of_all + 1).sum() == 6
            dist.all_reduce(torch.ones(3))
            dist.all_gather_into_tensor(torch.empty(3), torch.ones(3))
    finally:
        dist.destroy_process_group()
    found = {}
    for line in (tmp_path / "dump/step0/rank0/calls.jsonl").read_text().splitlines():
        call = json.loads(line)
        values = [["seq" in tensor for tensor in call[side]] for side in ("in", "out")]
        problems = {tensor.get("problem") for tensor in call["out"]}
        found[call["op"].rpartition(".")[2]] = values, problems
    writing = "memory that a collective may still write to"
    assert found["all_reduce"] == ([[True], [False]], {writing})
    assert found["wait_tensor"] == ([[False], [True]], {None})
    assert found["_allgather_base_"] == ([[False, True], [False]], {writing})
    assert found["allreduce_"] == ([[True], [False]], {writing})
