"""torch.compile: inputs and outputs of modules inside compiled code are read as in eager mode,
without a graph break and without recompiling.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import Counter
from typing import Any, Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastcheck
from fastcheck.monitor.hooks.compiled import break_graphs
from fastcheck.types import Flag
from support.programs import compiling
from support.programs.compiling import (
    FIELDS,
    Wrap,
    compiled,
    contents,
    counter,
    eager,
    net,
    observed,
    one_submodule,
    sites,
)
from support.programs.training import Apply, Net, batches, nan_gradient, stopped, train, where
from support.sampling import sample

pytestmark = compiling.marks


@dataclasses.dataclass
class Result:
    logits: torch.Tensor
    extra: Any = None


class Structures(nn.Module):
    """Dictionaries, tuples, dataclasses and keyword arguments between its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.split = Apply(lambda x: {"a": x.sin(), "b": (x.cos(), [x.tanh()])})
        self.masked = Apply(lambda x, *, mask: Result(x * mask, [x + 1, None]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.split(self.a(x))
        result = self.masked(parts["a"] + parts["b"][0] + parts["b"][1][0], mask=x > 0)
        return result.logits + result.extra[0]


class Tokens(nn.Module):
    """Integers come in, and LayerNorm and BatchNorm store what they see."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.layer_norm = nn.LayerNorm(8)
        self.batch_norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.abs().mul(3).long().clamp(max=9)[:, 0]
        return self.head(self.batch_norm(self.layer_norm(self.embedding(tokens))))


class Half(nn.Module):
    """autocast within the model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x)


class Checkpointed(nn.Module):
    """Every block is computed again in backward; one module is part of all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.body = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.shared = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.body:
            x = checkpoint(lambda x, b=block: self.shared(b(x)), x, use_reentrant=False)
        return x


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager", fullgraph=True)
    return model


def each_block(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    return model


class TestTheSameAsEager:
    @pytest.mark.parametrize("wrap", sample([compiled, in_place, one_submodule, each_block], 1))
    def test_however_it_is_compiled(self, wrap: Wrap) -> None:
        make = functools.partial(net, 2)
        expected, eager_monitor = observed(make, eager, train)
        losses, monitor = observed(make, wrap, train)
        assert losses == expected
        assert contents(monitor) == contents(eager_monitor)
        assert sum(sites(monitor, "backward").values()) == 21  # there is something to compare
        assert "modules run compiled" in monitor.summary()
        assert "modules run compiled" not in eager_monitor.summary()

    @pytest.mark.parametrize("make", sample([Structures, Tokens, Half], 1))
    def test_whatever_is_compiled(self, make: Callable[[], nn.Module]) -> None:
        expected, eager_monitor = observed(make, eager, train)
        losses, monitor = observed(make, compiled, train)
        assert losses == expected
        assert contents(monitor) == contents(eager_monitor)

    def test_the_batch_is_read_whatever_its_dtype(self) -> None:
        def run(model: nn.Module) -> None:
            model(torch.tensor([[1, 2, 3]]))

        def make() -> nn.Module:
            return nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 4))

        _, eager_monitor = observed(make, eager, run)
        _, monitor = observed(make, compiled, run)
        assert contents(monitor) == contents(eager_monitor)
        assert sites(monitor)["Sequential · forward · input[0]"] == 1

    def test_losses_over_twenty_steps_are_those_of_the_model_alone(self) -> None:
        def model() -> nn.Module:
            torch.manual_seed(0)
            dropped = net()
            dropped.dropout = nn.Dropout(0.5)
            return dropped

        alone = train(compiled(model()), 20)
        seen = model()
        fastcheck.install(seen)
        assert train(compiled(seen), 20) == alone

    @pytest.mark.parametrize("first", sample([1, 0], 1))
    def test_gradients_find_the_call_that_they_belong_to(self, first: int) -> None:
        def run(model: nn.Module) -> None:
            losses = [model(x).square().mean() for x in batches(2)]
            losses[first].backward()
            losses[1 - first].backward()

        _, eager_monitor = observed(net, eager, run)
        _, monitor = observed(net, compiled, run)
        assert contents(monitor) == contents(eager_monitor)

    def test_a_gradient_that_comes_a_step_later(self) -> None:
        def run(model: nn.Module) -> None:
            loss = model(next(batches(1))).square().mean()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model(next(batches(1)))
            loss.backward()

        _, eager_monitor = observed(net, eager, run)
        _, monitor = observed(net, compiled, run)
        assert sites(monitor) == sites(eager_monitor)

    def test_an_input_that_requires_a_gradient(self) -> None:
        def run(model: nn.Module) -> None:
            x = next(batches(1)).requires_grad_()
            model(x).square().mean().backward()

        _, eager_monitor = observed(net, eager, run)
        _, monitor = observed(net, compiled, run)
        assert contents(monitor) == contents(eager_monitor)

    def test_checkpointed_regions(self) -> None:
        """What backward computes again is not read again; its gradients belong to the first run."""
        expected, eager_monitor = observed(Checkpointed, eager, train)
        losses, monitor = observed(Checkpointed, compiled, train)
        assert losses == expected
        again = FIELDS.index("flags") + 1
        once = Counter(
            {
                row: count
                for row, count in contents(eager_monitor).items()
                if not row[again] & Flag.RECOMPUTE
            }
        )
        assert contents(monitor) == once

    def test_a_checkpoint_around_compiled_code(self) -> None:
        def run(model: nn.Module) -> None:
            x = next(batches(1)).requires_grad_()
            checkpoint(model, x, use_reentrant=False).square().mean().backward()

        _, eager_monitor = observed(net, eager, run)
        _, monitor = observed(net, compiled, run)
        backward = {row for row in contents(eager_monitor) if "backward" in row[0]}
        assert {row for row in contents(monitor) if "backward" in row[0]} == backward
        assert {
            int(record["call"]) for record in monitor.records() if record["flags"] & Flag.RECOMPUTE
        } == {0}

    def test_two_monitors(self) -> None:
        model = net()
        first = fastcheck.install(model)
        second = fastcheck.install(model, overflow_nums=2)
        train(compiled(model), 2)
        assert contents(first) == contents(second)
        assert sites(first, "forward")["head (Linear) · forward · output"] == 2

    def test_no_gradients_and_inference_mode(self) -> None:
        model = net()
        with torch.inference_mode():
            monitor = fastcheck.install(model)
            compiled(model)(torch.ones(2, 8))
        with torch.no_grad():
            compiled(model)(torch.ones(2, 8))
        train(compiled(model), 1)
        assert sites(monitor)["head (Linear) · forward · output"] == 3

    def test_a_function_that_calls_the_model(self) -> None:
        model, backend = net(), counter()
        monitor = fastcheck.install(model)

        @torch.compile(backend=backend, fullgraph=True)
        def loss(x: torch.Tensor) -> torch.Tensor:
            return model(x).square().mean()

        for x in batches(2):
            loss(x).backward()
        assert backend.frame_count == 1
        assert sites(monitor)["Net · forward · input[0]"] == 2
        assert sites(monitor)["blocks.0.act (ReLU) · backward · gradient of output"] == 2


class TestEvents:
    def log_of(self, bias: float) -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 8), Apply(torch.log), nn.Linear(8, 4))
        nn.init.constant_(model[0].bias, bias)
        return model

    def test_a_nan_is_named_and_the_model_goes_on_afterwards(self) -> None:
        model, backend = self.log_of(100.0), counter()
        monitor = fastcheck.install(model)
        runner = compiled(model, backend)
        train(runner, 2)
        nn.init.constant_(model[0].bias, -100.0)
        weights = copy.deepcopy(model.state_dict())
        stop = stopped(train, runner, 1)
        assert where(stop.culprit) == ("1", "output", "output", "origin")
        assert stop.step == 2
        assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
        nn.init.constant_(model[0].bias, 100.0)
        train(runner, 2)
        assert (monitor.step_index, monitor.event_count) == (4, 1)
        assert sites(monitor)["Sequential · forward · input[0]"] == 5  # no call is thought to run
        assert backend.frame_count == 1

    def test_a_stop_deep_inside_leaves_no_call_behind(self) -> None:
        model = nn.Sequential(nn.Sequential(self.log_of(-100.0)), nn.Linear(4, 4))
        criterion = nn.MSELoss()
        # Elsewhere the end of the outermost call decides.
        strict = fastcheck.Stop(count="all")
        monitor = fastcheck.install(model, criterion, overflow_nums=1, stop=strict)

        @torch.compile(backend="aot_eager", fullgraph=True)
        def run(x: torch.Tensor) -> torch.Tensor:
            return model(x)

        stopped(run, torch.ones(2, 8))
        criterion(torch.ones(2), torch.ones(2))
        assert sites(monitor)["MSELoss (MSELoss) · forward · input[0]"] == 1
        assert sites(monitor)["MSELoss (MSELoss) · forward · input[1]"] == 1
        assert monitor.step_index == 1  # it is not taken for a part of the model
        assert monitor.events[-1].site.module == "0.0.1"

    @pytest.mark.parametrize(
        "make",
        [
            lambda: nn.Sequential(nn.Linear(8, 8), Apply(nan_gradient), nn.Linear(8, 4)),
            lambda: nn.Sequential(nn.Linear(8, 8), Apply(torch.log), nn.Linear(8, 4)),
            lambda: nn.Sequential(
                nn.Linear(8, 8), Apply(lambda x: x.masked_fill(x > 0.5, -torch.inf)), nn.Softmax(-1)
            ),
        ],
        ids=["backward", "forward", "mask"],
    )
    def test_verdicts(self, make: Callable[[], nn.Module]) -> None:
        _, eager_monitor = observed(make, eager, lambda model: train(model, 2))
        _, monitor = observed(make, compiled, lambda model: train(model, 2))
        assert len(monitor.events) > 1
        assert [where(event) for event in monitor.events] == [
            where(event) for event in eager_monitor.events
        ]

    def test_a_batch_with_a_nan(self) -> None:
        model = net()
        fastcheck.install(model)
        x = torch.ones(2, 8)
        x[0, 0] = torch.nan
        stop = stopped(compiled(model), x)
        assert where(stop.culprit) == ("", "input", "input[0]", "arrived")

    def test_an_error_of_fastcheck_does_not_reach_the_model(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = net()
        alone = train(compiled(copy.deepcopy(model)), 2)
        monitor = fastcheck.install(model)

        def fail(*args: Any) -> None:
            raise ValueError("on purpose")

        monkeypatch.setattr(monitor._core.hooks.observer, "_read_outputs", fail)
        with pytest.warns(fastcheck.FastcheckWarning, match="on purpose"):
            assert train(compiled(model), 2) == alone


def test_clipping_in_compiled_code_is_traced_as_before() -> None:
    model = Net()
    fastcheck.install(model)
    model(torch.ones(1, 8)).sum().backward()

    @torch.compile(backend="eager", fullgraph=True)
    def clip(parameters: list[torch.Tensor]) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(parameters, 1e-3)

    clip(list(model.parameters()))
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()  # type: ignore[union-attr]  # each has a gradient by now
    assert norm.item() == pytest.approx(1e-3, rel=1e-2)


def test_the_loss_of_a_backward_within_compiled_code() -> None:
    model = net()

    @torch.compile(backend="aot_eager")
    def backward(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = fastcheck.install(model)
    losses = []
    for x in batches(3):
        losses.append(float(backward(x)))
        optimizer.step()
        optimizer.zero_grad()
    assert [row.loss for row in monitor.step_table()] == losses


def test_dynamo_breaks_graphs_at_hooks_of_optimizers_and_compiles_nothing_of_them() -> None:
    compiled: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        compiled.append(graph.code)
        return graph

    def hook(x: torch.Tensor) -> torch.Tensor:
        return x.cos()

    kept_out = break_graphs(hook)
    y = torch.compile(lambda x: kept_out(x.sin()).exp(), backend=backend)(torch.ones(2))
    assert torch.equal(y, torch.ones(2).sin().cos().exp())
    assert [name in "".join(compiled) for name in ("sin", "cos", "exp")] == [True, False, True]
