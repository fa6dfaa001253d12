"""What install() observes and under which names; remove() and copies leave nothing behind."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import fastcheck
from support.programs.training import Apply, Net, names, poison, stopped, train

pytestmark = pytest.mark.usefixtures("fresh_start")


class TestWhatIsObserved:
    def test_one_step_from_the_batch_to_the_gradients(self) -> None:
        model = nn.Sequential(nn.Linear(8, 4), nn.Tanh())
        monitor = fastcheck.install(model)
        train(model, 2)
        assert names(monitor, 1) == [
            "Sequential · forward · input[0]",
            "0 (Linear) · forward · output",
            "1 (Tanh) · forward · output",
            "forward · loss",
            "1 (Tanh) · backward · gradient of output",
            "0 (Linear) · backward · gradient of output",
            "SGD · optimizer · lr",
            "0 (Linear) · optimizer · parameter 0.weight",
            "0 (Linear) · optimizer · parameter 0.bias",
            "0 (Linear) · optimizer · gradient of 0.weight",
            "0 (Linear) · optimizer · gradient of 0.bias",
        ]

    def test_before_the_first_forward_what_is_stored_is_read(self) -> None:
        model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
        monitor = fastcheck.install(model)
        model(torch.ones(2, 8))
        assert names(monitor)[:6] == [
            "0 (Linear) · optimizer · parameter 0.weight",
            "0 (Linear) · optimizer · parameter 0.bias",
            "1 (BatchNorm1d) · optimizer · parameter 1.weight",
            "1 (BatchNorm1d) · optimizer · parameter 1.bias",
            "1 (BatchNorm1d) · optimizer · buffer 1.running_mean",
            "1 (BatchNorm1d) · optimizer · buffer 1.running_var",
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

    @pytest.mark.parametrize("level", ["module", "op"])
    def test_a_pickle_needs_no_fastcheck(self, level: str) -> None:
        model = Net()
        with fastcheck.install(model, level=level):
            train(model, 1)
            data = pickle.dumps([model, copy.deepcopy(model)])
        assert b"fastcheck" not in data
        model, twin = pickle.loads(data)
        assert torch.equal(model(torch.ones(1, 8)), twin(torch.ones(1, 8)))

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
        fastcheck.install(model, training=fastcheck.Training(optimizer=optimizer))
        train(model, 1, optimizer=optimizer)
        copy.deepcopy(optimizer)
        torch.save(optimizer, tmp_path / "optimizer.pt")
        assert b"fastcheck" not in (tmp_path / "optimizer.pt").read_bytes()


def test_a_target_network_that_is_no_copy() -> None:
    """datawhalechina/easy-rl#140: two names for one module."""
    model = Net()
    with pytest.warns(fastcheck.FastcheckWarning, match="the same module twice"):
        fastcheck.install(model, model).remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fastcheck.install(model, copy.deepcopy(model)).remove()
