"""Sinks by the names of libraries, against stand-ins with the libraries' interfaces."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from support.programs.training import Apply, chain, poison, stopped, train
from support.trackers import MAKE, Kept, pretend

pytestmark = pytest.mark.usefixtures("fresh_start")


def model_with_a_fault() -> nn.Sequential:
    return chain(fc=nn.Linear(8, 8), hole=Apply(), out=nn.Linear(8, 8))


@pytest.mark.parametrize("name", MAKE)
def test_steps_and_the_stop_reach_the_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = pretend(monkeypatch, name)
    model = model_with_a_fault()

    def before(step: int) -> None:
        model.hole.function = poison if step == 2 else Apply().function

    with fastcheck.install(model, sinks=[name]):
        stop = stopped(train, model, 3, before_step=before)
    rows: dict[int, dict[str, Any]] = {0: {}, 1: {}, 2: {}}
    for call in calls:
        if call[0] == "log" and "fastcheck/least_headroom" not in call[1]:
            step = call[1].get("step", call[1].get("fastcheck/step"))
            rows[step].update(call[1])
    assert list(rows) == [0, 1, 2]
    assert rows[0]["fastcheck/learning_rate"] == 0.01 and "fastcheck/loss" in rows[1]
    assert (rows[1]["fastcheck/events"], rows[2]["fastcheck/events"]) == (0, 1)
    alerts = [call for call in calls if call[0] == "alert" and "stop" in str(call[1:])]
    assert alerts, calls
    flat = alerts[-1][2].replace("    ", "")
    assert str(stop).splitlines()[0].strip() in flat
    if name in ("tensorboard", "aim"):
        assert calls[-1] == ("close",), "a run of its own is closed"


@pytest.mark.parametrize("name", MAKE)
def test_a_library_that_is_missing_is_an_error_at_install(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "torch.utils.tensorboard" if name == "tensorboard" else name
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delattr(torch.utils, "tensorboard", raising=False)
    with pytest.raises(fastcheck.ConfigError, match=f"pip install {name}"):
        fastcheck.install(model_with_a_fault(), sinks=[name])


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_library_without_an_active_run_is_an_error(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, name)
    module = sys.modules[name]
    if name == "wandb":
        monkeypatch.setattr(module, "run", None)
    elif name == "mlflow":
        monkeypatch.setattr(module, "active_run", lambda: None)
    else:
        monkeypatch.setattr(module.context_vars.current_run, "get", lambda: None)
    with pytest.raises(fastcheck.ConfigError, match=r"before fastcheck\.install"):
        fastcheck.install(model_with_a_fault(), sinks=name)


def test_names_stand_for_nothing_on_another_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, kept, model = pretend(monkeypatch, "wandb"), Kept(), model_with_a_fault()
    monkeypatch.setenv("RANK", "1")
    with fastcheck.install(model, sinks=["wandb", kept]):
        train(model, 2)
    assert calls == [] and len(kept.rows) == 2


@pytest.mark.parametrize("method", ["log", "log_metrics", "log_dict", "track"])
def test_objects_with_the_method_of_a_logger(method: str) -> None:
    rows: list[Any] = []
    logger = type("Logger", (), {method: lambda self, row, step: rows.append((step, row))})()
    model = model_with_a_fault()
    with fastcheck.install(model, sinks=(logger,)):
        train(model, 2)
    assert [step for step, _ in rows] == [0, 1] and "fastcheck/loss" in rows[0][1]


def test_a_summary_writer_that_is_given_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = pretend(monkeypatch, "tensorboard")
    given = sys.modules["torch.utils.tensorboard"].SummaryWriter()
    model = model_with_a_fault()
    with fastcheck.install(model, sinks=given):
        train(model, 2)
    assert ("close",) not in calls and [c for c in calls if c[0] == "run"] == [("run", "")]
    assert any("fastcheck/loss" in call[1] for call in calls if call[0] == "log")


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ("tensorbord", "did you mean|tensorboard"),
        (["wandb", 7], "log\\(dict, step\\)"),
        (object(), "log\\(dict, step\\)"),
    ],
)
def test_what_is_no_sink_is_an_error(
    given: Any, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, "wandb")
    with pytest.raises(fastcheck.ConfigError, match=match):
        fastcheck.install(model_with_a_fault(), sinks=given)


def test_a_moved_or_misspelt_option_names_sinks_among_the_options() -> None:
    with pytest.raises(TypeError, match="sinks"):
        fastcheck.install(model_with_a_fault(), sink="wandb")  # type: ignore[arg-type]  # the error
