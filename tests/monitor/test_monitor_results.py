"""The results of a Monitor: its records, its summary, its log, and the report of a stop."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fastcheck
from support.programs.training import Apply, Net, batches, poison, stopped, train

pytestmark = pytest.mark.usefixtures("fresh_start")


class TestMonitor:
    def test_records_of_the_last_steps(self) -> None:
        model = Net()
        monitor = fastcheck.install(model, log=fastcheck.Log(None, history=3))
        train(model, 10)
        records = monitor.records()
        assert records.dtype == fastcheck.types.RECORD_DTYPE
        # The open (or last) step, and three closed ones before it.
        assert sorted(set(records["step"].tolist())) == [6, 7, 8, 9]
        assert (np.diff(records["seq"]) == 1).all()

    def test_with_a_log_all_records_can_be_had(self, tmp_path: Path) -> None:
        model = Net()
        monitor = fastcheck.install(model, log=fastcheck.Log(tmp_path / "log", history=2))
        train(model, 8)
        assert sorted(set(monitor.records()["step"].tolist())) == list(range(8))
        monitor.remove()
        assert (np.diff(monitor.records()["seq"]) == 1).all()

    def test_a_stop_writes_what_is_held(self, tmp_path: Path) -> None:
        from fastcheck.log.reader import read_log

        model = nn.Sequential(nn.Linear(8, 8), Apply())
        fastcheck.install(model, log=fastcheck.Log(None, history=5))

        def break_it(step: int) -> None:
            if step == 7:
                model[1].function = poison

        stop = stopped(train, model, 9, before_step=break_it)
        assert stop.log_path is not None
        log = read_log(stop.log_path)
        assert sorted(set(log.records["step"].tolist())) == [2, 3, 4, 5, 6, 7]
        assert [event.counted for event in log.events].count(True) == 1
        marked = log.records[(log.records["flags"] & int(fastcheck.types.Flag.EVENT)) != 0]
        assert [log.sites[r["site"]].module for r in marked] == ["1"]

    def test_with_a_log_a_stop_names_it(self, tmp_path: Path) -> None:
        from fastcheck.log.reader import read_log

        model = nn.Sequential(nn.Linear(8, 8), Apply(poison))
        fastcheck.install(model, log_dir=tmp_path / "log")
        stop = stopped(train, model, 1)
        assert stop.log_path == str(tmp_path / "log")
        assert not (tmp_path / "fastcheck_log").exists()
        log = read_log(stop.log_path)
        assert [e.verdict for e in log.events] == [fastcheck.types.Verdict.ORIGIN]
        assert log.events[0].site == stop.culprit.site

    def test_the_report_shows_inputs_parameters_and_trend(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        fastcheck.install(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

        def grow(step: int) -> None:
            if step == 4:
                with torch.no_grad():
                    model[1].weight.fill_(3e38)

        stop = stopped(train, model, 9, optimizer=optimizer, before_step=grow)
        assert str(stop.culprit.site) == "1 (Linear) · forward · output"
        assert [str(site) for site, _ in stop.report.inputs] == [
            "1 (Linear) · forward · input[0]",
            "1 (Linear) · optimizer · parameter 1.weight",
            "1 (Linear) · optimizer · parameter 1.bias",
        ]
        assert stop.report.inputs[1][1]["max"] > 2e38
        assert stop.report.trend["step"].tolist() == [0, 1, 2, 3, 4]
        assert stop.report.trend[-1]["nan_count"] + stop.report.trend[-1]["posinf_count"] > 0
        assert stop.report.weights_intact
        assert "1 (Linear)" in str(stop)

    @pytest.mark.parametrize("updates", [False, True])
    def test_nothing_is_said_of_weights_that_a_loop_may_write(self, updates: bool) -> None:
        """An optimizer of copies, as of float32 masters, is not that of the model."""
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters() if updates else [torch.zeros(1)], lr=0.1)
        with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
            for step in range(4):
                optimizer.zero_grad()
                (model(torch.ones(3, 4)).mean() * (float("nan") if step == 3 else 1)).backward()
                optimizer.step()
        assert stop.value.report.weights_intact is (True if updates else None)
        assert ("No optimizer has updated a weight" in str(stop.value)) is updates

    def test_the_report_of_a_gradient_shows_what_came_back(self) -> None:
        from support.programs.training import nan_gradient

        model = nn.Sequential(nn.Linear(8, 8), Apply(nan_gradient), nn.Linear(8, 8))
        fastcheck.install(model)
        stop = stopped(train, model, 1)
        assert [str(site) for site, _ in stop.report.inputs] == [
            "1 (Apply) · backward · gradient of output",
            "1 (Apply) · forward · input[0]",
        ]

    def test_summary(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), Apply(poison), nn.Linear(8, 8))
        model.add_module("unused", nn.Linear(2, 2))
        model.forward = lambda x: model[2](model[1](model[0](x)))
        monitor = fastcheck.install(model, overflow_nums=-1)
        model(torch.ones(2, 8))
        text = monitor.summary()
        assert "1 counted overflow event (never stops)" in text
        assert "1 (Apply) output" in text
        assert "never seen running" in text
        assert "unused" in text

    def test_containers_are_not_missed(self) -> None:
        model = Net()
        monitor = fastcheck.install(model)
        model(torch.ones(2, 8))
        assert "never seen running" not in monitor.summary()

    def test_summary_before_anything_ran(self) -> None:
        assert "0 records" in fastcheck.install(Net()).summary()

    def test_repr(self) -> None:
        monitor = fastcheck.install(nn.Sequential(nn.Linear(2, 2)))
        assert repr(monitor) == "<fastcheck.Monitor: 2 modules, step 0, 0 events>"
        monitor.remove()
        assert "removed" in repr(monitor)

    def test_flush_writes_the_open_step(self, tmp_path: Path) -> None:
        model = Net()
        monitor = fastcheck.install(model, log_dir=tmp_path / "log")
        model(torch.ones(2, 8))
        monitor.flush()
        written = sum(path.stat().st_size for path in (tmp_path / "log").glob("records-*.bin"))
        assert written == monitor.records().nbytes > 0

    def test_a_verdict_that_changes_after_it_was_logged(self, tmp_path: Path) -> None:
        from fastcheck.log.reader import read_log

        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), Apply(torch.log))
        monitor = fastcheck.install(model, log_dir=tmp_path / "log")
        y = model(torch.ones(2, 8))
        monitor.flush()
        assert [e.verdict.name for e in read_log(tmp_path / "log").events] == ["UNRESOLVED"]
        stopped(monitor.step, loss=y.mean())
        log = read_log(tmp_path / "log")
        assert [(e.verdict.name, e.counted) for e in log.events] == [
            ("ORIGIN", True),
            ("PROPAGATED", False),
        ]

    def test_files_are_closed(self, tmp_path: Path) -> None:
        def open_files() -> int:
            links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.exists()]
            return sum(str(tmp_path) in link for link in links)

        model = Net()
        monitor = fastcheck.install(model, log_dir=tmp_path / "one")
        train(model, 1)
        assert open_files() > 0
        monitor.remove()
        assert open_files() == 0
        fastcheck.install(model, log_dir=tmp_path / "two")
        train(model, 1)
        assert open_files() > 0
        del model
        gc.collect()
        assert open_files() == 0


def test_more_records_in_a_step_than_the_ring_holds() -> None:
    from fastcheck.ring.host import CAPACITY

    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(60)))
    monitor = fastcheck.install(model)
    with torch.no_grad():
        for x in batches(CAPACITY // 60 + 2, 1, 2):
            model(x)
    records = monitor.records()
    assert len(records) > CAPACITY
    assert records["seq"].tolist() == list(range(len(records)))


def test_options_of_the_log_are_in_its_meta(tmp_path: Path) -> None:
    from fastcheck.log.reader import read_log

    model = Net()
    monitor: Any = fastcheck.install(model, log_dir=tmp_path / "log", every=2, include=["blocks.*"])
    monitor.remove()
    meta = read_log(tmp_path / "log").meta[0]
    assert meta["every"] == 2
    assert meta["include"] == ["blocks.*"]
