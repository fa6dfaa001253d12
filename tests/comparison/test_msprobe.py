"""compare() of dumps that mindstudio-probe 26.2.0 (msprobe) wrote itself
(tests/support/msprobe/make_fixtures.py), with each other and with logs of the same network.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fastcheck
from support.paths import TESTS

DUMPS = TESTS / "support" / "msprobe"


class Net(nn.Module):
    """As in make_fixtures.py, which needs msprobe to be imported."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.act = nn.GELU()
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.act(self.first(x)))


def same_run(directory: Path, nudge: float = 0.0) -> Path:
    """The run of the fixtures, with a log."""
    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        model.head.weight[0, 0] += nudge
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fastcheck.install(model, log_dir=directory):
        for _ in range(2):
            x, y = torch.randn(5, 4), torch.randint(0, 3, (5,))
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return directory


@pytest.mark.parametrize("left", ["statistics", "crc32", "tensors"])
@pytest.mark.parametrize("right", ["statistics", "crc32", "tensors"])
def test_the_same_step_in_every_mode_agrees(left: str, right: str) -> None:
    comparison = fastcheck.compare(DUMPS / left, DUMPS / right)
    assert comparison.agrees and not comparison.missing
    known = {"crc32", "tensors"}
    assert comparison.is_identical == ({left, right} <= known)
    said = {answer.question: answer.answer for answer in comparison.answers}
    assert said == {
        "environment": "unknown",
        "hyper-parameters": "unknown",
        "batches": "yes",
        "initial weights": "yes",
        "forward": "yes",
        "loss": "unknown",
        "gradients": "yes",
        "update": "unknown" if "tensors" in (left, right) else "yes",  # these have one step
    }


@pytest.mark.parametrize("mode", ["statistics", "crc32", "tensors"])
def test_a_weight_that_differs_is_named(mode: str) -> None:
    comparison = fastcheck.compare(DUMPS / "nudged", DUMPS / mode)
    found = comparison["initial weights"].found
    assert found is not None and found.row.name == "head · optimizer · head.weight"
    assert comparison["forward"].answer == "not asked"
    accepted = fastcheck.compare(DUMPS / "nudged", DUMPS / mode, accept="weights")
    first = accepted.first
    assert first is not None and first.row.name == "head · forward · output[0]"
    if mode == "tensors":
        assert first.row.elements is not None and first.row.elements.max_abs > 0
        assert first.row.actual is not None and first.row.actual["shape"] == [5, 3]
        assert first.row.actual["requires_grad"] is True


def test_nan_in_a_dump(tmp_path: Path) -> None:
    """dump.json then holds a bare NaN, which is no JSON."""
    comparison = fastcheck.compare(DUMPS / "with_nan", DUMPS / "statistics")
    found = comparison["batches"].found
    assert found is not None and found.row.reason == "NaN or infinities on one side"
    assert fastcheck.compare(DUMPS / "with_nan", DUMPS / "with_nan").agrees
    json.dumps(comparison.to_dict(), allow_nan=False)


@pytest.mark.parametrize("mode", ["statistics", "tensors"])
def test_a_dump_against_a_log_of_the_same_run(tmp_path: Path, mode: str) -> None:
    log = same_run(tmp_path / "log")
    # The dump is of one machine: on another the last bits may differ.
    accept = ["missing", "order"]
    comparison = fastcheck.compare(log, DUMPS / mode, accept=accept)
    assert comparison.agrees, str(comparison)
    assert comparison["initial weights"].answer == "yes"
    assert comparison["forward"].answer == "yes" and comparison["gradients"].answer == "yes"
    names = {one.name for one in comparison.missing}
    # What both read has a partner. An input that the dump reads again is missing in the log only
    # where its contents can't be found among what the log has.
    assert ("head · forward · input[0]" in names) == (mode == "statistics")
    assert "head · forward · output[0]" not in names
    assert (
        "head · optimizer · head.weight" not in names
    )  # which the log has twice in its first step
    nudged = same_run(tmp_path / "nudged", 0.5)
    other = fastcheck.compare(nudged, DUMPS / mode, accept=[*accept, "weights"])
    assert other.first is not None and other.first.row.name == "head · forward · output[0]"
    assert fastcheck.compare(DUMPS / mode, log, accept=accept).agrees


def test_any_directory_of_a_dump_may_be_given() -> None:
    whole = DUMPS / "statistics"
    for part in (whole / "step0", whole / "step0" / "proc1", whole / "step0/proc1/dump.json"):
        comparison = fastcheck.compare(part, whole)
        assert comparison.agrees and comparison.steps == (0,)


