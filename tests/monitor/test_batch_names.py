"""Tests of monitor.batch() and monitor.step(batch_id=): which step a name belongs to."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.cli.main import main
from fastcheck.log.reader import read_batches

NAN = float("nan")


class Loop:
    """A model of two numbers, one batch a step."""

    def __init__(self, **options: Any) -> None:
        self.model = nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.monitor = fastcheck.install(self.model, record="stats", **options)

    def step(self, batch_id: Any = None, value: float = 1.0, updates: bool = True) -> None:
        if batch_id is not None:
            self.monitor.batch(batch_id)
        self.optimizer.zero_grad()
        self.model(torch.full((3, 4), value)).sum().backward()
        if updates:
            self.optimizer.step()

    def names(self, steps: int) -> list[Any]:
        return [self.monitor._core.meta.batches.of(step) for step in range(steps)]


def test_a_name_is_that_of_the_step_whose_forward_follows() -> None:
    loop = Loop()
    for name in (7, "shard 3, row 12", None, np.int64(9)):
        loop.step(name)
    assert loop.names(5) == [7, "shard 3, row 12", None, 9, None]
    assert type(loop.names(4)[3]) is int


def test_micro_batches_of_a_step() -> None:
    loop = Loop()
    for name in "abcabdef":
        loop.step(name, updates=False)
    loop.optimizer.step()
    for name in range(2):
        loop.step(name, updates=False)
    assert loop.names(2) == ["a, b, ..., f (6 batches)", "0, 1"]


def test_the_name_after_a_step_that_the_loop_leaves_is_the_next_ones() -> None:
    loop = Loop(overflow_nums=-1, training=fastcheck.Training(scaler=1024.0))
    loop.step("first")
    loop.step("overflows", NAN, updates=False)
    loop.step("third")
    loop.step("fourth")
    assert loop.names(4) == ["first", "overflows", "third", "fourth"]


def test_steps_that_are_not_read_have_their_names() -> None:
    loop = Loop(every=3)
    for number in range(5):
        loop.step(number)
    assert loop.names(5) == list(range(5))


def test_a_stop_has_the_batch_and_so_has_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    loop = Loop()
    loop.step("good")
    with pytest.raises(fastcheck.OverflowDetected) as caught:
        loop.step("shard 3\nrow 12", NAN)
    loop.monitor.remove()
    assert caught.value.report.batch == "shard 3 row 12"
    assert "Batch shard 3 row 12." in str(caught.value)
    assert caught.value.log_path is not None
    assert read_batches(caught.value.log_path, 0) == {0: "good", 1: "shard 3 row 12"}
    main(["show", caught.value.log_path])
    assert "Batch shard 3 row 12." in capsys.readouterr().out


def test_a_log_has_the_names_of_all_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = Loop(log_dir=tmp_path, overflow_nums=-1, sync="never")
    for name in (7, "b"):
        loop.step(name, NAN if name == "b" else 1.0)
        loop.monitor.step(batch_id=name)
    loop.monitor.remove()
    assert read_batches(str(tmp_path), 0) == {0: 7, 1: "b"}
    lines = (tmp_path / "batches-rank0.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines][-1] == {"step": 1, "batch": "b"}
    main(["show", str(tmp_path)])
    assert "Batch b." in capsys.readouterr().out


def test_step_names_the_batch_of_the_step_that_it_ends() -> None:
    loop = Loop()
    for number in range(3):
        loop.step()
        loop.monitor.step(batch_id=10 + number)
    assert loop.names(4) == [10, 11, 12, None]


def test_what_cannot_be_a_name() -> None:
    loop = Loop()
    with pytest.raises(fastcheck.ConfigError, match="batch_id can't be used"):
        loop.monitor.batch(torch.zeros(1000))
    with pytest.raises(fastcheck.ConfigError, match="on meta"):
        loop.monitor.step(batch_id=torch.zeros(1, device="meta"))

    class Bad:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    loop.step(torch.tensor([3, 5]))
    loop.step(Bad())
    loop.step("x" * 1000)
    first, second, third = loop.names(3)
    assert (first, second) == ("[3, 5]", "Bad, without a text (no text)")
    assert len(third) == 200


def test_without_names_nothing_listens() -> None:
    loop = Loop(watch=False)
    loop.step()
    assert loop.monitor._event_store.listeners == []
    assert not loop.monitor._core.meta.batches


def test_after_remove_nothing_is_named() -> None:
    loop = Loop()
    loop.monitor.remove()
    loop.monitor.batch(3)
    assert loop.names(2) == [None, None]


def spike(names: dict[int, Any]) -> Any:
    """A run whose targets are far off at step 35; ``names``: of the batches, by step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watch = fastcheck.Watch(window=32, warm_up=16)
    monitor = fastcheck.install(model, watch=watch, record="stats")
    for step in range(40):
        if step in names:
            monitor.batch(names[step])
        x = torch.randn(32, 8)
        loss = (model(x) - (1000 if step == 35 else 1) * x[:, :4]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fastcheck.WatchWarning)
        monitor.remove()
    return monitor


@pytest.mark.filterwarnings("ignore::fastcheck.WatchWarning")
def test_the_event_of_a_spike_names_its_batch() -> None:
    event = spike({step: f"row {step}" for step in range(40)}).watch.events[0]
    assert (event.kind, event.cause, event.batch) == ("loss_spike", "loss", "row 35")
    assert "; batch row 35" in str(event)
    assert event.to_dict()["batch"] == "row 35"
    plain = spike({}).watch.events[0]
    assert plain.batch is None and "batch" not in plain.to_dict()
