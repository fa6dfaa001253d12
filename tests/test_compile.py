"""torch.compile: what modules take and return inside compiled code is read as it is in eager mode,
without a break in the graph and without compiling again.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastcheck
from fastcheck import RECORD_DTYPE, Flag
from training import Apply, Net, Residual, batches, nan_gradient, stopped, train, where

pytest.importorskip("torch._higher_order_ops.register_hook")
from torch._dynamo.testing import CompileCounterWithBackend

# torch's own, from within Dynamo, Inductor and torch.optim.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

Wrap = Callable[[nn.Module], nn.Module]

# Everything that a record says but when it was made: autograd decides on the order in backward.
FIELDS = [name for name in RECORD_DTYPE.names if name not in ("seq", "site")]


@pytest.fixture(autouse=True)
def _fresh_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)  # a stop writes its log there
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    gc.collect()  # models and their monitors are cycles


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


def net() -> Net:
    """Without the dropout: torch.compile copies the tensor where eager dropout(p=0) returns it."""
    model = Net()
    model.dropout = nn.Identity()
    return model


def counter() -> CompileCounterWithBackend:
    return CompileCounterWithBackend("aot_eager")


def compiled(model: nn.Module, backend: Any = "aot_eager", **options: Any) -> nn.Module:
    return torch.compile(model, backend=backend, fullgraph=True, **options)


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager", fullgraph=True)
    return model


def one_submodule(model: nn.Module) -> nn.Module:
    model.blocks[1] = compiled(model.blocks[1])
    return model


def each_block(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    return model


def contents(monitor: fastcheck.Monitor) -> Counter[tuple[Any, ...]]:
    return Counter(
        (str(monitor.sites[record["site"]]), *(record[name].item() for name in FIELDS))
        for record in monitor.records()
    )


def sites(monitor: fastcheck.Monitor, direction: str = "") -> Counter[str]:
    named = [str(monitor.sites[record["site"]]) for record in monitor.records()]
    return Counter(name for name in named if direction in name)


def observed(
    make: Callable[[], nn.Module], wrap: Wrap, run: Callable[[nn.Module], Any], **options: Any
) -> tuple[Any, fastcheck.Monitor]:
    torch.manual_seed(0)
    model = make()
    monitor = fastcheck.install(model, overflow_nums=-1, **options)
    result = run(wrap(model))
    monitor.remove()
    return result, monitor


def eager(model: nn.Module) -> nn.Module:
    return model


class TestTheSameAsEager:
    @pytest.mark.parametrize("wrap", [compiled, in_place, one_submodule, each_block])
    def test_however_it_is_compiled(self, wrap: Wrap) -> None:
        expected, eager_monitor = observed(net, eager, train)
        losses, monitor = observed(net, wrap, train)
        assert losses == expected
        assert contents(monitor) == contents(eager_monitor)
        assert sum(sites(monitor, "backward").values()) == 30  # there is something to compare
        assert "modules run compiled" in monitor.summary()
        assert "modules run compiled" not in eager_monitor.summary()

    @pytest.mark.parametrize("make", [Structures, Tokens, Half])
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
        torch.manual_seed(0)
        alone = train(compiled(Net(dropout=0.5)), 20)
        torch.manual_seed(0)
        model = Net(dropout=0.5)
        fastcheck.install(model)
        assert train(compiled(model), 20) == alone

    @pytest.mark.parametrize("first", [0, 1])
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
        first, second = fastcheck.install(model), fastcheck.install(model)
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
        monitor = fastcheck.install(model, criterion, overflow_nums=1)

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

        monkeypatch.setattr(monitor._observer, "_read_outputs", fail)
        with pytest.warns(fastcheck.FastcheckWarning, match="on purpose"):
            assert train(compiled(model), 2) == alone


class TestCompilations:
    def test_cadence_never_compiles_again(self) -> None:
        model, backend = net(), counter()
        monitor = fastcheck.install(model, every=3)
        train(compiled(model, backend), 50)
        assert backend.frame_count == 1
        assert {int(step) for step in monitor.records()["step"]} == set(range(0, 50, 3))

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

    def test_install_after_the_model_has_run(self) -> None:
        model = net()
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
        assert sites(monitor)["blocks.1.b (Linear) · forward · output"] == 2

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
        model = net()
        runner = one_submodule(model) and compiled(model)
        monitor = fastcheck.install(runner, exclude="blocks.2")
        train(runner, 1)
        assert not sites(monitor, "_orig_mod")
        assert sites(monitor)["Net · forward · input[0]"] == 1
        assert sites(monitor)["blocks.1.b (Linear) · forward · output"] == 1
        assert not sites(monitor, "blocks.2")

    def test_an_optimizer_that_is_compiled_closes_the_step(self) -> None:
        model = net()
        monitor = fastcheck.install(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        runner, step = compiled(model), torch.compile(optimizer.step, backend="aot_eager")
        for x in batches(3):
            runner(x).square().mean().backward()
            step()
        assert monitor.step_index == 2
        assert sites(monitor)["head (Linear) · optimizer · gradient of weight"] == 3


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