def test_npy_files_and_other_names(tmp_path: Path) -> None:
    """What msprobe writes for MindSpore: Cell instead of Module, .npy instead of .pt."""
    rank = tmp_path / "step0" / "rank0"
    shutil.copytree(DUMPS / "tensors" / "step0" / "proc1", rank)
    dump = json.loads((rank / "dump.json").read_text())
    for file in (rank / "dump_tensor_data").glob("*.pt"):
        np.save(file.with_suffix(".npy"), torch.load(file, weights_only=True).numpy())
        file.unlink()
    text = json.dumps(dump).replace("Module.", "Cell.").replace('.pt"', '.npy"')
    text = text.replace("Cell.first.", "Cell.body.first.")
    for file in (rank / "dump_tensor_data").iterdir():
        name = file.name.replace("Module.", "Cell.").replace("Cell.first.", "Cell.body.first.")
        file.rename(file.with_name(name))
    (rank / "dump.json").write_text(text)
    comparison = fastcheck.compare(tmp_path, DUMPS / "tensors", rename={"body.first": "first"})
    assert comparison.is_identical, str(comparison)


def test_apis_and_nested_arguments(tmp_path: Path) -> None:
    def tensor(value: float) -> dict[str, Any]:
        numbers = {"Max": value, "Min": value, "Mean": value, "Norm": abs(value)}
        return {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [], **numbers}

    def write(name: str, second: float) -> Path:
        data = {
            "Functional.linear.0.forward": {
                "input_args": [tensor(1.0), [tensor(2.0), {"type": "int", "value": 3}]],
                "input_kwargs": {"bias": tensor(3.0), "flag": {"type": "bool", "value": True}},
                "output": [tensor(4.0)],
            },
            "Functional.linear.1.forward": {
                "input_args": [tensor(4.0)],
                "output": [tensor(second)],
            },
            "Tensor.__add__.0.forward": {"input_args": [None, tensor(1.0)], "output": []},
            "Functional.linear.1.backward": {"input": [tensor(1.0)], "output": [tensor(7.0)]},
        }
        place = tmp_path / name
        place.mkdir()
        (place / "dump.json").write_text(json.dumps({"task": "statistics", "data": data}))
        return place

    actual, reference = write("actual", 5.5), write("reference", 5.0)
    comparison = fastcheck.compare(actual, reference)
    first = comparison.first
    assert first is not None and first.row.name == "Functional.linear · forward · output[0]"
    assert comparison.counts["batches"] == {"close": 3}  # of the first call
    assert comparison.counts["gradients"] == {"close": 2}
    assert fastcheck.compare(actual, actual).agrees


def test_half_a_dump_is_an_error_that_names_it(tmp_path: Path) -> None:
    shutil.copytree(DUMPS / "statistics", tmp_path / "dump")
    file = tmp_path / "dump/step1/proc1/dump.json"
    file.write_text(file.read_text()[:400])
    with pytest.raises(fastcheck.CompareError, match="can't be read") as caught:
        fastcheck.compare(tmp_path / "dump", DUMPS / "statistics")
    assert str(file) in str(caught.value)


def test_a_path_in_a_dump_leads_nowhere_else(tmp_path: Path) -> None:
    """Only files beside dump.json are read, whatever it names."""
    rank = tmp_path / "dump"
    shutil.copytree(DUMPS / "tensors" / "step0" / "proc1", rank)
    torch.save(torch.ones(5, 3), tmp_path / "outside.pt")
    text = (rank / "dump.json").read_text()
    name = "Module.head.Linear.forward.0.output.0.pt"
    (rank / "dump.json").write_text(text.replace(name, "../../outside.pt"))
    comparison = fastcheck.compare(rank, DUMPS / "tensors", accept="missing")
    assert comparison.verdict == "equal"  # by the statistics that stand in dump.json
    damaged = rank / "dump_tensor_data" / "Module.act.GELU.forward.0.output.0.pt"
    damaged.write_bytes(damaged.read_bytes()[:300])
    with pytest.raises(fastcheck.CompareError, match="GELU"):
        fastcheck.compare(rank, DUMPS / "tensors")


def own_calls(directory: Path, nudge: float = 0.0, act: Any = None, later: Any = None) -> Path:
    """The run of the fixtures, dumped at the level of APIs; ``later`` runs in the second step."""
    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        model.head.weight[0, 0] += nudge
    model.act = act or model.act
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        x, y = torch.randn(5, 4), torch.randint(0, 3, (5,))
        with fastcheck.Dumper(directory, step=step, level="api", order="logical"):
            nn.functional.cross_entropy(model(x), y).backward()
            if step and later is not None:
                later()
        optimizer.step()
        optimizer.zero_grad()
    return directory


