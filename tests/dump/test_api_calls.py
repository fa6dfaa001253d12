"""Dumper(level="api"): one call of torch's Python API a line, numbered, with its gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastcheck
from fastcheck.calls.modes import ApiCalls
from fastcheck.log.reader import read_log
from fastcheck.utils.names.msprobe import msprobe_name, plain_api
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
    # What empty() returns holds no numbers yet.
    assert {line["api"] for line in calls} - {line["api"] for line in calls if line["out"]} == {
        "Torch.empty.0"
    }


def test_each_call_that_returns_or_writes_a_tensor_has_a_line(tmp_path: Path) -> None:
    x, other = torch.zeros(3), torch.arange(3.0)
    with fastcheck.Dumper(tmp_path, level="api"):
        x.size(0), x.type(), x.tolist()  # neither
        x[0] = 1.0
        x[1] = 2.0
        x.type(torch.float64)
        torch.add(other, 1, out=x)
        x **= 2
        torch.linalg.norm(x), F.logsigmoid(x), x**2
    lines = [line for line in calls_of(tmp_path / "step0") if line["in"]]
    assert [line["api"] for line in lines] == [
        "Tensor.__setitem__.0",
        "Tensor.__setitem__.1",
        "Tensor.type.1",
        "Torch.add.0",
        "Tensor.__ipow__.0",
        "Torch.linalg_norm.0",
        "Functional.logsigmoid.0",
        "Tensor.__pow__.0",
    ]
    log = read_log(tmp_path / "step0" / "rank0")
    assert not any(site.op in ("Tensor.size", "Tensor.tolist") for site in log.sites.values())
    sums = dict(zip(log.records["seq"].tolist(), log.records["abs_sum"].tolist()))
    # Read before they are written.
    assert [sums[line["in"][-1]["seq"]] for line in lines[:5]] == [0.0, 1.0, 3.0, 3.0, 6.0]


def test_a_class_of_the_programs_is_asked_for_the_operators_written_in_python() -> None:
    class Unit(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return "handled" if func is torch.Tensor.__rdiv__ else NotImplemented

    with ApiCalls():
        assert 2 / torch.ones(2).as_subclass(Unit) == "handled"


def test_operators_that_are_written_in_python_are_the_calls_that_they_make(tmp_path: Path) -> None:
    """As msprobe names them."""
    x = torch.arange(1.0, 4.0)
    with fastcheck.Dumper(tmp_path, level="api"):
        made = [2 / x, 7 // x, 2 - x, torch.linalg.norm(x)]
        text: Any = "a"
        with pytest.raises(TypeError, match="for /: 'str' and 'Tensor'"):
            _ = text / x
    assert torch.equal(made[0], 2 / x) and torch.equal(made[1], 7 // x)
    apis = [line["api"] for line in calls_of(tmp_path / "step0") if line["out"]]
    assert apis[:5] == [
        "Tensor.reciprocal.0",
        "Tensor.mul.0",
        "Torch.floor_divide.0",
        "Tensor.__rsub__.0",
        "Torch.linalg_norm.0",
    ]
    assert [plain_api(api.rpartition(".")[0]) for api in apis[3:5]] == ["Tensor.sub", "Torch.norm"]


def test_parameters_are_told_from_inputs_that_require_grad(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2)
    layer.bias.requires_grad_(False)
    with fastcheck.Dumper(tmp_path, level="api"):
        layer(torch.ones(1, 2, requires_grad=True)).sum().backward()
    log = read_log(tmp_path / "step0" / "rank0")
    labels = {s.label for s in log.sites.values() if s.op == "Functional.linear"}
    assert {"input[0]", "input[1] (parameter)", "input[2] (parameter)"} <= labels
    assert "input[0] (parameter)" not in labels


@pytest.mark.parametrize("level", ["op", "module"])
def test_dumps_of_other_levels_are_not_compared(tmp_path: Path, level: str) -> None:
    for name in ("api", level):
        with fastcheck.Dumper(tmp_path / name, level=name):
            nn.Linear(2, 2)(torch.ones(1, 2))
    for sides in (("api", level), (level, "api")):
        with pytest.raises(fastcheck.CompareError, match="different levels"):
            fastcheck.compare(*(tmp_path / side for side in sides))


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
