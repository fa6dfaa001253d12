"""Dumper: everything that a step computes is written down, in order, and nothing is changed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastcheck
from dumping import calls, dumped_run, index, log, ops, place, record_of, values
from fastcheck._record import Flag
from training import Apply, Net, Residual

safetensors = pytest.importorskip("safetensors")

LEVELS = ("op", "module")


@pytest.mark.parametrize(
    "options",
    [
        {"level": "op"},
        {"level": "module"},
        {"level": "op", "tensors": True, "reference": "cpu"},
        {"level": "op", "order": "logical", "record": "stats"},
        {"level": "module", "tensors": True},
    ],
)
def test_training_is_bit_identical_and_draws_the_same_numbers(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    plain, model = dumped_run(None)
    state = torch.get_rng_state()
    losses, dumped = dumped_run(tmp_path / "dump", **options)
    assert losses == plain
    assert torch.equal(torch.get_rng_state(), state)
    for one, other in zip(model.parameters(), dumped.parameters()):
        assert torch.equal(one, other)


def test_disabled_it_does_nothing_at_all(tmp_path: Path) -> None:
    before = torch.nn.modules.module._global_forward_hooks.copy()
    with fastcheck.Dumper(tmp_path / "dump", enable=False, level="nonsense") as dumper:
        assert torch._C._len_torch_dispatch_stack() == 0
        assert torch.nn.modules.module._global_forward_hooks == before
    assert dumper.path is None and not dumper.problem
    assert list(tmp_path.iterdir()) == []


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
        "inner.b (Linear) · optimizer · gradient of weight",
        "inner.b (Linear) · optimizer · param weight",
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


@pytest.mark.parametrize("level", LEVELS)
def test_an_exception_ends_the_dump_and_goes_on(tmp_path: Path, level: str) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.fails = nn.Linear(8, 8), True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            if self.fails:
                raise RuntimeError("in the middle")
            return y + 1

    model = Broken()
    dumper = fastcheck.Dumper(tmp_path, level=level)
    with pytest.raises(RuntimeError, match="in the middle"), dumper:
        model(torch.ones(2, 8))
    assert index(tmp_path)["ended_by"] == "RuntimeError"
    assert len(log(tmp_path).records) > 2
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not torch.nn.modules.module._global_forward_pre_hooks
    # One that the block itself catches is no end: what runs then is not inside the model.
    with fastcheck.Dumper(tmp_path, step=1, level=level):
        with pytest.raises(RuntimeError):
            model(torch.ones(2, 8))
        torch.ones(2).exp()
        model.fails = False
        model(torch.ones(2, 8))
    modules = {line.get("module") for line in calls(tmp_path, 1)}
    assert modules == {"", "a", None} and not index(tmp_path, 1)["ended_by"]
    outside = [line["type"] for line in calls(tmp_path, 1) if line.get("op") == "aten.exp"]
    assert outside == (["outside the model"] if level == "op" else [])


def test_several_models_and_calls_go_by_their_own_names(tmp_path: Path) -> None:
    generator, judge = Net(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    with fastcheck.Dumper(tmp_path, level="module"):
        judge(generator(torch.ones(2, 8)))
        judge(torch.ones(3, 4))
    found = [(x["module"], x["call"]) for x in calls(tmp_path) if x["kind"] == "module"]
    assert ("", 0) in found and ("head", 0) in found
    assert [call for module, call in found if module == "Sequential.0"] == [0, 0, 1, 1]
    with fastcheck.Dumper(tmp_path, step=1, level="module", model=[judge, generator]):
        judge(generator(torch.ones(2, 8)))
    modules = {x["module"] for x in calls(tmp_path, 1) if x["kind"] == "module"}
    assert {"", "0", "1", "Net", "Net.head"} <= modules


def test_dumps_can_be_nested(tmp_path: Path) -> None:
    x = torch.randn(4, 4)
    with fastcheck.Dumper(tmp_path / "outer", tensors=True):
        y = x + 1
        with fastcheck.Dumper(tmp_path / "inner", tensors=True, reference="cpu"):
            z = y.exp()
        z.sin()
    assert ops(tmp_path / "outer") == ["aten.add.Tensor", "aten.exp", "aten.sin"]
    assert ops(tmp_path / "inner") == ["aten.exp"]


def test_it_goes_together_with_a_monitor_of_either_level(tmp_path: Path) -> None:
    def sites(level: str, is_dumped: bool) -> list[str]:
        model = Net()
        dumper = fastcheck.Dumper(tmp_path / level, enable=is_dumped, tensors=True, reference="cpu")
        with fastcheck.install(model, level=level, overflow_nums=-1) as monitor:
            with dumper:
                model(torch.ones(2, 8)).sum().backward()
            found = [str(monitor.sites[r["site"]]) for r in monitor.records()]
        # Autograd adds gradients up in place unless Python holds one of them.
        return [name for name in found if "add" not in name or "forward" in name]

    for level in LEVELS:
        assert sites(level, True) == sites(level, False)


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


def test_other_threads_are_left_alone(tmp_path: Path) -> None:
    def other() -> None:
        torch.ones(3) @ torch.ones(3)

    with fastcheck.Dumper(tmp_path):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        torch.ones(2) + 1
    assert ops(tmp_path) == ["aten.ones", "aten.add.Tensor"]


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


@pytest.mark.parametrize("level", LEVELS)
def test_a_compiled_model_is_seen_as_it_is_written(tmp_path: Path, level: str) -> None:
    model = Net()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.ones(2, 8)
    compiled(x).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with fastcheck.Dumper(tmp_path, level=level):
        compiled(x).sum().backward()
    found = {line["module"] for line in calls(tmp_path) if "module" in line}
    assert {"head", "blocks.1.a"} <= found
    assert all(
        torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients) if p.grad is not None
    )
    count = len(calls(tmp_path))
    compiled(x).sum().backward()  # compiled again, and seen by nobody
    assert len(calls(tmp_path)) == count


def test_a_dumper_is_for_one_step(tmp_path: Path) -> None:
    dumper = fastcheck.Dumper(tmp_path)
    with dumper:
        pass
    with pytest.raises(fastcheck.ConfigError, match="used already"), dumper:
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": -1}, "a number from 0 on"),
        ({"step": True}, "a number from 0 on"),
        ({"level": "modul"}, "did you mean 'module'"),
        ({"record": "all"}, "'health' or 'stats' or 'full'"),
        ({"order": "row"}, "'storage' or 'logical'"),
        ({"reference": "gpu"}, "'cpu'"),
        ({"reference": "cpu", "level": "module"}, 'level="op"'),
        ({"reference_dtype": "float16"}, "'auto' or 'same' or 'float64'"),
        ({"tensors": True, "record": "stats"}, 'record="full"'),
        ({"memory": "lots"}, "65536 bytes or more"),
        ({"model": 3}, "model= is no module"),
    ],
)
def test_options_that_cannot_be_used_say_so(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(fastcheck.ConfigError, match=message):
        fastcheck.Dumper(tmp_path, **options)
    assert not place(tmp_path).exists()