def test_calls_of_apis_against_those_of_msprobe(tmp_path: Path) -> None:
    """Level L1 of both: msprobe's numbers, with the weights known as such by fastcheck's dump."""
    # The dump is of one machine: on another the last bits may differ.
    options: Any = {"accept": "order"}
    own, wrong = own_calls(tmp_path / "own"), own_calls(tmp_path / "wrong", 0.5)
    other = own_calls(tmp_path / "other", act=nn.GELU(approximate="tanh"))
    for sides in ((own, DUMPS / "apis"), (DUMPS / "apis", own)):
        found = fastcheck.compare(*sides, **options)
        assert found.agrees and not found.missing and found.steps == (0, 1), str(found)
        assert found["initial weights"].answer == found["gradients"].answer == "yes"
        assert any("gradients of inputs of API calls" in note for note in found.notes)
    found = fastcheck.compare(wrong, DUMPS / "apis", **options)
    assert found["initial weights"].found is not None
    weight = "Functional.linear · forward · input[1]"
    assert found["initial weights"].found.row.name == weight
    # What a second run has otherwise is left out.
    assert fastcheck.compare(DUMPS / "apis", wrong, repeat=own, **options).agrees
    found = fastcheck.compare(other, DUMPS / "apis", **options)
    assert found["initial weights"].answer == "yes" and found.first is not None
    assert found.first.row.name == "Functional.gelu · forward · output[0]"


@pytest.mark.parametrize(
    ("later", "name", "inputs", "output"),
    [
        (lambda: torch.ones(1, 2).clamp(max=0.5), "Tensor.clamp.0", [[1.0, 1.0]], [0.5, 0.5]),
        (lambda: 3 - torch.ones(1, 2), "Tensor.__rsub__.0", [[1.0, 1.0]], [2.0, 2.0]),
        # With no parameter, as in the step before.
        (
            lambda: nn.functional.linear(torch.ones(1, 2), torch.ones(1, 2)),
            "Functional.linear.2",
            [[1.0, 1.0]] * 2,
            [2.0],
        ),
    ],
)
def test_a_call_that_only_a_later_step_has(
    tmp_path: Path, later: Any, name: str, inputs: list[list[float]], output: list[float]
) -> None:
    def tensor(values: list[float]) -> dict[str, Any]:
        x = torch.tensor([values])
        numbers = {"Max": x.max(), "Min": x.min(), "Mean": x.mean(), "Norm": x.norm()}
        made = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": list(x.shape)}
        return {**made, **{key: float(number) for key, number in numbers.items()}}

    theirs = tmp_path / "theirs"
    shutil.copytree(DUMPS / "apis", theirs)
    file = theirs / "step1" / "proc1" / "dump.json"
    content = json.loads(file.read_text())
    call = {"input_args": [tensor(x) for x in inputs], "output": [tensor(output)]}
    content["data"][f"{name}.forward"] = call
    # Of what returns no tensor fastcheck has nothing.
    flag = [{"type": "bool", "value": True}]
    content["data"]["Torch.equal.0.forward"] = {"input_args": [tensor([1.0])] * 2, "output": flag}
    file.write_text(json.dumps(content))
    own = own_calls(tmp_path / "own", later=later)
    found = fastcheck.compare(own, theirs, accept="order")
    assert found.agrees and not found.missing, str(found)
    call["output"][0]["Max"] = 3.0
    file.write_text(json.dumps(content))
    found = fastcheck.compare(own, theirs, accept="order")
    assert found.first is not None and found.first.row.step == 1
    function = name[:-2].replace("__rsub__", "sub")
    assert found.first.row.name == f"{function} · forward · output[0]"


def as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


