"""What install() observes, under which names; and what a Monitor gives back."""

from __future__ import annotations

import copy
import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fastcheck
from fastcheck._history import History
from training import Apply, Net, batches, poison, stopped, train

pytestmark = pytest.mark.usefixtures("fresh_start")


def names(monitor: fastcheck.Monitor, step: int = 0) -> list[str]:
    """The sites of a step's records, in device order, spelt out."""
    return [str(monitor.sites[r["site"]]) for r in monitor.records() if r["step"] == step]


class TestWhatIsObserved:
    def test_one_step_from_the_batch_to_the_gradients(self) -> None:
        model = nn.Sequential(nn.Linear(8, 4), nn.Tanh())
        monitor = fastcheck.install(model)
        train(model, 2)
        assert names(monitor, 1) == [
            "Sequential · forward · input[0]",
            "0 (Linear) · forward · output",
            "1 (Tanh) · forward · output",
            "1 (Tanh) · backward · gradient of output",
            "0 (Linear) · backward · gradient of output",
            "0 (Linear) · optimizer · param weight",
            "0 (Linear) · optimizer · param bias",
            "0 (Linear) · optimizer · gradient of weight",
            "0 (Linear) · optimizer · gradient of bias",
        ]

    def test_before_the_first_forward_what_is_stored_is_read(self) -> None:
        model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
        monitor = fastcheck.install(model)
        model(torch.ones(2, 8))
        assert names(monitor)[:6] == [
            "0 (Linear) · optimizer · param weight",
            "0 (Linear) · optimizer · param bias",
            "1 (BatchNorm1d) · optimizer · param weight",
            "1 (BatchNorm1d) · optimizer · param bias",
            "1 (BatchNorm1d) · optimizer · buffer running_mean",
            "1 (BatchNorm1d) · optimizer · buffer running_var",
        ]

    def test_the_records_are_those_of_stats(self) -> None:
        model = nn.Sequential(nn.Linear(8, 4))
        monitor = fastcheck.install(model)
        x = torch.randn(3, 8)
        y = model(x)
        last = monitor.records()[-1]
        expected = fastcheck.stats(y.detach()).record
        assert last.tobytes()[:112] == expected.tobytes()[:112]

    @pytest.mark.parametrize(("depth", "has_sum", "has_checksum"), [
        ("health", False, False), ("stats", True, False), ("full", True, True),
    ])  # fmt: skip
    def test_record_says_how_much(self, depth: str, has_sum: bool, has_checksum: bool) -> None:
        model = Net()
        monitor = fastcheck.install(model, record=depth)
        model(torch.randn(4, 8))
        last = monitor.records()[-1]
        assert bool(last["abs_sum"]) is has_sum
        assert bool(last["checksum"]) is has_checksum

    def test_integers_are_read_as_the_batch_only(self) -> None:
        model = nn.Sequential(Apply(lambda i: i + 1), nn.Embedding(10, 4))
        monitor = fastcheck.install(model)
        model(torch.tensor([1, 2]))
        assert names(monitor)[1:] == [
            "Sequential · forward · input[0]",
            "1 (Embedding) · forward · output",
        ]

    def test_several_models_have_names_of_their_own(self) -> None:
        model, one, two = Net(), nn.MSELoss(), nn.MSELoss()
        monitor = fastcheck.install(model, one, two)
        y, target = model(torch.ones(4, 8)), torch.zeros(4, 4)
        one(y, target)
        two(y, target + 1)
        assert names(monitor)[-4:] == [
            "MSELoss (MSELoss) · forward · input[1]",
            "MSELoss (MSELoss) · forward · output",
            "MSELoss_2 (MSELoss) · forward · input[1]",
            "MSELoss_2 (MSELoss) · forward · output",
        ]

    def test_a_module_given_twice_is_observed_once(self) -> None:
        model = Net()
        monitor = fastcheck.install(model, model.head)
        model(torch.ones(4, 8))
        assert len(model.head._forward_hooks) == 1
        assert names(monitor).count("head (Linear) · forward · output") == 1

    def test_a_shared_module_is_told_apart_by_its_calls(self) -> None:
        shared = nn.Linear(8, 8)
        model = nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), shared)
        monitor = fastcheck.install(model)
        train(model, 2)
        for step in (0, 1):
            calls = [
                int(r["call"])
                for r in monitor.records()
                if r["step"] == step
                and str(monitor.sites[r["site"]]) == "0 (Linear) · forward · output"
            ]
            assert calls == [0, 1, 2]

    def test_a_part_of_the_model_that_is_called_directly(self) -> None:
        model = Net()
        monitor = fastcheck.install(model)
        model.head(torch.ones(2, 8))
        assert names(monitor)[-2:] == [
            "head (Linear) · forward · input[0]",
            "head (Linear) · forward · output",
        ]


