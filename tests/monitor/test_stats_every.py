"""install(stats_every=): most steps are read for their counts alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.record.format import Depth
from fastcheck.watch.watcher import Watcher
from support.programs.stats_every import LEVELS, assert_counts_between, run, whole_steps
from support.programs.training import stopped, train, where

pytestmark = pytest.mark.usefixtures("fresh_start")


@pytest.mark.parametrize("options", LEVELS)
def test_steps_between_have_the_counts(options: dict[str, Any], op_observer: None) -> None:
    assert_counts_between("cpu", overflow_nums=-1, **options)


@pytest.mark.parametrize("options", LEVELS)
def test_a_step_that_is_only_counted_stops_as_any_other(
    options: dict[str, Any], op_observer: None
) -> None:
    expected = stopped(run, "cpu", fault=4, **options)
    stop = stopped(run, "cpu", fault=4, stats_every=3, **options)
    assert (stop.step, where(stop.culprit)) == (4, where(expected.culprit))
    assert stop.culprit.record["nan_count"] == 1
    assert [where(event) for event in stop.events] == [where(event) for event in expected.events]


def test_steps_after_an_event_are_whole() -> None:
    monitor, _ = run("cpu", 20, fault=4, stats_every=5, overflow_nums=-1)
    assert monitor.event_count == 1
    assert whole_steps(monitor) == {0, 5, 10, 15} | {6, 7, 8, 9}


def test_steps_after_a_warning_of_the_watch_are_whole() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    monitor = fastcheck.install(model, stats_every=50, log=fastcheck.Log(None, history=100))

    def warn(step: int) -> None:
        if step == 5:
            for listener in monitor._session.event_store.listeners:
                listener.warned(3, "loss_spike", "")

    train(model, 9, before_step=warn)
    assert whole_steps(monitor) == {0, *range(5, 9)}


def test_begin_at_chooses_by_the_steps_number() -> None:
    model = nn.Linear(8, 4)
    monitor = fastcheck.install(model, stats_every=4, every=2, log=fastcheck.Log(None, history=20))
    monitor.begin_at(10)
    train(model, 9)
    assert set(monitor.records()["step"].tolist()) == {10, 12, 14, 16, 18}
    assert whole_steps(monitor) == {12, 16}


def test_a_parameter_of_one_element_is_counted_as_any_other() -> None:
    model = nn.Linear(8, 1)
    monitor = fastcheck.install(model, stats_every=2, log=fastcheck.Log(None, history=20))
    train(model, 3)
    of_step = [r for r in monitor.records() if r["step"] == 1 and r["numel"] == 1]
    depth_of = {monitor.sites[r["site"]].role: r["depth"] for r in of_step}
    assert depth_of["param"] == depth_of["param_grad"] == Depth.HEALTH
    assert depth_of["loss"] == Depth.FULL


def test_weights_that_stand_still_are_found_in_whole_steps() -> None:
    """Records without checksums are all alike."""
    moving, still = nn.Linear(8, 8), nn.Linear(8, 4)
    optimizer = torch.optim.SGD(moving.parameters(), lr=0.01)
    optimizer.add_param_group({"params": [*still.parameters()], "lr": 1e-30})
    model = nn.Sequential(moving, still)
    monitor = fastcheck.install(model, stats_every=2)
    with pytest.warns(fastcheck.FastcheckWarning, match="1.weight") as said:
        train(model, 60, optimizer=optimizer)
    assert not any("0.weight" in str(each.message) for each in said)
    assert monitor.event_count == 0


@pytest.mark.filterwarnings("error")
def test_a_healthy_run_is_silent() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with fastcheck.install(model, stats_every=3) as monitor:
        train(model, 60, optimizer=optimizer)
    assert not monitor.watch.events


def test_the_watch_is_given_whole_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(Watcher, "add", lambda self, *steps: given.extend(steps) or [])
    model = nn.Linear(8, 4)
    with fastcheck.install(model, stats_every=3):
        train(model, 9)
    read = {row.step for (row, chunks) in given if any(map(len, chunks))}
    assert len(given) == 9 and read == {0, 3, 6}


@pytest.mark.parametrize(
    "options, text",
    [
        ({"stats_every": 0}, "stats_every"),
        ({"stats_every": 2.5}, "stats_every"),
        ({"stats_every": 2, "record": "health"}, "counts in each step anyway"),
        ({"stats_every": 2, "record": "range"}, "reads each step whole"),
        ({"stats_every": 4, "every": 3}, "a multiple of 3, such as stats_every=30"),
    ],
)
def test_errors(options: dict[str, Any], text: str) -> None:
    with pytest.raises(fastcheck.ConfigError, match=text):
        fastcheck.install(nn.Linear(2, 2), **options)