class Shared(nn.Module):
    """A residual stream that a module reads and that goes on beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stream = self.first(x) * 2
        return self.head(stream + self.norm(stream))


def train_shared(directory: Path, factor: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    model = Shared()
    model.norm.register_forward_hook(lambda module, x, y: y * factor)
    dump: dict[str, Any] = {}

    def described(tensors: Any) -> list[Any]:
        return [
            None
            if tensor is None
            else {
                "type": "torch.Tensor",
                "dtype": str(tensor.dtype),
                "shape": list(tensor.shape),
                "Max": float(tensor.max()),
                "Min": float(tensor.min()),
                "Mean": float(tensor.mean()),
                "Norm": float(tensor.norm()),
            }
            for tensor in (t if t is None else t.detach() for t in as_tuple(tensors))
        ]

    for name, module in model.named_children():
        key = f"Module.{name}.{type(module).__name__}"

        def forward(module: Any, x: Any, y: Any, key: str = key) -> None:
            values = {"input_args": described(x), "input_kwargs": {}, "output": described(y)}
            dump[f"{key}.forward.0"] = values

        def backward(module: Any, made: Any, given: Any, key: str = key) -> None:
            values = {"input": described(given), "output": described(made)}
            dump[f"{key}.backward.0"] = values

        module.register_forward_hook(forward)
        module.register_full_backward_hook(backward)
    # Of inputs that need no gradient the hooks warn.
    x, y = torch.randn(5, 4, requires_grad=True), torch.randint(0, 3, (5,))
    with fastcheck.install(model, log_dir=directory / "log"):
        nn.functional.cross_entropy(model(x), y).backward()
    (directory / "dump.json").write_text(json.dumps({"data": dump}))
    return model


def test_the_part_of_a_gradient_is_not_held_against_the_whole(tmp_path: Path) -> None:
    for name, factor in (("right", 1.0), ("wrong", 1.01)):
        (tmp_path / name).mkdir()
        train_shared(tmp_path / name, factor)
    dump = tmp_path / "right" / "dump.json"
    comparison = fastcheck.compare(tmp_path / "right" / "log", dump, accept="missing")
    assert comparison.agrees, str(comparison)
    assert any("1 gradient of inputs differs" in note for note in comparison.notes)
    # Of two msprobe dumps, and of two logs, these are compared with each other.
    first = fastcheck.compare(tmp_path / "wrong" / "log", dump, accept="missing").first
    assert first is not None and first.row.name == "norm · forward · output[0]"
    text = dump.read_text()
    data = json.loads(text)["data"]
    data["Module.norm.LayerNorm.backward.0"]["output"][0]["Norm"] *= 1.5
    (tmp_path / "dump.json").write_text(json.dumps({"data": data}))
    first = fastcheck.compare(tmp_path / "dump.json", dump).first
    assert first is not None and first.row.name == "norm · backward · gradient of input[0]"


def api_dump(place: Path, faults: dict[str, float], steps: int = 2) -> Path:
    """Level L1: a linear layer, a convolution of its output, a loss, and the optimizer's add_."""

    def tensor(value: float, wants: bool, *shape: int) -> dict[str, Any]:
        numbers = {"Max": value, "Min": value, "Mean": value, "Norm": abs(value)}
        made = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": list(shape), **numbers}
        return {**made, "requires_grad": wants}

    weight = 0.5
    for step in range(steps):

        def value(name: str, given: float, at: int = step) -> float:
            return given * faults.get(f"{name} {at}", 1.0)

        hidden = value("hidden", weight * (2.0 + step))
        made, gradient = value("made", hidden * weight), value("gradient", 0.1 * hidden)
        own = weight
        weight = value("weight", weight - gradient)
        data = {
            "Functional.linear.0.forward": {
                "input_args": [tensor(2.0 + step, False, 4, 8), tensor(own, True, 6, 8)],
                "output": [tensor(hidden, True, 4, 6)],
            },
            "Functional.conv1d.0.forward": {
                "input_args": [tensor(hidden, True, 4, 6), tensor(own, True, 6, 6, 1)],
                "output": [tensor(made, True, 4, 3)],
            },
            "Functional.conv1d.0.backward": {
                "input": [tensor(1.0, False, 4, 3)],
                "output": [tensor(gradient, False, 4, 6)],
            },
            "Tensor.add_.0.forward": {
                "input_args": [tensor(own, True, 6, 8), tensor(gradient, False, 6, 8)],
                "output": [tensor(weight, True, 6, 8)],
            },
        }
        file = place / f"step{step}" / "rank0" / "dump.json"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps({"task": "statistics", "level": "L1", "data": data}))
    return place


@pytest.mark.parametrize(
    ("fault", "question", "name"),
    [
        ("hidden 0", "forward", "Functional.linear · forward · output[0]"),
        ("hidden 1", "forward", "Functional.linear · forward · output[0]"),
        ("made 0", "forward", "Functional.conv1d · forward · output[0]"),
        ("gradient 0", "gradients", "Functional.conv1d · backward · gradient of input[0]"),
        ("weight 0", "update", "Tensor.add_ · forward · output[0]"),
    ],
)
def test_parameters_that_apis_read_are_no_batches(
    tmp_path: Path, fault: str, question: str, name: str
) -> None:
    """Nor are the optimizer's calls a forward: what is wrong leads, also where a later step reads
    weights that it has changed.
    """
    reference = api_dump(tmp_path / "reference", {})
    found = fastcheck.compare(api_dump(tmp_path / "actual", {fault: 1.05}), reference)
    assert found["batches"].answer == "yes" and found["initial weights"].answer == "yes"
    assert found[question].answer == "no" and found.first is not None
    assert (found.first.row.step, found.first.row.name) == (int(fault[-1]), name)
    healthy = fastcheck.compare(api_dump(tmp_path / "same", {"hidden 0": 1 + 1e-7}), reference)
    assert healthy.agrees
