"""Dumper(level="api"): one call of torch's Python API a line, numbered, with its gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import fastcheck
from fastcheck.log.reader import read_log
from fastcheck.utils.names.msprobe import msprobe_name
from support.programs.compat import calls_of


class Scaled(nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.inner, self.eps = nn.Linear(4, 3), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(x.size(0), -1)
        y = self.inner(x).mul_(2)
        torch.empty(3)
        return F.layer_norm(y, (3,), eps=self.eps) + 1


def step(directory: Path, eps: float = 1e-5, **options: Any) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model = Scaled(eps)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
    with fastcheck.Dumper(directory, level="api", **options):
        model(torch.randn(2, 4)).square().sum().backward()
        optimizer.step()
    return calls_of(directory / "step0")


def test_calls_are_numbered_and_name_their_module(tmp_path: Path) -> None:
    lines = step(tmp_path)
    kinds = {line["kind"] for line in lines}
    assert kinds == {"stored", "module", "api", "gradients"}
    assert [line["kind"] for line in lines if line["kind"] == "module"] == ["module"]  # the batch
    calls = [line for line in lines if line["kind"] == "api"]
    forward = [line["api"] for line in calls if line["direction"] == "forward" and line["out"]]
    assert forward == [
        "Torch.randn.0",
        "Tensor.reshape.0",
        "Functional.linear.0",
        "Tensor.mul_.0",
        "Functional.layer_norm.0",
        "Tensor.add.0",
        "Tensor.square.0",
        "Tensor.sum.0",
    ]
    (linear,) = (line for line in calls if line["api"] == "Functional.linear.0" and line["out"])
    assert linear["module"] == "inner"
    log = read_log(tmp_path / "step0" / "rank0")
    labels = {
        s.label for s in log.sites.values() if s.op == "Functional.linear" and s.role == "input"
    }
    assert labels == {"input[0]", "input[1] (parameter)", "input[2] (parameter)"}
    names = {msprobe_name(site, 0) for site in log.sites.values() if site.op}
    assert {"Functional.linear.0.forward.input.1", "Tensor.mul_.0.backward.input.0"} <= names
    # The gradients of what the calls returned, each under the name of its call.
    gradients = {line["api"] for line in calls if line["direction"] == "backward" and line["in"]}
    assert {"Functional.linear.0", "Tensor.mul_.0", "Functional.layer_norm.0"} <= gradients
    # In-place: the input is what it was before.
    inputs, outputs = (
        next(line[part] for line in calls if line["api"] == "Tensor.mul_.0" and line[part])
        for part in ("in", "out")
    )
    assert inputs[0]["seq"] != outputs[0]["seq"]
    assert any(line["direction"] == "optimizer" for line in calls)
    # size() returns no tensor, and what empty() returns holds no numbers yet.
    others = {line["api"] for line in calls} - {line["api"] for line in calls if line["out"]}
    assert {"Tensor.size.0", "Torch.empty.0"} <= others


def test_two_dumps_are_identical_and_another_call_is_named(tmp_path: Path) -> None:
    step(tmp_path / "a")
    step(tmp_path / "b")
    assert fastcheck.compare(tmp_path / "a", tmp_path / "b").is_identical
    step(tmp_path / "c", eps=1e-2)
    first = fastcheck.compare(tmp_path / "c", tmp_path / "a").first
    assert first is not None
    assert first.row.name == "Functional.layer_norm · forward · output[0]"


def test_a_list_selects_calls(tmp_path: Path) -> None:
    lines = step(tmp_path, ops=["Functional.linear.0"])
    assert {line["api"] for line in lines} == {"Functional.linear.0"}
    assert {line["direction"] for line in lines} == {"forward", "backward"}


def test_training_is_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, other = Scaled(1e-5), Scaled(1e-5)
    other.load_state_dict(model.state_dict())
    x = torch.randn(2, 4)
    with fastcheck.Dumper(tmp_path, level="api"):
        model(x).square().sum().backward()
    other(x).square().sum().backward()
    for one, two in zip(model.parameters(), other.parameters()):
        assert one.grad is not None and two.grad is not None and torch.equal(one.grad, two.grad)