class TestPatterns:
    def test_include_covers_what_is_inside(self) -> None:
        model = Net()
        monitor = fastcheck.install(model, include="blocks.1")
        model(torch.ones(2, 8))
        modules = {name.split(" ")[0] for name in names(monitor)}
        assert modules == {"blocks.1", "blocks.1.a", "blocks.1.act", "blocks.1.b"}

    def test_exclude_covers_what_is_inside(self) -> None:
        model = Net()
        monitor = fastcheck.install(model, exclude="blocks")
        model(torch.ones(2, 8))
        assert not any("blocks" in name for name in names(monitor))
        assert any("head" in name for name in names(monitor))

    def test_wildcards_and_both_together(self) -> None:
        model = Net()
        monitor = fastcheck.install(model, include="blocks.*", exclude="*.act")
        model(torch.ones(2, 8))
        modules = {name.split(" ")[0] for name in names(monitor)}
        assert "blocks.2.b" in modules
        assert not any(module.endswith(".act") or module == "head" for module in modules)

    def test_excluded_parameters_are_not_read(self) -> None:
        model = Net()
        monitor = fastcheck.install(model, exclude="head")
        train(model, 2)
        assert not any("head" in name for name in names(monitor, 1))

    def test_no_exclusion_at_all(self) -> None:
        fastcheck.install(Net(), exclude=[])


class TestMonitor:
    def test_records_of_the_last_steps(self) -> None:
        model = Net()
        monitor = fastcheck.install(model, history=3)
        train(model, 10)
        records = monitor.records()
        assert records.dtype == fastcheck.RECORD_DTYPE
        # The open (or last) step, and three closed ones before it.
        assert sorted(set(records["step"].tolist())) == [6, 7, 8, 9]
        assert (np.diff(records["seq"]) == 1).all()

    def test_with_a_log_all_records_can_be_had(self, tmp_path: Path) -> None:
        model = Net()
        monitor = fastcheck.install(model, history=2, log_dir=tmp_path / "log")
        train(model, 8)
        assert sorted(set(monitor.records()["step"].tolist())) == list(range(8))
        monitor.remove()
        assert (np.diff(monitor.records()["seq"]) == 1).all()

    def test_a_stop_writes_what_is_held(self, tmp_path: Path) -> None:
        from fastcheck._logread import read_log

        model = nn.Sequential(nn.Linear(8, 8), Apply())
        fastcheck.install(model, history=5)

        def break_it(step: int) -> None:
            if step == 7:
                model[1].function = poison

        stop = stopped(train, model, 9, before_step=break_it)
        assert stop.log_path is not None
        log = read_log(stop.log_path)
        assert sorted(set(log.records["step"].tolist())) == [2, 3, 4, 5, 6, 7]
        assert [event.counted for event in log.events].count(True) == 1
        marked = log.records[(log.records["flags"] & int(fastcheck.Flag.EVENT)) != 0]
        assert [log.sites[r["site"]].module for r in marked] == ["1"]

    def test_with_a_log_a_stop_names_it(self, tmp_path: Path) -> None:
        from fastcheck._logread import read_log

        model = nn.Sequential(nn.Linear(8, 8), Apply(poison))
        fastcheck.install(model, log_dir=tmp_path / "log")
        stop = stopped(train, model, 1)
        assert stop.log_path == str(tmp_path / "log")
        assert not (tmp_path / "fastcheck_log").exists()
        log = read_log(stop.log_path)
        assert [e.verdict for e in log.events] == [fastcheck.Verdict.ORIGIN]
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
            "1 (Linear) · optimizer · param weight",
            "1 (Linear) · optimizer · param bias",
        ]
        assert stop.report.inputs[1][1]["max"] > 2e38
        assert stop.report.trend["step"].tolist() == [0, 1, 2, 3, 4]
        assert stop.report.trend[-1]["nan_count"] + stop.report.trend[-1]["posinf_count"] > 0
        assert stop.report.weights_intact
        assert "1 (Linear)" in str(stop)

    def test_the_report_of_a_gradient_shows_what_came_back(self) -> None:
        from training import nan_gradient

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
        from fastcheck._logread import read_log

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


