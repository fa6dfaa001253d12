"""The table of steps: loss, overflow, scale, learning rate and gradient norm of every step."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.cli.main import main
from fastcheck.log.reader import read_log
from fastcheck.log.step_table import StepRow, StepStream, step_rows
from fastcheck.record.format import RECORD_DTYPE, Depth
from fastcheck.record.site import Site
from support.programs.training import Net, batches, stopped

pytestmark = pytest.mark.usefixtures("fresh_start")


def trained(
    steps: int, overflows: tuple[int, ...] = (), **options: Any
) -> tuple[fastcheck.Monitor, list[StepRow]]:
    """A loop under a GradScaler with a schedule and clipping, and the rows that are expected."""
    torch.manual_seed(0)
    model = Net()
    monitor = fastcheck.install(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    expected = []
    for step, x in enumerate(batches(steps)):
        optimizer.zero_grad()
        loss = model(x).square().mean() * (1e38 if step in overflows else 1)
        scale, rate = scaler.get_scale(), optimizer.param_groups[0]["lr"]
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        row = StepRow(0, step, loss.item(), step in overflows, scale, rate, norm)
        expected.append(row)
    return monitor, expected


@pytest.mark.parametrize("overflows", [(), (1,)])
def test_the_norm_of_op_level_is_that_of_clipping(
    tmp_path: Path, op_observer: None, overflows: tuple[int, ...]
) -> None:
    monitor, expected = trained(3, overflows, level="op", record="stats", log_dir=tmp_path)
    assert_equal(monitor.step_table(), expected)
    monitor.remove()
    assert_equal(step_rows(read_log(tmp_path)), expected)


def test_at_op_level_the_norm_of_some_gradients_is_not_that_of_all(op_observer: None) -> None:
    model = Net()
    monitor = fastcheck.install(model, level="op", record="stats")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model(torch.ones(4, 8)).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.head.parameters(), 1.0)
    optimizer.step()
    assert [row.gradient_norm for row in monitor.step_table()] == [None]


def test_an_inf_that_backward_masks_skips_no_update(op_observer: None) -> None:
    """The derivative of a norm divides by 0, and masks the result."""
    model, scaler = Net(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with fastcheck.install(model, level="op", record="stats") as monitor:
        y = model(torch.ones(4, 8))
        scaler.scale(y.square().mean() + (y[0] - y[0].detach()).norm()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert [row.overflow for row in monitor.step_table()] == [False]
    assert scaler.get_scale() == 1024.0


def test_a_gradient_that_is_read_twice_in_one_step_and_not_at_all_in_the_next() -> None:
    weight = Site("", "Linear", "backward", "param_grad", 0, "weight")
    loss = Site("", "", "forward", "loss", 0, "loss")
    records = np.zeros(4, RECORD_DTYPE)
    records["step"], records["site"] = [0, 1, 1, 2], [0, 0, 0, 1]
    records["depth"], records["sum_sq"] = Depth.STATS, [1, 4, 16, 0]
    stream = StepStream({0: weight, 1: loss}, {}, 0)
    stream.add(records)
    assert [row.gradient_norm for row in stream.rows()] == [1, 4, None]


def assert_equal(rows: list[StepRow], expected: list[StepRow]) -> None:
    assert len(rows) == len(expected)
    for row, right in zip(rows, expected):
        for name, value in right.to_dict().items():
            found = getattr(row, name)
            if name == "gradient_norm" and right.overflow:
                assert not math.isfinite(found)
            else:
                assert found == pytest.approx(value, rel=1e-5), name


class TestOfTheMonitor:
    def test_has_every_step_of_the_run(self) -> None:
        monitor, expected = trained(20, (3, 7), log=fastcheck.Log(None, history=2))
        assert_equal(monitor.step_table(), expected)

    @pytest.mark.filterwarnings("ignore:Detected call of")
    def test_in_the_summary(self) -> None:
        monitor, _ = trained(3, (1,))
        text = monitor.summary()
        header = ["step", "loss", "overflow", "scale", "lr", "gradient", "norm"]
        assert header in [line.split()[-7:] for line in text.splitlines()]
        assert "1 of the last 3 updates skipped" in text

    def test_without_a_scaler(self) -> None:
        model = nn.Linear(4, 2)
        monitor = fastcheck.install(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loss = model(torch.ones(1, 4)).sum()
        loss.backward()
        optimizer.step()
        (row,) = monitor.step_table()
        assert (row.loss, row.scale, row.overflow, row.learning_rate) == (
            loss.item(), None, False, 0.5,
        )  # fmt: skip
        assert row.gradient_norm == pytest.approx(math.sqrt(10))
        assert "overflow" not in monitor.summary().split("steps ")[-1].splitlines()[0]

    def test_with_a_scale_of_the_users_own(self) -> None:
        model = nn.Linear(4, 2)
        monitor = fastcheck.install(model, training=fastcheck.Training(scaler=lambda: 8.0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loss = model(torch.ones(1, 4)).sum()
        (loss * 8).backward()
        optimizer.step()
        (row,) = monitor.step_table()
        assert (row.loss, row.scale) == (pytest.approx(loss.item(), rel=1e-6), 8.0)

    def test_the_learning_rate_is_the_largest_of_the_groups(self) -> None:
        model = Net()
        monitor = fastcheck.install(model)
        groups = [
            {"params": model.blocks.parameters(), "lr": 0.1},
            {"params": model.head.parameters(), "lr": 0.3},
        ]
        optimizer = torch.optim.SGD(groups)
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        assert monitor.step_table()[0].learning_rate == 0.3

    def test_counts_alone_hold_no_values(self) -> None:
        monitor, _ = trained(2, record="health")
        assert [row.loss for row in monitor.step_table()] == [None, None]

    def test_at_op_level(self) -> None:
        monitor, expected = trained(4, (2,), level="op", overflow_nums=-1)
        rows = monitor.step_table()
        monitor.remove()
        assert [r.loss for r in rows] == pytest.approx([r.loss for r in expected])
        assert [(r.scale, r.overflow) for r in rows] == [(r.scale, r.overflow) for r in expected]


class TestOfALog:
    def test_show_json_and_export(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        monitor, expected = trained(6, (3,), log_dir=tmp_path / "log")
        monitor.remove()
        assert_equal(step_rows(read_log(str(tmp_path / "log"))), expected)
        assert main(["show", str(tmp_path / "log")]) == 0
        assert "overflow, skipped" in capsys.readouterr().out
        assert main(["show", str(tmp_path / "log"), "--json"]) == 0
        steps = json.loads(capsys.readouterr().out)["steps"]
        assert [row["loss"] for row in steps] == pytest.approx([row.loss for row in expected])
        assert main(["export", str(tmp_path / "log"), str(tmp_path / "s.csv"), "--steps"]) == 0
        assert "6 rows of 7 columns" in capsys.readouterr().out
        with open(tmp_path / "s.csv", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        assert [int(row["overflow"]) for row in rows] == [0, 0, 0, 1, 0, 0]
        assert float(rows[5]["learning_rate"]) == expected[5].learning_rate

    def test_after_a_stop_that_a_persistent_overflow_caused(self, tmp_path: Path) -> None:
        stop = stopped(trained, 30, tuple(range(4, 30)), stop=fastcheck.Stop(max_skipped=3))
        rows = step_rows(read_log(stop.report.log_path))
        assert [row.step for row in rows] == list(range(7))
        assert [row.overflow for row in rows] == [False] * 4 + [True] * 3
        # That of the step, not what update() has made of it.
        assert stop.report.scale == rows[-1].scale == 1024.0

    def test_rows_of_a_damaged_meta_file_are_left_out(self) -> None:
        good = {"step": 1, "overflow": False, "scale": 2.0, "loss": None}
        bad: list[Any] = [7, {"step": "x"}, {"step": 1e999, "overflow": 1}, {"overflow": 0}]
        from fastcheck.log.step_table import _written

        assert [row.scale for row in _written({"steps": [*bad, good]}, 0)] == [2.0]
        assert not list(_written({"steps": 5}, 0))
