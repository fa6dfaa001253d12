"""Tests of install(watch=): warnings, callbacks, log, summary; training is as without it."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any, Optional

import numpy as np
import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.watch.watcher import Watcher
from support.processes import run_python

#: Warmed up after a few steps, so that the tests are short.
WATCH = fastcheck.Watch(window=32, warm_up=16)


def train(
    watch: Any = WATCH,
    steps: int = 45,
    spoil: Optional[int] = None,
    log_dir: Optional[Path] = None,
    on: Any = None,
) -> Any:
    """A run whose batch is a thousand times too large at one step. The monitor, losses, weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = fastcheck.install(model, watch=watch, record="stats", log_dir=log_dir)
    if on is not None:
        monitor.watch.on(*on)
    losses = []
    for step in range(steps):
        x = torch.randn(32, 8)
        loss = (model(x) - (1000 if step == spoil else 1) * x[:, :4]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    monitor.remove()
    return monitor, losses, [p.detach().clone() for p in model.parameters()]


def test_training_is_bit_identical() -> None:
    with pytest.warns(fastcheck.WatchWarning):
        watched = train(spoil=35)
    plain = train(watch=False, spoil=35)
    assert watched[1] == plain[1]
    assert all(torch.equal(a, b) for a, b in zip(watched[2], plain[2]))


def test_a_healthy_run_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor, _, _ = train(steps=80)
    assert [event for event in monitor.watch.events if event.is_warning] == []


def test_a_spike_is_warned_of_at_the_users_line() -> None:
    with pytest.warns(fastcheck.WatchWarning) as caught:
        monitor, _, _ = train(spoil=35)
    first = next(one for one in caught if "the loss is" in str(one.message))
    assert first.filename == __file__
    event = monitor.watch.events[0]
    assert (event.kind, event.step, event.cause) == ("loss_spike", 35, "data")
    table = monitor.watch.table()
    assert table["kind"][0] == "loss_spike"
    assert table["value"][0] == event.value
    assert "the loss is" in monitor.summary()


@pytest.mark.filterwarnings("ignore::fastcheck.WatchWarning")
class TestCallbacks:
    @pytest.mark.parametrize("kind", ["loss_spike", "warning"])
    def test_one_is_called_with_the_event(self, kind: str) -> None:
        seen: list[Any] = []
        monitor, _, _ = train(spoil=35, on=(kind, seen.append))
        assert seen[0] is monitor.watch.events[0]

    def test_of_another_kind_none_is(self) -> None:
        seen: list[Any] = []
        train(spoil=35, on=("headroom", seen.append))
        assert seen == []

    def test_what_it_raises_leaves_the_training_loop(self) -> None:
        def stop(event: fastcheck.WatchEvent) -> None:
            raise KeyError(event.kind)

        with pytest.raises(KeyError, match="loss_spike"):
            train(spoil=35, on=("loss_spike", stop))

    def test_it_may_change_the_training(self) -> None:
        monitor, losses, _ = train(spoil=35, on=("loss_spike", lambda event: None))
        with pytest.raises(fastcheck.ConfigError, match="unknown kind"):
            monitor.watch.on("spike", print)
        with pytest.raises(fastcheck.ConfigError, match="needs a function"):
            monitor.watch.on("loss_spike", 3)
        assert len(losses) == 45


@pytest.mark.filterwarnings("ignore::fastcheck.WatchWarning")
def test_the_log_holds_the_events(tmp_path: Path) -> None:
    monitor, _, _ = train(spoil=35, log_dir=tmp_path)
    lines = (tmp_path / "watch-rank0.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert [one["kind"] for one in found] == [event.kind for event in monitor.watch.events]
    assert found[0]["movers"] and found[0]["text"] == str(monitor.watch.events[0])
    shown = run_python("-m", "fastcheck", "show", str(tmp_path))
    assert "the loss is" in shown.stdout
    shown = run_python("-m", "fastcheck", "show", str(tmp_path), "--json")
    assert json.loads(shown.stdout)["watch"][0]["kind"] == "loss_spike"


def test_a_changed_setting_of_the_optimizer_is_an_event() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    with fastcheck.install(model, record="stats", watch=True) as monitor:
        for step in range(4):
            if step == 2:
                optimizer.param_groups[0]["betas"] = (0.9, 0.5)
            model(torch.ones(4, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    (event,) = monitor.watch.events
    assert (event.kind, event.step, event.value) == ("settings", 2, 0.5)


def test_an_error_in_the_watch_switches_only_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Watcher, row: Any, chunks: Any) -> Any:
        raise ValueError("no such column")

    monkeypatch.setattr(Watcher, "add", fail)
    monitor, losses, _ = train(steps=5)
    assert len(losses) == 5
    assert "the watch is switched off: ValueError: no such column" in monitor.summary()
    assert len(np.unique(monitor.records()["step"])) == 5


def test_the_last_step_is_judged(tmp_path: Path) -> None:
    with pytest.warns(fastcheck.WatchWarning):
        monitor, _, _ = train(steps=36, spoil=35, log_dir=tmp_path)
    assert monitor.watch.events[0].step == 35
    assert "the loss is" in (tmp_path / "watch-rank0.jsonl").read_text()


def test_a_record_without_statistics_is_refused() -> None:
    with pytest.raises(fastcheck.ConfigError, match="nothing to watch"):
        fastcheck.install(nn.Linear(2, 2), watch=True, record="health")


def test_without_the_option_there_is_no_watch() -> None:
    monitor, _, _ = train(watch=False, steps=2)
    with pytest.raises(fastcheck.ConfigError, match="watch=True"):
        monitor.watch  # noqa: B018  # the property raises


@pytest.mark.parametrize("watch", ["yes", 3, fastcheck.Watch])
def test_what_is_no_option_is_refused(watch: Any) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(fastcheck.ConfigError, match="watch can't be used"):
        fastcheck.install(model, watch=watch)
    assert not model._forward_hooks
