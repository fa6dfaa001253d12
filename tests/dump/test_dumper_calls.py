"""Dumper: every call of a step is written, in order, with its values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastcheck
from fastcheck.record.format import Flag
from support.programs.dumping import LEVELS, calls, dumped_run, index, log, ops, record_of, values
from support.programs.training import Apply, Residual

safetensors = pytest.importorskip("safetensors")


def test_every_op_is_there_in_order_with_its_inputs_outputs_and_arguments(tmp_path: Path) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * 2 + 1, -1).clamp_(min=0.25)

    model = Apply(forward)
    x = torch.arange(6.0).reshape(2, 3)
    with fastcheck.Dumper(tmp_path, tensors=True):
        y = model(x)
    found = [line for line in calls(tmp_path) if line["kind"] == "op"]
    assert [line["op"] for line in found] == [
        "aten.mul.Tensor",
        "aten.add.Tensor",
        "aten._softmax",
        "aten.clamp_",
    ]
    softmax, clamp = found[2:]
    assert softmax["args"] == {"dim": -1, "half_to_float": False}
    assert clamp["args"] == {"min": 0.25} and clamp["in_place"]
    assert [entry["label"] for entry in found[0]["in"]] == ["self"]
    assert found[0]["args"] == {"other": 2}
    load = values(tmp_path)
    assert torch.equal(load(softmax["in"][0]), x * 2 + 1)
    # In place: what it read, and what it left.
    assert torch.equal(load(clamp["in"][0]), torch.softmax(x * 2 + 1, -1))
    assert torch.equal(load(clamp["out"][0]), y)
    numbers = [e["seq"] for line in calls(tmp_path) for e in (*line["in"], *line["out"])]
    assert numbers == sorted(numbers) == list(range(len(log(tmp_path).records)))


def test_records_are_those_of_the_values(tmp_path: Path) -> None:
    dumped_run(tmp_path, steps=1, tensors=True)
    view, load = log(tmp_path), values(tmp_path)
    read = 0
    for line in calls(tmp_path):
        for entry in (*line["in"], *line["out"]):
            if "value" not in entry:
                continue
            value = load(entry)
            assert list(value.shape) == entry["shape"]
            record = record_of(view, entry)
            if "stride" not in entry:
                assert fastcheck.checksum(value) == int(record["checksum"])
            assert float(record["abs_sum"]) == pytest.approx(
                float(value.double().abs().sum()), rel=1e-6
            )
            read += 1
    assert read > 300


def test_backward_goes_by_the_op_of_the_forward_and_its_module(tmp_path: Path) -> None:
    dumped_run(tmp_path, steps=1)
    lines = [line for line in calls(tmp_path) if line["kind"] == "op"]
    linear = [line for line in lines if line["module"] == "blocks.1.b"]
    forward = [line for line in linear if line["direction"] == "forward"]
    backward = [line for line in linear if line["direction"] == "backward"]
    addmm = next(line for line in forward if line["op"] == "aten.addmm")
    products = [line for line in backward if line.get("ran") == "aten.mm"]
    assert len(products) == 2  # the gradients of its input and of its weight
    assert {(line["op"], line["call"]) for line in products} == {("aten.addmm", addmm["call"])}
    names = {str(site) for site in log(tmp_path).sites.values()}
    assert "blocks.1.b (Linear) · aten.addmm · forward · output" in names
    assert "blocks.1.b (Linear) · aten.addmm · backward · grad_input[0] (aten.mm)" in "".join(
        name.replace("gradient of ", "") for name in names
    )
    assert ops(tmp_path, direction="optimizer")


def test_modules_have_their_inputs_outputs_and_gradients(tmp_path: Path) -> None:
    class Keywords(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Residual()

        def forward(self, x: torch.Tensor, *, scale: torch.Tensor, flag: bool) -> dict[str, Any]:
            return {"y": self.inner(x) * scale, "n": 3}

    model = Keywords()
    x = torch.ones(2, 8, requires_grad=True)
    with fastcheck.Dumper(tmp_path, level="module"):
        model(x, scale=torch.tensor(2.0), flag=True)["y"].sum().backward()
    lines = [line for line in calls(tmp_path) if line["kind"] == "module"]
    first = lines[0]
    assert [entry["label"] for entry in first["in"]] == ["input[0]", "input.scale"]
    assert first["args"] == {"input.flag": True}
    names = {str(site) for site in log(tmp_path).sites.values()}
    for name in (
        "Keywords · forward · output.y",
        "Keywords · backward · gradient of input[0]",
        "inner.act (ReLU) · backward · gradient of output",
        "inner.a (Linear) · backward · gradient of output",
        "inner.b (Linear) · optimizer · gradient of inner.b.weight",
        "inner.b (Linear) · optimizer · parameter inner.b.weight",
    ):
        assert name in names, sorted(names)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recompute_is_told_from_the_forward(tmp_path: Path, level: str, reentrant: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = Residual(), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(checkpoint(self.inner, x, use_reentrant=reentrant))

    def run(directory: Any) -> list[float]:
        return dumped_run(
            directory,
            steps=2,
            model=Model,
            level=level,
            # The reentrant form wants an input with a gradient.
            batch=lambda step, x: x.requires_grad_(),
        )[0]

    assert run(tmp_path) == run(None)
    view = log(tmp_path)
    again = view.records[(view.records["flags"] & int(Flag.RECOMPUTE)) != 0]
    assert len(again)
    assert {view.sites[int(r["site"])].direction for r in again} == {"forward"}
    assert {view.sites[int(r["site"])].module.split(".")[0] for r in again} == {"inner"}
    marked = [line for line in calls(tmp_path) if line.get("recompute")]
    assert marked and all(line["module"].startswith("inner") for line in marked)


def test_a_checkpointed_function_is_told_from_its_backward(tmp_path: Path) -> None:
    x = torch.randn(4, 4, requires_grad=True)
    with fastcheck.Dumper(tmp_path):
        checkpoint(lambda t: t.sin().exp(), x, use_reentrant=False).sum().backward()
    forward = [line for line in calls(tmp_path) if line.get("op") == "aten.sin"]
    assert [line.get("recompute", False) for line in forward if line["direction"] == "forward"] == [
        False,
        True,
    ]


def test_what_nobody_wrote_is_not_read(tmp_path: Path) -> None:
    """Two runs would differ in what is left over there."""
    with fastcheck.Dumper(tmp_path, tensors=True):
        whole = torch.empty(4, 4)
        whole[:2].copy_(torch.ones(2, 4))
        whole[2:].fill_(2.0)
        whole.sum()
        torch.empty_like(whole).normal_()
        torch.zeros_like(torch.empty(3))
    lines = [line for line in calls(tmp_path) if line["kind"] == "op"]
    by_name = {line["op"]: line for line in lines}
    assert "value" not in by_name["aten.empty.memory_format"]["out"][0]
    assert "value" not in by_name["aten.copy_"]["in"][0]
    assert "value" in by_name["aten.copy_"]["out"][0]
    assert "value" in by_name["aten.sum"]["in"][0]
    assert "value" not in by_name["aten.normal_"]["in"][0]
    assert "value" in by_name["aten.normal_"]["out"][0]
    assert "value" not in by_name["aten.zeros_like"]["in"][0]


def test_tensors_that_have_no_record_say_why(tmp_path: Path) -> None:
    with fastcheck.Dumper(tmp_path, tensors=True):
        sparse = torch.eye(3).to_sparse()
        torch.sparse.sum(sparse)
        torch.zeros(0, 3).sum()
        torch.complex(torch.ones(3), torch.ones(3)).abs()
        torch.arange(5).to(torch.bfloat16).sum()
    entries = [e for line in calls(tmp_path) for e in (*line["in"], *line["out"])]
    assert any("layout sparse" in entry.get("problem", "") for entry in entries)
    complex_one = next(e for e in entries if e["dtype"] == "complex64" and "value" in e)
    assert torch.equal(
        torch.view_as_complex(values(tmp_path)(complex_one)), torch.full((3,), 1 + 1j)
    )
    empty = next(e for e in entries if e["shape"] == [0, 3] and "value" in e)
    assert values(tmp_path)(empty).shape == (0, 3)


def test_of_a_tensor_subclass_the_plain_tensors_are_seen(tmp_path: Path) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    both = TwoTensor(torch.full((2,), 1.0), torch.full((2,), 5.0))
    with fastcheck.Dumper(tmp_path, tensors=True) as dumper:
        result = both + 1
    assert not dumper.problem and isinstance(result, TwoTensor)
    lines = [line for line in calls(tmp_path) if line["op"] == "aten.add.Tensor"]
    load = values(tmp_path)
    assert [float(load(line["out"][0])[0]) for line in lines] == [2.0, 6.0]


def test_a_higher_order_operator_runs_and_is_said_to_be_unseen(tmp_path: Path) -> None:
    from torch._higher_order_ops.cond import cond

    with fastcheck.Dumper(tmp_path) as dumper:
        y = cond(torch.tensor(True), lambda x: x + 1, lambda x: x - 1, (torch.ones(2),))
    assert torch.equal(y, torch.full((2,), 2.0))
    assert not dumper.problem
    reasons = {entry["name"]: entry["reason"] for entry in index(tmp_path)["left_out"]}
    assert reasons == {"cond": "a higher-order operator: what it runs is not seen"}
