"""Every option of install() that can't be used is an error that says what was expected, what came,
and what to do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from training import Net

CASES: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"overflow_nums": 0}, ("overflow_nums", "at least 1", "-1 to never stop", "0")),
    ({"overflow_nums": -2}, ("overflow_nums", "-2")),
    ({"overflow_nums": True}, ("overflow_nums", "True")),
    ({"overflow_nums": 1.5}, ("overflow_nums", "1.5")),
    ({"level": "layer"}, ("unknown level", '"module"', "'layer'")),
    ({"level": "layer", "include": "head"}, ("unknown level", "'layer'")),
    ({"record": "ful"}, ("unknown record", '"health"', "'ful'", "did you mean 'full'?")),
    ({"sync": "always"}, ("unknown sync", '"never"')),
    ({"count": "everything"}, ("unknown count", '"origin" or "all"')),
    (
        {"action": "rais"},
        ("unknown action", '"raise" or "warn" or a callable', "did you mean 'raise'?"),
    ),
    ({"action": 3}, ("unknown action", "3")),
    ({"within": 0}, ("within", "0")),
    ({"every": 0}, ("every", "every=1")),
    ({"every": "2"}, ("every", "'2'")),
    ({"history": 0}, ("history", "0")),
    ({"max_skipped": 0}, ("max_skipped", "0")),
    ({"log_dir": 3}, ("log_dir", "3")),
    ({"log_limit": "big"}, ("log_limit", "'big'", '"1GB"')),
    ({"include": "block.*"}, ("include pattern 'block.*' matches no module", "blocks.0")),
    ({"exclude": ["blocks.0", "haed"]}, ("exclude pattern 'haed'", "did you mean 'head'?")),
    ({"exclude": "zzzz"}, ("exclude pattern 'zzzz'", "model.named_modules()")),
    ({"include": []}, ("include holds no pattern", "[]")),
    ({"include": [3]}, ("include holds no pattern", "3")),
    ({"exclude": "*"}, ("nothing to observe", "Net")),
    (
        {"optimizer": nn.Linear(1, 1)},
        ("not an optimizer", "torch.optim.Optimizer", "Linear", "monitor.step()"),
    ),
    ({"optimizer": [3]}, ("not an optimizer", "int: 3")),
    ({"process_group": "gloo"}, ("not a process group", "new_group()", "str: 'gloo'")),
    ({"scaler": "dynamic"}, ("not a loss scale", "GradScaler", "'dynamic'")),
    ({"scaler": -1.0}, ("not a loss scale", "-1.0")),
]


@pytest.mark.parametrize(("options", "words"), CASES, ids=[str(options) for options, _ in CASES])
def test_an_option_that_cannot_be_used(options: dict[str, Any], words: tuple[str, ...]) -> None:
    model = Net()
    with pytest.raises(fastcheck.ConfigError) as caught:
        fastcheck.install(model, **options)
    text = str(caught.value)
    assert "expected:" in text
    assert "came:" in text
    for word in words:
        assert word in text
    assert all(not module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("model", [None, 3, "model", [nn.Linear(1, 1)], nn.Linear, torch.ones(2)])
def test_something_that_is_not_a_model(model: Any) -> None:
    with pytest.raises(fastcheck.ConfigError, match=r"expected: a torch\.nn\.Module") as caught:
        fastcheck.install(model)
    assert type(model).__name__ in str(caught.value)


def test_an_optimizer_in_the_place_of_a_model() -> None:
    model = Net()
    with pytest.raises(fastcheck.ConfigError, match=r"install\(model, optimizer=") as caught:
        fastcheck.install(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert len(str(caught.value).splitlines()) == 4


def test_an_unknown_option() -> None:
    model = Net()
    with pytest.raises(TypeError, match="did you mean 'overflow_nums'") as caught:
        fastcheck.install(model, overflow_num=1)  # type: ignore[arg-type]  # also seen by mypy
    assert "install() has no option 'overflow_num'" in str(caught.value)
    assert "protect_weights" in str(caught.value)
    assert not model._forward_hooks
    with pytest.raises(TypeError, match="no option 'x'"):
        fastcheck.install(model, x=1)  # type: ignore[arg-type]  # also seen by mypy


def test_the_class_of_a_model() -> None:
    with pytest.raises(fastcheck.ConfigError, match="the model itself, not its class"):
        fastcheck.install(Net)  # type: ignore[arg-type]  # also seen by mypy


def test_a_model_without_parameters() -> None:
    criterion = nn.CrossEntropyLoss()
    with pytest.raises(fastcheck.ConfigError, match="without parameters") as caught:
        fastcheck.install(criterion)
    assert "came:     CrossEntropyLoss, which has none" in str(caught.value)
    assert "fastcheck.install(model, criterion)" in str(caught.value)
    assert not criterion._forward_hooks


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
    with pytest.raises(fastcheck.ConfigError, match="every is out of range"):
        monitor.check_replicas(every=0)
    assert monitor.replica_mismatches == ()
