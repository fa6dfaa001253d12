"""torch.compile: what is recompiled and what is not, modules that pass unread, and Inductor."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from support.programs import compiling
from support.programs.compiling import compiled, counter, eager, net, observed, one_submodule, sites
from support.programs.training import Apply, Residual, batches, stopped, train, where
from support.sampling import sample

pytestmark = compiling.marks


class TestCompilations:
    def test_cadence_never_compiles_again(self) -> None:
        model, backend = net(), counter()
        monitor = fastcheck.install(model, every=3)
        train(compiled(model, backend), 20)
        assert backend.frame_count == 1
        assert {int(step) for step in monitor.records()["step"]} == set(range(0, 20, 3))

    def test_layers_share_one_compilation(self) -> None:
        """And so do monitors that come one after the other."""
        model, backend = nn.Sequential(*(Residual() for _ in range(12))), counter()
        for layer in model:
            layer.compile(backend=backend, fullgraph=True)
        monitor = fastcheck.install(model)
        model(torch.ones(2, 8, requires_grad=True)).square().mean().backward()
        first = backend.frame_count
        # One for what the outermost module reads first, one for all others.
        assert first <= 2
        for position in range(12):
            assert sites(monitor)[f"{position}.a (Linear) · backward · gradient of output"] == 1

    def test_shapes_that_change(self) -> None:
        model, backend = net(), counter()
        monitor = fastcheck.install(model)
        runner = compiled(model, backend, dynamic=True)
        for rows in (3, 4, 5):
            runner(torch.ones(rows, 8)).square().mean().backward()
        assert backend.frame_count == 1
        numels = [
            int(record["numel"])
            for record in monitor.records()
            if str(monitor.sites[record["site"]]) == "head (Linear) · forward · output"
        ]
        assert numels == [12, 16, 20]

    def test_a_stop_behind_a_graph_break_compiles_nothing(self) -> None:
        limit = torch.tensor(-1.0)

        def broken(x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return (x * x - limit).log()

        model = nn.Sequential(nn.Linear(8, 8), Apply(broken), nn.Linear(8, 8))
        fastcheck.install(model)
        runner = torch.compile(model, backend=counter())
        train(runner, 2)
        frames = dict(torch._dynamo.utils.counters["frames"])
        limit.fill_(1e4)
        stop = stopped(train, runner, 1)
        assert stop.report.made_by is not None
        assert stop.report.made_by.operator == "aten.log"
        assert dict(torch._dynamo.utils.counters["frames"]) == frames

    def test_install_after_the_model_has_run(self) -> None:
        model = net(2)
        runner = compiled(model)
        train(runner, 1)
        monitor = fastcheck.install(model)
        train(runner, 1)
        assert sites(monitor)["blocks.1.b (Linear) · forward · output"] == 1
        assert sites(monitor)["blocks.1.b (Linear) · backward · gradient of output"] == 0
        assert sites(monitor)["blocks.1.act (ReLU) · backward · gradient of output"] == 1

    def test_remove_and_install_again(self) -> None:
        model, backend = net(), counter()
        runner = compiled(model, backend)
        first = fastcheck.install(model)
        train(runner, 1)
        first.remove()
        held = len(first.records())
        train(runner, 1)
        assert len(first.records()) == held
        second = fastcheck.install(model)
        train(runner, 1)
        assert sites(second, "forward") == sites(first, "forward")
        assert second.step_index == 0

    def test_remove_between_forward_and_backward(self) -> None:
        model = net()
        monitor = fastcheck.install(model)
        loss = compiled(model)(torch.ones(2, 8)).square().mean()
        monitor.remove()
        loss.backward()
        assert not sites(monitor, "backward")
        assert sites(monitor, "forward")
        assert model.head.weight.grad is not None

    def test_code_of_an_unobserved_model_of_the_same_class_is_not_used(self) -> None:
        other, model = net(), net()
        monitor = fastcheck.install(model)
        for _ in range(2):
            train(compiled(other), 1)
            train(compiled(model), 1)
        assert sites(monitor)["blocks.0.b (Linear) · forward · output"] == 2

    def test_copies_are_not_observed(self) -> None:
        model = net()
        monitor = fastcheck.install(model)
        train(compiled(copy.deepcopy(model)), 1)
        assert len(monitor.records()) == 0

    def test_the_configuration_of_torch_is_given_back(self) -> None:
        def state() -> tuple[bool, ...]:
            dynamo, inductor = torch._dynamo.config, torch._inductor.config
            return (
                dynamo.skip_nnmodule_hook_guards,
                inductor.inplace_buffers,
                inductor.allow_buffer_reuse,
            )

        before = state()
        first, second = fastcheck.install(net()), fastcheck.install(net())
        first.remove()
        assert state() == (False, False, False)
        second.remove()
        assert state() == before == (True, True, True)

    def test_a_model_that_was_compiled_before_install(self) -> None:
        """Sites are named as in the model that is inside."""
        model = net(2)
        runner = one_submodule(model) and compiled(model)
        monitor = fastcheck.install(runner, exclude="blocks.0")
        train(runner, 1)
        assert not sites(monitor, "_orig_mod")
        assert sites(monitor)["Net · forward · input[0]"] == 1
        assert sites(monitor)["blocks.1.b (Linear) · forward · output"] == 1
        assert not sites(monitor, "blocks.0")

    def test_an_optimizer_that_is_compiled_closes_the_step(self) -> None:
        model = net()
        monitor = fastcheck.install(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        runner, step = compiled(model), torch.compile(optimizer.step, backend="aot_eager")
        for x in batches(3):
            runner(x).square().mean().backward()
            step()
        assert monitor.step_index == 2
        assert sites(monitor)["head (Linear) · optimizer · gradient of head.weight"] == 3


class TestWherePlaceIsNone:
    """The modules there pass unread, and the model still compiles."""

    def test_a_branch_of_cond(self) -> None:
        class Branches(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.cond(x.sum() > 0, self.a, self.b, (x,))

        model = Branches()
        monitor = fastcheck.install(model)
        with torch.no_grad():
            compiled(model)(torch.ones(2, 8))
        assert set(sites(monitor, "forward")) == {
            "Branches · forward · input[0]",
            "Branches · forward · output",
        }
        assert "never seen running" in monitor.summary()

    def test_vmap(self) -> None:
        model = net()
        monitor = fastcheck.install(nn.Linear(1, 1), model)

        @torch.compile(backend="aot_eager", fullgraph=True)
        def run(x: torch.Tensor) -> torch.Tensor:
            return torch.vmap(lambda row: model(row))(x)

        assert torch.allclose(run(torch.ones(3, 8)), model(torch.ones(3, 8)), atol=1e-6)
        assert sites(monitor, "forward")["Net.head (Linear) · forward · output"] == 1

    def test_export(self) -> None:
        model = net()
        fastcheck.install(model)
        for strict in (False, True):
            program = torch.export.export(model, (torch.ones(2, 8),), strict=strict)
            assert not any("fastcheck" in str(node.target) for node in program.graph.nodes)


class TestInductor:
    """It writes kernels of its own: what modules take and return is materialised for them to be
    read.
    """

    @pytest.fixture(scope="class")
    def runs(self) -> tuple[fastcheck.Monitor, fastcheck.Monitor, list[float], list[float]]:
        def run(model: nn.Module) -> list[float]:
            return train(model, 3)

        def wrap(model: nn.Module) -> nn.Module:
            return compiled(model, "inductor")

        def make() -> nn.Module:
            return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 4))

        losses, eager_monitor = observed(make, eager, run)
        compiled_losses, monitor = observed(make, wrap, run)
        return eager_monitor, monitor, losses, compiled_losses

    def test_the_same_tensors_are_read(self, runs: Any) -> None:
        eager_monitor, monitor, _, _ = runs
        assert sites(monitor) == sites(eager_monitor)
        assert sites(monitor)["1 (Tanh) · backward · gradient of output"] == 3

    def test_the_same_numbers_but_for_rounding(self, runs: Any) -> None:
        eager_monitor, monitor, losses, compiled_losses = runs
        assert compiled_losses == pytest.approx(losses, rel=1e-5)
        for name in ("numel", "nan_count", "zero_count", "negative_count", "dtype"):
            expected = Counter(
                (str(eager_monitor.sites[r["site"]]), int(r["step"]), int(r[name]))
                for r in eager_monitor.records()
            )
            assert expected == Counter(
                (str(monitor.sites[r["site"]]), int(r["step"]), int(r[name]))
                for r in monitor.records()
            )

    def test_a_nan_is_named(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), Apply(torch.log), nn.Linear(8, 4))
        fastcheck.install(model)
        stop = stopped(train, compiled(model, "inductor"), 1)
        assert where(stop.culprit) == ("1", "output", "output", "origin")


class TestTheOperatorOfAStop:
    """A call of compiled code is run again, operator by operator."""

    @pytest.mark.parametrize("what", sample(["model", "method", "layer", "function"], 1))
    def test_it_is_named_with_its_line(self, what: str) -> None:
        model = nn.Sequential(nn.Linear(8, 8), Apply(_logarithm), nn.Linear(8, 4))
        runner: Any = model
        if what == "model":
            runner = compiled(model)
        elif what == "method":
            model.compile(backend="aot_eager")
        elif what == "layer":
            model[1] = compiled(model[1])
        else:
            runner = torch.compile(lambda x: model(x), backend="aot_eager")
        fastcheck.install(model)
        with pytest.raises(fastcheck.OverflowDetected) as caught:
            runner(torch.ones(3, 8)).sum().backward()
        made = caught.value.report.made_by
        assert made is not None and made.operator == "aten.log"
        assert made.line is not None and "test_compile_again.py" in made.line
        assert "operator by operator, without torch.compile" in " ".join(str(caught.value).split())

    def test_inductor(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), Apply(_logarithm), nn.Linear(8, 4))
        model.compile()
        fastcheck.install(model)
        with pytest.raises(fastcheck.OverflowDetected) as caught:
            model(torch.zeros(3, 8)).sum().backward()
        made = caught.value.report.made_by
        assert made is not None and made.operator == "aten.log"
        # Code of its own again, afterwards.
        assert "_compiled_call_impl" in vars(model) and model._compiled_call_impl is not None


def _logarithm(x: torch.Tensor) -> torch.Tensor:
    return torch.log(x - x)