class TestRemove:
    def test_nothing_is_left(self) -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        monitor = fastcheck.install(model)
        train(model, 2, optimizer=optimizer)
        monitor.remove()
        for module in model.modules():
            assert not module._forward_hooks
            assert not module._forward_pre_hooks
            assert not module._forward_hooks_with_kwargs
            assert not module._forward_hooks_always_called
        assert not optimizer._optimizer_step_pre_hooks
        count = len(monitor.records())
        train(model, 2, optimizer=optimizer)
        assert len(monitor.records()) == count

    def test_between_forward_and_backward(self) -> None:
        model = Net()
        monitor = fastcheck.install(model)
        y = model(torch.ones(2, 8))
        count = len(monitor.records())
        monitor.remove()
        y.sum().backward()
        assert len(monitor.records()) == count

    def test_twice(self) -> None:
        monitor = fastcheck.install(Net())
        monitor.remove()
        monitor.remove()
        monitor.flush()

    def test_a_step_afterwards_is_said_once(self) -> None:
        monitor = fastcheck.install(Net())
        monitor.remove()
        with pytest.warns(fastcheck.FastcheckWarning, match="nothing is observed") as caught:
            for _ in range(3):
                monitor.step()
        [warning] = caught
        assert warning.filename == __file__

    def test_as_a_context_manager(self) -> None:
        model = Net()
        with fastcheck.install(model) as monitor:
            train(model, 1)
        assert not model._forward_hooks
        assert monitor.event_count == 0

    def test_two_monitors_on_one_model(self) -> None:
        model = Net()
        one, two = fastcheck.install(model), fastcheck.install(model, record="health")
        train(model, 2)
        assert names(one) == names(two)
        one.remove()
        train(model, 1)
        assert two.step_index == 2
        assert one.step_index == 1
        two.remove()
        assert not model.head._forward_hooks

    def test_the_monitor_need_not_be_kept(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), Apply())
        fastcheck.install(model)
        gc.collect()

        def break_it(step: int) -> None:
            if step == 3:
                model[1].function = poison

        assert stopped(train, model, 5, before_step=break_it).step == 3


class TestCopies:
    def test_state_dict_is_unchanged(self) -> None:
        model = Net()
        before = copy.deepcopy(model.state_dict())
        fastcheck.install(model)
        assert list(model.state_dict()) == list(before)
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())

    def test_a_deep_copy_is_not_observed(self) -> None:
        model = Net()
        monitor = fastcheck.install(model)
        train(model, 1)
        twin = copy.deepcopy(model)
        count = len(monitor.records())
        train(twin, 2)
        assert len(monitor.records()) == count
        assert torch.equal(twin(torch.ones(1, 8)), twin(torch.ones(1, 8)))

    def test_a_pickle_is_not_observed(self, tmp_path: Path) -> None:
        model = Net()
        monitor = fastcheck.install(model)
        train(model, 1)
        torch.save(model, tmp_path / "model.pt")
        twin = torch.load(tmp_path / "model.pt", weights_only=False)
        count = len(monitor.records())
        x = torch.ones(1, 8)
        expected = twin(x)
        assert len(monitor.records()) == count
        assert torch.equal(expected, model(x))

    def test_the_optimizer_pickles_too(self, tmp_path: Path) -> None:
        model = Net()
        optimizer = torch.optim.Adam(model.parameters())
        fastcheck.install(model, optimizer=optimizer)
        train(model, 1, optimizer=optimizer)
        copy.deepcopy(optimizer)
        torch.save(optimizer, tmp_path / "optimizer.pt")


def test_history_is_bounded_within_a_step_that_never_ends() -> None:
    history = History(steps=2, max_step_records=100)
    for number in range(20):
        records = np.zeros(30, fastcheck.RECORD_DTYPE)
        records["seq"] = np.arange(30) + 30 * number
        if number == 1:
            records["flags"][7] = int(fastcheck.Verdict.ORIGIN) << 8
        history.add(records)
        if history.is_full:
            history.drop_oldest()
    held = history.all()
    assert len(held) <= 101
    assert history.find(37) is not None  # the event stays
    assert history.find(36) is None
    assert history.dropped_records == 600 - len(held)
    assert history.take_unlogged()["seq"].tolist() == list(range(600))


def test_more_records_in_a_step_than_the_ring_holds() -> None:
    from fastcheck._ring import CAPACITY

    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(60)))
    monitor = fastcheck.install(model)
    with torch.no_grad():
        for x in batches(CAPACITY // 60 + 2, 1, 2):
            model(x)
    records = monitor.records()
    assert len(records) > CAPACITY
    assert records["seq"].tolist() == list(range(len(records)))


def test_options_of_the_log_are_in_its_meta(tmp_path: Path) -> None:
    from fastcheck._logread import read_log

    model = Net()
    monitor: Any = fastcheck.install(model, log_dir=tmp_path / "log", every=2, include=["blocks.*"])
    monitor.remove()
    meta = read_log(tmp_path / "log").meta[0]
    assert meta["every"] == 2
    assert meta["include"] == ["blocks.*"]
