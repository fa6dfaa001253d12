"""Lists of a Dumper: a name in any spelling selects its calls alone; an unknown one is an error."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.utils.names.msprobe import msprobe_name
from fastcheck.utils.names.patterns import Wanted, matches_op, read_module, read_op
from support.programs.dumping import calls, dumped_run, index, log, ops, place
from support.programs.op_level import Attention, culprit
from support.programs.training import Apply, Net


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def chosen(directory: Path, **options: Any) -> list[tuple[str, str, int, str]]:
    """(module, op, call, direction) of the calls that a list leaves."""
    dumped_run(directory, steps=1, model=Model, **options)
    return [
        (line["module"], line.get("op", ""), line["call"], line["direction"])
        for line in calls(directory)
        if line["kind"] in ("op", "module")
    ]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("aten.softmax", Wanted("", op="aten.softmax")),
        ("aten.sqrt #0", Wanted("", op="aten.sqrt", call=0)),
        (
            "layers.3.attn · aten.softmax #7",
            Wanted("", op="aten.softmax", module="layers.3.attn", call=7),
        ),
        (
            "12 NaN in output of aten.sqrt #0 in decoder.gate (Gate) at step 4",
            Wanted("", op="aten.sqrt", call=0, module="decoder.gate"),
        ),
        ("aten.sqrt #2 in Net (the model)", Wanted("", op="aten.sqrt", call=2, module="")),
        (
            "aten.sqrt #2 in outside the model",
            Wanted("", op="aten.sqrt", call=2, module="outside the model"),
        ),
        (
            "2.inner · aten.mul.Tensor · backward · gradient of grad_input[0] (aten.mul.Tensor)",
            Wanted("", op="aten.mul.Tensor", module="2.inner", direction="backward"),
        ),
        (
            "decoder.gate (Gate) · aten.sqrt · forward · output",
            Wanted("", op="aten.sqrt", module="decoder.gate", direction="forward"),
        ),
        (
            "2.aten.mul.Tensor · forward · output[0]",
            Wanted("", op="aten.mul.Tensor", module="2", direction="forward"),
        ),
        (
            "Functional.softmax.7.backward",
            Wanted("", api="Functional.softmax", call=7, direction="backward"),
        ),
        (
            "Functional_cross_entropy_0_forward_input_0",
            Wanted("", api="Functional.cross_entropy", call=0, direction="forward"),
        ),
        ("Torch.matmul.3", Wanted("", api="Torch.matmul", call=3)),
        ("Tensor.add_", Wanted("", api="Tensor.add_")),
        (
            "32 NaN in Functional.softmax.7.backward.output.0 at step 4 on rank 1",
            Wanted("", api="Functional.softmax", call=7, direction="backward"),
        ),
        ("Functional_gelu", Wanted("", api="Functional.gelu")),
        ("Tensor.__iadd__.2", Wanted("", api="Tensor.__iadd__", call=2)),
        (
            "Functional.softmax.backward",
            Wanted("", api="Functional.softmax", direction="backward"),
        ),
        ("softmax", Wanted("", op="softmax")),
        ("aten.*norm*", Wanted("", op="aten.*norm*")),
    ],
)
def test_names_are_read_in_every_spelling(name: str, wanted: Wanted) -> None:
    assert read_op(name) == Wanted(**{**wanted.__dict__, "text": name})


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("layers.3.attn", Wanted("", module="layers.3.attn")),
        ("layers.3.attn (Attention)", Wanted("", module="layers.3.attn")),
        ("Net (the model)", Wanted("", module="")),
        ("layers.*.attn #2", Wanted("", module="layers.*.attn", call=2)),
        (
            "head (Linear) · backward · gradient of output",
            Wanted("", module="head", direction="backward"),
        ),
        (
            "Module.head.Linear.backward.1",
            Wanted("", module="head", call=1, direction="backward"),
        ),
        (
            "Cell.layers.3.attn.Attention.forward.0.input.1",
            Wanted("", module="layers.3.attn", call=0, direction="forward"),
        ),
        (
            "3 Inf in Module.head.Linear.forward.1.output.0 at step 4",
            Wanted("", module="head", call=1, direction="forward"),
        ),
        ("3 Inf in output[0] of decoder.gate (Gate) at step 4", Wanted("", module="decoder.gate")),
        (
            "1 NaN in input[0], the batch given to Net (the model) at step 1 on rank 2",
            Wanted("", module=""),
        ),
        (
            "12 NaN in output of aten.sqrt #0 in decoder.gate (Gate) at step 4",
            Wanted("", module="decoder.gate"),
        ),
        ("Module.GPT.forward.0", Wanted("", module="", call=0, direction="forward")),
        ("Module.head.Linear.parameters_grad.weight", Wanted("", module="head")),
    ],
)
def test_module_names_too(name: str, wanted: Wanted) -> None:
    assert read_module(name) == Wanted(**{**wanted.__dict__, "text": name})


@pytest.mark.parametrize(
    ("pattern", "name", "means"),
    [
        ("aten.softmax", "aten._softmax", True),
        ("aten._softmax", "aten._softmax", True),
        ("softmax", "aten._softmax", True),
        ("aten.add", "aten.add.Tensor", True),
        ("aten.add.Tensor", "aten.add.Scalar", False),
        ("aten.add", "aten.add_.Tensor", False),
        ("aten.add*", "aten.add_.Tensor", True),
        ("aten.mm", "aten.addmm", False),
        ("mylib.mm", "aten.mm", False),
    ],
)
def test_what_a_pattern_means(pattern: str, name: str, means: bool) -> None:
    assert matches_op(pattern, name) is means


def test_an_op_comes_with_its_gradients(tmp_path: Path) -> None:
    found = chosen(tmp_path, ops=["aten.softmax"], tensors=True)
    assert {(module, op, call) for module, op, call, _ in found} == {
        (f"layers.{n}", "aten._softmax", n) for n in range(3)
    }
    assert {direction for *_, direction in found} == {"forward", "backward"}
    backward = next(line for line in calls(tmp_path) if line["direction"] == "backward")
    assert backward["ran"] == "aten._softmax_backward_data"
    assert "value" in backward["in"][0] and "value" in backward["out"][0]
    assert {line["kind"] for line in calls(tmp_path)} == {"op"}  # no weights


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("aten.softmax #1", {("layers.1", "aten._softmax", 1)}),
        ("layers.2 · aten.softmax #2", {("layers.2", "aten._softmax", 2)}),
        ("layers.1 · aten.softmax", {("layers.1", "aten._softmax", 1)}),
        ("Torch.softmax.1", {("layers.1", "aten._softmax", 1)}),
        ("Torch_softmax_1", {("layers.1", "aten._softmax", 1)}),
        # As fastcheck's msprobe style has it, whatever the module calls.
        ("Functional.softmax.1", {("layers.1", "aten._softmax", 1)}),
        ("Torch.addmm.5.backward", {("layers.1.v", "aten.addmm", 5)}),
        # Each attention has three; the API is what the module calls.
        ("Functional.linear.4", {("layers.1.k", "aten.addmm", 4), ("layers.1.k", "aten.t", 4)}),
        ("layers.1.v · aten.addmm", {("layers.1.v", "aten.addmm", 5)}),
    ],
)
def test_one_call_by_its_number(tmp_path: Path, name: str, expected: set[Any]) -> None:
    found = chosen(tmp_path, ops=[name])
    assert {entry[:3] for entry in found if entry[1] != "aten.view"} == expected
    assert "backward" in {direction for *_, direction in found}


@pytest.mark.parametrize("option", ["ops", "first", "last"])
def test_the_name_of_a_module_is_no_operator(tmp_path: Path, option: str) -> None:
    name = "Module.layers.1.Attention.backward.0"
    with pytest.raises(fastcheck.ConfigError, match=rf"{option}= names an op(?s:.*)'layers\.1'\]"):
        fastcheck.Dumper(tmp_path, **{option: [name] if option == "ops" else name})
    with pytest.raises(fastcheck.ConfigError, match=r"give it to modules="):
        fastcheck.override(name, device="cpu")
    assert not list(tmp_path.iterdir())


def test_a_name_as_a_message_in_msprobes_style_has_it(tmp_path: Path) -> None:
    model = Model()
    with fastcheck.install(
        model, level="op", stop=fastcheck.Stop(style="msprobe"), overflow_nums=-1
    ) as monitor:
        model(torch.ones(6, 8)).sum().backward()
    names = {
        msprobe_name(monitor.sites[int(record["site"])], int(record["call"]))
        for record in monitor.records()
    }
    names = {name for name in names if ".softmax.2" in name or ".addmm.9" in name}
    assert {"Functional.softmax.2.backward.output.0", "Torch.addmm.9.forward.output.0"} <= names
    for name in sorted(names):
        shutil.rmtree(tmp_path)
        found = chosen(tmp_path, ops=[name])
        assert {(op, call) for _, op, call, _ in found} in (
            {("aten._softmax", 2)},
            {("aten.addmm", 9)},
        )


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", ["Torch.softmax.1.{}", "layers.1 · aten.softmax #1 · {}"])
def test_one_direction(tmp_path: Path, name: str, direction: str) -> None:
    found = chosen(tmp_path, ops=[name.format(direction)])
    assert found and {entry[3] for entry in found} == {direction}


def test_ops_within_modules(tmp_path: Path) -> None:
    found = chosen(tmp_path, ops=["aten.addmm"], modules=["layers.1", "head"])
    assert {module for module, *_ in found} == {"layers.1.q", "layers.1.k", "layers.1.v", "head"}
    everything = chosen(tmp_path / "all", modules=["layers.0"])
    assert {"aten._softmax", "aten.addmm"} <= {op for _, op, *_ in everything}
    assert {module.split(".")[1] for module, *_ in everything} == {"0"}
    stored = next(line for line in calls(tmp_path / "all") if line["kind"] == "stored")
    assert {entry["label"].rpartition(".")[0] for entry in stored["in"]} == {
        f"layers.0.{name}" for name in "qkv"
    }


@pytest.mark.parametrize("name", ["layers.1", "Module.layers.1.Attention.forward.0", "layers.1 #0"])
def test_modules_at_module_level(tmp_path: Path, name: str) -> None:
    found = chosen(tmp_path, level="module", modules=[name])
    assert {module for module, *_ in found if "." not in module[7:]} == {"layers.1"}
    assert "layers.0" not in {module for module, *_ in found}


def test_gradients_of_a_module_alone(tmp_path: Path) -> None:
    found = chosen(tmp_path, level="module", modules=["Module.layers.1.Attention.backward.0"])
    assert {entry[3] for entry in found} == {"backward"} and len(found) >= 2


def test_from_one_name_to_another(tmp_path: Path) -> None:
    found = chosen(tmp_path, first="layers.1 · aten.softmax", last="layers.2 · aten.softmax")
    forward = [entry for entry in found if entry[3] == "forward"]
    assert forward[0][:2] == ("layers.1", "aten._softmax")
    assert forward[-1][:2] == ("layers.2", "aten._softmax")
    # And of backward what belongs to these.
    assert {m for m, *_, d in found if d == "backward"} == {m for m, *_ in forward}
    assert not [entry for entry in found if entry[3] == "optimizer"]
    modules = chosen(tmp_path / "m", level="module", first="layers.1.k", last="layers.2.q")
    assert {module for module, *_ in modules} == {
        "layers.1.k",
        "layers.1.v",
        "layers.2",
        "layers.2.q",
    }


def test_straight_from_an_overflow(tmp_path: Path) -> None:
    """The log names the op; the next run dumps it."""

    def train(model: nn.Module) -> None:
        model(torch.ones(2, 8)).sum().backward()

    model = nn.Sequential(nn.Linear(8, 8), Apply(lambda x: (x - 10).sqrt()), nn.Linear(8, 4))
    monitor = fastcheck.install(model, level="op", log_dir=tmp_path / "log")
    with pytest.raises(fastcheck.OverflowDetected) as stop:
        train(model)
    monitor.remove()
    assert culprit(stop.value)[:2] == ("1", "aten.sqrt")
    headline = str(stop.value).splitlines()[0]
    for step, options in enumerate(
        (
            {"from_log": tmp_path / "log"},
            {"ops": [headline]},
            {"ops": [str(stop.value.culprit.site)]},
        )
    ):
        with fastcheck.Dumper(tmp_path / "dump", step=step, tensors=True, **options):
            train(model)
        forward = [x for x in calls(tmp_path / "dump", step) if x["direction"] == "forward"]
        assert [(x["module"], x["op"], x["call"]) for x in forward] == [("1", "aten.sqrt", 0)]
    records = log(tmp_path / "dump").records
    assert int(records["nan_count"].max()) == 16
    # At module level: the modules that it names.
    with fastcheck.Dumper(tmp_path / "m", level="module", from_log=tmp_path / "log"):
        train(model)
    assert {line["module"] for line in calls(tmp_path / "m") if line["kind"] == "module"} == {"1"}


def test_a_log_of_module_level_names_modules(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Apply(lambda x: (x - 10).sqrt()), nn.Linear(8, 4))
    monitor = fastcheck.install(model, log_dir=tmp_path / "log")
    with pytest.raises(fastcheck.OverflowDetected):
        model(torch.ones(2, 8))
    monitor.remove()
    with fastcheck.Dumper(tmp_path / "dump", from_log=tmp_path / "log"):
        model(torch.ones(2, 8))
    assert ops(tmp_path / "dump") == ["aten.sub.Tensor", "aten.sqrt"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ops": ["aten.sofmax"]}, "did you mean .*'aten.softmax'"),
        ({"ops": ["matmull"]}, "did you mean"),
        ({"ops": [3]}, "ops must be a string or a list of strings"),
        ({"ops": []}, "ops holds no name(?s:.*)leave ops= out"),
        ({"first": 3}, "first can't be used(?s:.*)3"),
        ({"ops": ["aten.mm"], "level": "module"}, 'level="op"'),
        ({"modules": ["layers.1 #2"]}, 'level="module" only'),
        ({"from_log": "nowhere"}, "there is no log here"),
    ],
)
def test_what_is_known_to_mean_nothing_is_an_error_at_once(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(fastcheck.ConfigError, match=message):
        fastcheck.Dumper(tmp_path, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ops": ["aten.softmax #9"]}, "aten._softmax ran 3 times, #0 to #2"),
        ({"ops": ["aten.log_softmax", "aten.erfinv"]}, "'aten.erfinv'"),
        ({"ops": ["aten.einsum"]}, "made of other operators.*Functional.einsum"),
        ({"ops": ["Functional.layer_norm"]}, "no call in the block has the name"),
        ({"ops": ["layers.7 · aten.addmm"]}, "did you mean 'layers.0'"),
        ({"modules": ["layer.1"]}, "did you mean .*'layers.1'"),
        ({"modules": ["haed"], "level": "module"}, "did you mean 'head'"),
        ({"first": "aten.erfinv"}, "'aten.erfinv'"),
    ],
)
def test_a_name_that_nothing_went_by_is_an_error_at_the_end(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(fastcheck.ConfigError, match=message):
        chosen(tmp_path, **options)
    said = index(tmp_path)
    assert said["is_complete"] and "no call in the block has the name" in said["unmet"]


def test_a_module_that_the_given_model_lacks_is_an_error_at_once(tmp_path: Path) -> None:
    dumper = fastcheck.Dumper(tmp_path, model=Net(), modules=["haed"])
    with pytest.raises(fastcheck.ConfigError, match="did you mean 'head'"), dumper:
        raise AssertionError("it has begun")
    assert torch._C._len_torch_dispatch_stack() == 0


def test_the_error_of_the_block_comes_first(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), fastcheck.Dumper(tmp_path, ops=["aten.erfinv"]):
        1 / 0  # noqa: B018  (for its error)
    assert place(tmp_path).exists()
