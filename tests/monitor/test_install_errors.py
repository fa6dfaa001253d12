"""An invalid option of install() is an error with what was expected, what it got, and a hint."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import pydoc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck import Filter, Log, Stop, Training
from support.programs.training import Net

CASES: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"overflow_nums": 0}, ("overflow_nums", "an int >= 1 or -1", "-1 to never stop", "0")),
    ({"overflow_nums": -2}, ("overflow_nums", "-2")),
    ({"overflow_nums": True}, ("overflow_nums", "True")),
    ({"overflow_nums": 1.5}, ("overflow_nums", "1.5")),
    ({"level": "layer"}, ("unknown level", '"module"', "'layer'")),
    ({"level": "layer", "include": "head"}, ("unknown level", "'layer'")),
    ({"record": "ful"}, ("unknown record", '"health"', "'ful'", "did you mean 'full'?")),
    ({"sync": "always"}, ("unknown sync", '"never"')),
    ({"every": 0}, ("every", "every=1")),
    ({"every": "2"}, ("every", "'2'")),
    ({"log_dir": 3}, ("the log's dir is not a path", "3")),
    ({"log_dir": "s3://bucket/log"}, ("dir is not a path on this machine", "s3://")),
    ({"include": "block.*"}, ("include pattern 'block.*' matches no module", "blocks.0")),
    ({"exclude": ["blocks.0", "haed"]}, ("exclude pattern 'haed'", "did you mean 'head'?")),
    ({"exclude": "zzzz"}, ("exclude pattern 'zzzz'", "model.named_modules()")),
    ({"include": []}, ("include holds no pattern", "[]")),
    ({"include": [3]}, ("include holds no pattern", "3")),
    ({"include": ["*", 3]}, ("include holds something that is not a string", "['*', 3]")),
    ({"include": 3}, ("include holds no pattern", "3")),
    ({"exclude": "*"}, ("nothing to observe", "Net")),
    ({"stop": "raise"}, ("stop must be a fastcheck.Stop", "'raise'")),
    ({"stop": 0}, ("stop must be a fastcheck.Stop", "0")),
    ({"log": "runs"}, ("log must be a fastcheck.Log", 'log_dir="..." is short for')),
    ({"filter": range(3)}, ("filter must be a fastcheck.Filter", "range(0, 3)")),
    ({"training": {}}, ("training must be a fastcheck.Training", "{}")),
    ({"log_dir": "a", "log": Log("b")}, ("log_dir= and log= are both given", "'a'", "'b'")),
    ({"log_dir": "a", "log": Log(None, history=3)}, ("both given", "history=3")),
    ({"filter": Filter(ops="mm")}, ("Filter(ops=) is for op level", "ops=('mm',)")),
    ({"filter": Filter(roles="output")}, ("Filter(roles=) is for op level", 'level="op"')),
]

GROUPS: list[tuple[type, dict[str, Any], tuple[str, ...]]] = [
    (Stop, {"count": "everything"}, ("unknown count", '"origin" or "all"')),
    (
        Stop,
        {"action": "rais"},
        ("unknown action", '"raise" or "warn" or a callable', "did you mean 'raise'?"),
    ),
    (Stop, {"action": 3}, ("unknown action", "3")),
    (Stop, {"within": 0}, ("within", "0")),
    (Stop, {"max_skipped": 0}, ("max_skipped", "0")),
    (Stop, {"max_lag": 0}, ("max_lag", "None for no limit", "0")),
    (Stop, {"protect_weights": "yes"}, ("unknown protect_weights", '"auto" or True or False')),
    (Stop, {"replay": "yes"}, ("replay must be a bool", "'yes'")),
    (Stop, {"dump": 3}, ("dump is not a path", "3")),
    (Stop, {"style": "msprob"}, ("unknown style", "did you mean 'msprobe'?")),
    (Log, {"dir": 3}, ("dir is not a path", "3")),
    (Log, {"dir": None, "limit": "big"}, ("limit", "'big'", '"1GB"')),
    (Log, {"dir": None, "history": 0}, ("history", "0")),
    (Filter, {"ops": []}, ("ops holds no pattern", "[]", "leave ops= out")),
    (Filter, {"ops": [3]}, ("ops holds no pattern", "3")),
    (Filter, {"roles": "outpt"}, ("unknown role", '"optimizer_state"', "did you mean 'output'")),
    (Filter, {"steps": 3}, ("steps must be ints", "range(100, 110)", "3")),
    (Filter, {"steps": [-1]}, ("steps must be ints", "[-1]")),
    (Filter, {"steps": range(3, -2, -1)}, ("steps must be ints", "range(3, -2, -1)")),
    (
        Training,
        {"optimizer": nn.Linear(1, 1)},
        ("not an optimizer", "torch.optim.Optimizer", "Linear", "monitor.step()"),
    ),
    (Training, {"optimizer": [3]}, ("not an optimizer", "int: 3")),
    (Training, {"optimizer": "adam"}, ("not an optimizer", "str: 'adam'")),
    (Training, {"process_group": "gloo"}, ("not a process group", "new_group()", "str: 'gloo'")),
    (Training, {"scaler": "dynamic"}, ("not a loss scale", "GradScaler", "'dynamic'")),
    (Training, {"scaler": -1.0}, ("not a loss scale", "-1.0")),
    (Training, {"scaler": float("inf")}, ("not a loss scale", "a finite number", "inf")),
    (Training, {"reset_overflow_status": "yes"}, ("reset_overflow_status must be a bool", "'yes'")),
]


def assert_explained(error: fastcheck.ConfigError, words: tuple[str, ...]) -> None:
    text = str(error)
    for word in ("expected:", "got:", *words):
        assert word in text


@pytest.mark.parametrize(("options", "words"), CASES, ids=[str(options) for options, _ in CASES])
def test_an_option_that_cannot_be_used(options: dict[str, Any], words: tuple[str, ...]) -> None:
    model = Net()
    with pytest.raises(fastcheck.ConfigError) as caught:
        fastcheck.install(model, **options)
    assert_explained(caught.value, words)
    assert all(not module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    GROUPS,
    ids=[f"{kind.__name__}({options})" for kind, options, _ in GROUPS],
)
def test_a_group_checks_itself(kind: type, options: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(fastcheck.ConfigError) as caught:
        kind(**options)
    assert_explained(caught.value, words)


@pytest.mark.parametrize(
    "group",
    [
        Stop("all", within=3, action="warn", dump="dump"),
        Log("runs", limit="2GiB", history=7),
        Filter(ops=["mm", "!aten.mul*"], roles="output", steps=range(3)),
        Training(scaler=2),
    ],
    ids=repr,
)
def test_groups_are_values(group: Any) -> None:
    """They can be compared, hashed, pickled and copied with changes, and not be changed."""
    assert pickle.loads(pickle.dumps(group)) == group
    assert hash(dataclasses.replace(group)) == hash(group)
    assert group != type(group)(*[None] if isinstance(group, Log) else ())
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(group, dataclasses.fields(group)[0].name, None)


def test_what_a_group_is_given_is_taken_once() -> None:
    assert Filter(ops=iter(["mm"]), steps=iter([1, 2])) == Filter(ops="mm", steps=(1, 2))
    assert Log(Path("runs")) == Log("runs") and Log("runs", "1MB").limit_bytes == 10**6
    assert Training(scaler=2) == Training(scaler=2.0)


#: Options of install() of before, and what is written instead.
MOVED = {
    "stop": ("count", "within", "action", "max_skipped", "max_lag", "protect_weights", "replay"),
    "log": ("history", "limit"),
    "filter": ("ops", "roles", "steps"),
    "training": ("optimizer", "scaler", "process_group", "reset_overflow_status"),
}
INSTEAD = {
    name: f"{group}=fastcheck.{group.capitalize()}({'dir, ' * (group == 'log')}{name}=...)"
    for group, names in MOVED.items()
    for name in names
}
INSTEAD["style"] = "stop=fastcheck.Stop(style=...)"
INSTEAD["dump_on_overflow"] = "stop=fastcheck.Stop(dump=...)"
INSTEAD["log_limit"] = "log=fastcheck.Log(dir, limit=...)"


@pytest.mark.parametrize("name", INSTEAD)
def test_an_option_of_a_group(name: str) -> None:
    model = Net()
    options: dict[str, Any] = {name: 1}
    with pytest.raises(TypeError) as caught:
        fastcheck.install(model, **options)
    assert str(caught.value) == f"install() has no option {name!r}; write {INSTEAD[name]}"
    assert not model._forward_hooks


def test_help_fits_two_screens() -> None:
    text = pydoc.render_doc(fastcheck.install, renderer=pydoc.plaintext)
    assert len(text.splitlines()) <= 66
    assert max(map(len, str(fastcheck.install.__doc__).splitlines())) <= 100
    for name in inspect.signature(fastcheck.install).parameters:
        assert name == "unknown" or f" {name}:" in text or f" {name}, " in text or name == "exclude"


@pytest.mark.parametrize("model", [None, 3, "model", [nn.Linear(1, 1)], nn.Linear, torch.ones(2)])
def test_something_that_is_not_a_model(model: Any) -> None:
    with pytest.raises(fastcheck.ConfigError, match=r"expected: a torch\.nn\.Module") as caught:
        fastcheck.install(model)
    assert type(model).__name__ in str(caught.value)


def test_an_optimizer_in_the_place_of_a_model() -> None:
    model = Net()
    with pytest.raises(fastcheck.ConfigError, match="finds the optimizer") as caught:
        fastcheck.install(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert len(str(caught.value).splitlines()) == 4


@pytest.mark.parametrize("kind", ["Stop", "Log", "Filter", "Training", "OnRequest", "Watch"])
def test_an_unknown_option_of_a_group(kind: str) -> None:
    group = getattr(fastcheck, kind)
    option = next(iter(inspect.signature(group).parameters))
    with pytest.raises(TypeError, match=f"did you mean '{option}'") as caught:
        group(**{option + "s": 1})
    assert f"{kind}() has no option '{option}s'" in str(caught.value)
    assert f"expected: {option}" in str(caught.value)


def test_no_optimizer_at_all() -> None:
    with pytest.raises(fastcheck.ConfigError, match=r"list: \[\]"):
        fastcheck.Training(optimizer=[])


def test_an_unknown_option() -> None:
    model = Net()
    with pytest.raises(TypeError, match="did you mean 'overflow_nums'") as caught:
        fastcheck.install(model, overflow_num=1)  # type: ignore[arg-type]  # also seen by mypy
    assert "install() has no option 'overflow_num'" in str(caught.value)
    assert "training" in str(caught.value)
    assert not model._forward_hooks
    with pytest.raises(TypeError, match="did you mean 'within'"):
        fastcheck.install(model, witin=1)  # type: ignore[arg-type]  # also seen by mypy
    with pytest.raises(TypeError, match="no option 'x'"):
        fastcheck.install(model, x=1)  # type: ignore[arg-type]  # also seen by mypy


def test_the_class_of_a_model() -> None:
    with pytest.raises(fastcheck.ConfigError, match="the model itself, not its class"):
        fastcheck.install(Net)  # type: ignore[arg-type]  # also seen by mypy


class Logarithm(nn.Module):
    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x * weight).log()


@pytest.mark.parametrize("models", [(nn.CrossEntropyLoss(),), (Logarithm(), nn.Linear(2, 2))])
def test_a_criterion_in_the_place_of_the_model(models: tuple[nn.Module, ...]) -> None:
    with pytest.raises(fastcheck.ConfigError, match="a criterion as its model") as caught:
        fastcheck.install(*models)
    assert f"got:      {type(models[0]).__name__}, which has no parameters" in str(caught.value)
    assert "fastcheck.install(model, criterion)" in str(caught.value)
    assert not models[0]._forward_hooks


def test_a_model_without_parameters_is_observed() -> None:
    """Quantized, or given its weights by the caller."""
    model, weight = Logarithm(), torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with fastcheck.install(model, overflow_nums=1) as monitor:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(3), weight).sum().backward()
            optimizer.step()
        assert monitor.records()["step"].max() == 2
        with pytest.raises(fastcheck.OverflowDetected, match="3 NaN in output of Logarithm"):
            model(-torch.ones(3), weight).sum().backward()


def test_a_further_module_needs_no_parameters() -> None:
    criterion = nn.MSELoss()
    monitor = fastcheck.install(Net(), criterion)
    criterion(torch.ones(3), torch.zeros(3))
    assert {monitor.sites[n].module for n in monitor.records()["site"]} >= {"MSELoss"}


def test_a_log_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model = Net()
    with pytest.raises(fastcheck.LogError, match="the log can't be written"):
        fastcheck.install(model, log_dir=tmp_path / "file" / "log")
    assert all(not module._forward_hooks for module in model.modules())


def test_replicas_of_a_single_rank_are_an_error() -> None:
    model = Net()
    monitor = fastcheck.install(model)
    with pytest.raises(fastcheck.ConfigError, match="is not initialised"):
        monitor.check_replicas()
    with pytest.raises(fastcheck.ConfigError, match="every must be an int >= 1"):
        monitor.check_replicas(every=0)
    assert monitor.replica_mismatches == ()


def test_torch_jit_script_of_a_model_that_is_observed() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with (
        fastcheck.install(model),
        pytest.raises(AttributeError, match=r"before fastcheck\.install"),
    ):
        torch.jit.script(model)
    torch.jit.script(model)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_a_module_that_keeps_its_monitor_says_why_it_cant_be_copied(copied: Any) -> None:
    """An average of the weights copies its model, and torch.save() pickles it."""
    model = Net()
    with fastcheck.install(model) as monitor:
        model.monitor = monitor
        with pytest.raises(TypeError, match="keep it outside of the module"):
            copied(model)


def test_one_step_is_told_as_one() -> None:
    model = nn.Linear(2, 1)
    with fastcheck.install(model) as monitor:
        model(torch.ones(1, 2)).sum().backward()
        monitor.step()
        assert "1 step, " in monitor.summary()
