"""observe(name, tensor): a tensor of user code as a site of its own, and its gradient."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastcheck
from fastcheck import ConfigError, observe
from fastcheck.monitor import named_tensors as reader_of_names
from fastcheck.record.statistics import statistics_of
from fastcheck.types import Flag
from support.programs.observing import EXPECTED, net, readings, train
from support.programs.training import Apply, batches, names, nan_gradient, poison, stopped, where

pytestmark = pytest.mark.usefixtures("fresh_start")

NAN = float("nan")


class TestReading:
    def test_site_gradient_and_values(self) -> None:
        model, seen = net(), []
        model[1].after = lambda x: seen.append(x) or x
        monitor = fastcheck.install(model)
        train(model, 1)
        assert readings(monitor) == EXPECTED
        record = next(
            r for r in monitor.records() if monitor.sites[r["site"]].module == "1.attn.logits"
        )
        assert record["max"] == seen[0].max().item() and record["numel"] == seen[0].numel()

    def test_the_tensor_itself_comes_back_and_no_node_is_added(self) -> None:
        x = torch.randn(3, requires_grad=True).exp()
        node = x.grad_fn
        monitor = fastcheck.install(net())
        assert observe("x", x) is x and x.grad_fn is node
        monitor.remove()
        assert observe("x", x) is x

    @pytest.mark.usefixtures("op_observer")
    @pytest.mark.parametrize("level", ["module", "op"])
    def test_training_is_bit_identical(self, level: str) -> None:
        plain, watched = net(), net()
        state = torch.get_rng_state()
        losses = train(plain, 3)
        assert torch.equal(state, torch.get_rng_state())
        with fastcheck.install(watched, level=level):
            assert train(watched, 3) == losses
        assert torch.equal(state, torch.get_rng_state())
        for one, other in zip(plain.parameters(), watched.parameters()):
            assert torch.equal(one, other)

    def test_other_records_stay_where_a_module_has_read_it_before(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), Apply(lambda x: observe("again", x).sin()))
        with fastcheck.install(model) as monitor:
            model(torch.ones(2, 8)).sum().backward()
            found = [
                name
                for name in names(monitor)
                if name[0] in "01" and "optimizer" not in name and "input" not in name
            ]
        assert found[:3] == [
            "0 (Linear) · forward · output",
            "1.again (observe) · forward · output",
            "1 (Apply) · forward · output",
        ]
        assert sorted(found[3:]) == [
            "0 (Linear) · backward · gradient of output",
            "1 (Apply) · backward · gradient of output",
            "1.again (observe) · backward · gradient of output",
        ]

    def test_each_call_has_its_number(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), Apply(lambda x: observe("n", observe("n", x) + 1)))
        monitor = fastcheck.install(model)
        for _ in range(2):
            model(torch.ones(2, 8))
        found = [r for r in monitor.records() if monitor.sites[r["site"]].module == "1.n"]
        assert [int(r["call"]) for r in found] == [0, 1, 2, 3]

    def test_integers_are_read(self) -> None:
        monitor = fastcheck.install(net())
        observe("tokens", torch.arange(5))
        assert readings(monitor) == ["tokens (observe) · forward · output"]
        assert statistics_of(monitor.records()[0]).max == 4

    def test_a_parameter_is_read_without_a_hook_on_it(self) -> None:
        model = net()
        monitor = fastcheck.install(model)
        observe("weight", model[0].weight)
        assert readings(monitor) == ["weight (observe) · forward · output"]
        assert not model[0].weight._backward_hooks

    def test_a_leaf_gathers_no_hooks(self) -> None:
        model, leaf = net(), torch.ones(8, requires_grad=True)
        monitor = fastcheck.install(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in batches(3):
            model(x + observe("leaf", leaf)).sum().backward()
            optimizer.step()
        monitor.remove()
        assert not leaf._backward_hooks

    def test_it_begins_the_next_step(self) -> None:
        model = net()
        monitor = fastcheck.install(model)
        train(model, 1)
        observe("reward", torch.ones(3))
        assert monitor.step_index == 1
        train(model, 1)
        assert monitor.step_index == 1
        assert "reward (observe) · forward · output" in names(monitor, 1)

    def test_checkpointed_regions_are_read_again_and_marked(self) -> None:
        block = Apply(lambda x: observe("inner", x * 2).sin())

        def function(x: torch.Tensor) -> torch.Tensor:
            return observe("free", x * 3).cos()

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.block = nn.Linear(8, 8), block

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = checkpoint(self.block, self.first(x), use_reentrant=False)
                return checkpoint(function, x, use_reentrant=False)

        model = Model()
        monitor = fastcheck.install(model)
        model(torch.ones(2, 8)).sum().backward()
        for path in ("block.inner", "free"):
            found = [r for r in monitor.records() if monitor.sites[r["site"]].module == path]
            forward = [r for r in found if monitor.sites[r["site"]].role == "output"]
            assert [bool(r["flags"] & int(Flag.RECOMPUTE)) for r in forward] == [False, True]
            assert {int(r["call"]) for r in found} == {0}
            assert any(monitor.sites[r["site"]].role == "grad_output" for r in found)


class TestNothingIsDone:
    def test_without_a_monitor(self) -> None:
        gc.collect()  # models of other tests
        x = torch.ones(2, requires_grad=True)
        observe("x", x)
        assert not x._backward_hooks

    def test_after_remove_and_when_the_model_is_gone(self) -> None:
        from fastcheck.monitor import named_tensors as module

        gc.collect()
        model = net()
        fastcheck.install(model).remove()
        assert not module._is_on
        fastcheck.install(model)
        assert module._is_on
        del model
        gc.collect()
        assert not module._is_on

    def test_in_steps_that_every_leaves_out(self) -> None:
        model = net()
        monitor = fastcheck.install(model, every=2)
        train(model, 4)
        steps = {
            int(r["step"]) for r in monitor.records() if "observe" in str(monitor.sites[r["site"]])
        }
        assert steps == {0, 2}

    @pytest.mark.usefixtures("op_observer")
    @pytest.mark.parametrize("level", ["module", "op"])
    def test_while_paused(self, level: str) -> None:
        model = net()
        monitor = fastcheck.install(model, level=level)
        monitor._pause(True)
        train(model, 1)
        observe("x", torch.full((2,), NAN))
        assert not readings(monitor)
        monitor._pause(False)
        observe("x", torch.ones(2))
        assert readings(monitor)

    def test_a_pause_leaves_the_pass_that_is_open_as_it_is(self) -> None:
        model = net()
        monitor = fastcheck.install(model)
        loss = model(next(batches(1))).sum()
        monitor._pause(True)
        observe("x", torch.ones(2))
        loss.backward()
        assert readings(monitor) == [EXPECTED[0], EXPECTED[3]]


class TestVerdicts:
    def test_a_nan_between_the_submodules_is_named_there(self) -> None:
        model = net()
        model[1].before = poison
        fastcheck.install(model)
        stop = stopped(train, model)
        assert where(stop.culprit) == ("1.attn.logits", "output", "output", "origin")
        assert stop.culprit.reason == (
            "1.forward computed it between its submodules, from finite values; the model returned "
            "it"
        )
        assert stop.__traceback__ is not None

    def test_a_nan_that_came_before_it_is_propagated(self) -> None:
        model = net()
        model[0].register_forward_hook(lambda module, args, output: poison(output))
        monitor = fastcheck.install(model, overflow_nums=-1)
        train(model, 1)
        found = {where(event)[0]: where(event)[3] for event in monitor.events[:6]}
        assert found["1.attn.logits"] == "propagated"

    def test_what_was_read_before_follows_from_its_own_record(self) -> None:
        model = nn.Sequential(Apply(poison), Apply(lambda x: observe("again", x) + 1))
        model.append(nn.Linear(8, 8))
        monitor = fastcheck.install(model, overflow_nums=-1)
        model(torch.ones(2, 8))
        found = [where(event) for event in monitor.events]
        assert found[0] == ("0", "output", "output", "origin")
        assert found[1] == ("1.again", "output", "output", "propagated")

    def test_outside_of_the_modules(self) -> None:
        monitor = fastcheck.install(net())
        stop = stopped(observe, "reward", torch.tensor([1.0, NAN]))
        assert where(stop.culprit) == ("reward", "output", "output", "arrived")
        assert monitor.event_count == 1

    def test_a_mask_is_no_event(self) -> None:
        model = net()
        model[1].before = lambda x: x.masked_fill(torch.eye(4, 8) > 0, -float("inf"))
        model[1].after = lambda x: x.softmax(-1)
        monitor = fastcheck.install(model)
        model(next(batches(1)))
        assert monitor.event_count == 0
        assert [where(e)[3] for e in monitor.events] == ["unresolved"]

    def test_the_gradient_names_the_code_after_it(self) -> None:
        model = net()
        model[1].after = nan_gradient
        fastcheck.install(model)
        stop = stopped(train, model)
        assert where(stop.culprit) == ("1.attn.logits", "grad_output", "output", "origin")
        assert "the code in 1.forward that used the tensor" in stop.culprit.reason

    def test_a_module_that_reads_it_is_blamed_for_its_gradient(self) -> None:
        inner = Apply(nan_gradient)
        model = nn.Sequential(nn.Linear(8, 8), Apply(lambda x: inner(observe("h", x + 1))))
        model[1].inner = inner
        fastcheck.install(model)
        stop = stopped(train, model)
        assert where(stop.culprit)[:2] == ("1.inner", "grad_input")


class TestSeveralMonitors:
    def test_the_one_whose_module_is_running_reads(self) -> None:
        one, other = net(), net()
        first, second = fastcheck.install(one), fastcheck.install(other)
        one(torch.ones(4, 8))
        assert len(readings(first)) == 1 and not readings(second)
        observe("loss", torch.ones(1))
        assert len(readings(first)) == 2 and not readings(second)

    def test_of_the_model_that_was_called_last_else_the_last_monitor(self) -> None:
        one, other = net(), net()
        first, second = fastcheck.install(one), fastcheck.install(other)

        def observe_in_a_thread(name: str) -> None:
            thread = threading.Thread(target=observe, args=(name, torch.ones(1)))
            thread.start()
            thread.join()

        one(torch.ones(4, 8))
        observe_in_a_thread("elsewhere")
        assert len(readings(first)) == 1 and len(readings(second)) == 1
        other(torch.ones(4, 8))
        one(torch.ones(4, 8))
        observe("loss", torch.ones(1))
        second.remove()
        observe_in_a_thread("elsewhere")
        assert len(readings(first)) == 4 and len(readings(second)) == 2


class TestNames:
    @pytest.mark.parametrize("name", ["", ".a", "a.", "a..b", "a b", "a\n", 3, None])
    def test_that_cannot_be_used(self, name: Any) -> None:
        with pytest.raises(ConfigError, match=r"can't be the name .*\n  expected: printable text,"):
            observe(name, torch.ones(1))

    def test_no_tensor(self) -> None:
        with pytest.raises(ConfigError, match=r"got: +observe\(str, list\)"):
            observe("x", [torch.ones(1)])  # type: ignore[arg-type]  # wrong on purpose
        with pytest.raises(ConfigError, match=r"hint: +the name comes first"):
            observe(torch.ones(1), "x")  # type: ignore[arg-type]  # wrong on purpose

    def test_their_number_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reader_of_names, "_MAX_NAMES", 2)
        monitor = fastcheck.install(net())
        observe("a", torch.ones(1))
        observe("b", torch.ones(1))
        with pytest.warns(fastcheck.FastcheckWarning, match="other names already"):
            observe("c", torch.ones(1))
        observe("c", torch.ones(1))
        assert len(readings(monitor)) == 2

    def test_the_values_of_a_sparse_tensor_are_read(self) -> None:
        fastcheck.install(net())
        sparse = torch.eye(3).mul(float("nan")).to_sparse()
        with pytest.raises(fastcheck.OverflowDetected, match="NaN in output of adjacency"):
            observe("adjacency", sparse)

    def test_what_has_no_memory_is_named_in_the_summary(self) -> None:
        monitor = fastcheck.install(net())
        meta = torch.empty(3, device="meta")
        assert observe("adjacency", meta) is meta
        assert "observe('adjacency')" in monitor.summary()


def test_an_error_of_its_own_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    fastcheck.install(model)

    def fail(*args: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(reader_of_names.NamedTensors, "_call", fail)
    with pytest.warns(fastcheck.FastcheckWarning, match="no longer observes observe") as caught:
        train(model, 2)
    assert len(caught) == 2  # one for each name
