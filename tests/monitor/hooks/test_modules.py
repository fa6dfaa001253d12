"""The hooks on modules and tensors: each tensor and its gradient are read once, in every mode."""

from __future__ import annotations

import copy
import re
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastcheck
from fastcheck.types import Flag
from support.programs.training import Apply, Net, batches, names, poison, stopped, train, where

pytestmark = pytest.mark.usefixtures("fresh_start")


def test_the_ids_of_hooks_are_torchs_own_to_give() -> None:
    """Other threads register hooks meanwhile: two of one tensor with one id would be one hook."""
    handles = torch.utils.hooks.RemovableHandle
    before = handles.next_id
    model = Net()
    monitor = fastcheck.install(model)
    given = [key for m in model.modules() for key in (*m._forward_hooks, *m._forward_pre_hooks)]
    assert handles.next_id >= before + len(given) > before
    assert all(key < 0 for key in given) and len(set(given)) == 1
    monitor.remove()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("level", ["module", "op"])
def test_a_model_is_traced_as_without_hooks(level: str) -> None:
    """torch.jit.trace() compares two traces: what is read once would be in one of them."""

    def graph_of(traced: Any) -> str:
        return re.sub(r"___torch_mangle_\d+\.", "", str(traced.graph))

    model, x = Net().eval(), torch.ones(2, 8)
    plain = graph_of(torch.jit.trace(model, x))
    with fastcheck.install(model, level=level) as monitor:
        traced = torch.jit.trace(model, x)
        assert graph_of(traced) == plain
        assert torch.equal(traced(x), model(x))
        train(model, 2)
        assert monitor.summary()


class TestEveryTensorOnce:
    def test_an_output_that_is_the_next_input(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.Identity(), nn.Linear(8, 8))
        monitor = fastcheck.install(model)
        model(torch.ones(2, 8))
        forward = [name for name in names(monitor) if "forward" in name]
        assert forward == [
            "Sequential · forward · input[0]",
            "0 (Linear) · forward · output",
            "2 (Linear) · forward · output",
        ]

    def test_an_in_place_module_is_seen_before_and_after(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))
        monitor = fastcheck.install(model)
        model(torch.randn(2, 8)).sum().backward()
        found = names(monitor)
        for expected in (
            "0 (Linear) · forward · output",
            "1 (ReLU) · forward · output",
            "2 (Linear) · backward · gradient of output",
            "1 (ReLU) · backward · gradient of output",
            "0 (Linear) · backward · gradient of output",
        ):
            assert found.count(expected) == 1

    def test_in_the_next_step_it_is_read_again(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8))
        monitor = fastcheck.install(model)
        x = torch.ones(2, 8)
        train(model, data=iter([x, x, x]))
        for step in range(3):
            assert "Sequential · forward · input[0]" in names(monitor, step)

    def test_memory_that_is_used_again_is_another_tensor(self) -> None:
        model = nn.Sequential(nn.Linear(64, 64), Apply(lambda x: x + 1))
        monitor = fastcheck.install(model)
        with torch.no_grad():
            for _ in range(20):
                model(torch.ones(64))
        outputs = [name for name in names(monitor) if "output" in name]
        assert len(outputs) == 40


class TestGradients:
    def test_they_are_the_ones_that_autograd_made(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        monitor = fastcheck.install(model)
        x = torch.randn(2, 8, requires_grad=True)
        hidden = model[0](x)
        y = model[1](hidden)
        expected = torch.autograd.grad(y.square().sum(), [y, hidden, x], retain_graph=True)
        monitor.remove()
        monitor = fastcheck.install(model)
        model(x).square().sum().backward()
        found = [
            int(r["checksum"])
            for r in monitor.records()
            if "backward" in str(monitor.sites[r["site"]])
        ]
        assert found == [fastcheck.checksum(gradient) for gradient in expected]

    def test_a_leaf_gathers_no_hooks(self) -> None:
        model = Net()
        fastcheck.install(model)
        x = torch.ones(2, 8, requires_grad=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(10):
            model(x).square().mean().backward()
            optimizer.step()
        assert len(x._backward_hooks or ()) <= 1

    def test_a_graph_that_is_run_twice(self) -> None:
        model = Net()
        monitor = fastcheck.install(model)
        y = model(torch.ones(2, 8)).sum()
        y.backward(retain_graph=True)
        y.backward()
        assert names(monitor).count("head (Linear) · backward · gradient of output") == 2

    def test_a_gradient_of_a_gradient(self) -> None:
        model = Net()
        bare = copy.deepcopy(model)
        monitor = fastcheck.install(model)
        for each in (bare, model):
            x = torch.ones(2, 8, requires_grad=True)
            (gradient,) = torch.autograd.grad(each(x).sum(), x, create_graph=True)
            gradient.square().sum().backward()
        assert torch.equal(model.head.weight.grad, bare.head.weight.grad)
        assert "head (Linear) · backward · gradient of output" in names(monitor)


class TestModes:
    def test_no_grad_and_eval(self) -> None:
        model = Net(dropout=0.5).eval()
        monitor = fastcheck.install(model)
        with torch.no_grad():
            y = model(torch.ones(2, 8))
        assert not y.requires_grad
        assert "head (Linear) · forward · output" in names(monitor)

    def test_inference_mode(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), Apply(), nn.Linear(8, 8))
        monitor = fastcheck.install(model, overflow_nums=-1)
        with torch.inference_mode():
            model(torch.ones(2, 8))
            assert monitor.event_count == 0
            model[1].function = poison
            model(torch.ones(2, 8))
        assert [where(e) for e in monitor.events if e.counted] == [
            ("1", "output", "output", "origin")
        ]
        model(torch.ones(2, 8))

    def test_installed_in_inference_mode_and_trained_outside(self) -> None:
        model = Net()
        with torch.inference_mode():
            monitor = fastcheck.install(model)
        train(model, 2)
        assert monitor.step_index == 1

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_checkpointing_tells_the_recompute_apart(self, reentrant: bool) -> None:
        class Stack(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first = nn.Linear(8, 8)
                self.body = nn.ModuleList(
                    nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)
                )
                self.shared = nn.Linear(8, 8)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = self.first(x)
                for block in self.body:
                    x = checkpoint(lambda x, b=block: self.shared(b(x)), x, use_reentrant=reentrant)
                return x

        model = Stack()
        monitor = fastcheck.install(model)
        train(model, 2)
        assert monitor.event_count == 0
        records = monitor.records()
        for step in (0, 1):
            of_shared = [
                (int(r["call"]), bool(r["flags"] & Flag.RECOMPUTE))
                for r in records
                if r["step"] == step
                and str(monitor.sites[r["site"]]) == "shared (Linear) · forward · output"
            ]
            runs = [call for call, again in of_shared if not again]
            repeats = [call for call, again in of_shared if again]
            assert runs == [0, 1]
            # Early stopping may end a recompute before its last module returns.
            assert repeats == ([1, 0] if reentrant else repeats)
        tanh = [
            (int(r["checksum"]), bool(r["flags"] & Flag.RECOMPUTE))
            for r in records
            if r["step"] == 0
            and str(monitor.sites[r["site"]]) == "body.0.1 (Tanh) · forward · output"
        ]
        assert [again for _, again in tanh] == [False, True]
        assert len({checksum for checksum, _ in tanh}) == 1
        assert "body.0.1 (Tanh) · backward · gradient of output" in names(monitor) or not reentrant

    def test_a_compiled_model_still_runs(self) -> None:
        model = Net()
        x = torch.ones(2, 8)
        expected = model(x)
        monitor = fastcheck.install(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        compiled = torch.compile(model, backend="eager")
        y = compiled(x)
        assert torch.equal(y, expected)
        assert "modules run compiled" in monitor.summary()
        y.sum().backward()
        optimizer.step()
        # The optimizer's view is the same, compiled or not.
        assert "head (Linear) · optimizer · gradient of head.weight" in names(monitor)
        torch._dynamo.reset()

    def test_modules_of_several_threads_keep_to_themselves(self) -> None:
        model = Net()
        monitor = fastcheck.install(model, overflow_nums=-1)
        problems: list[BaseException] = []

        def work(number: int) -> None:
            try:
                for x in batches(10, seed=number):
                    model(x).sum().backward()
            except BaseException as error:
                problems.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not problems
        records = monitor.records()
        assert records["seq"].tolist() == list(range(len(records)))
        assert names(monitor).count("head (Linear) · forward · output") == 40
        assert monitor.event_count == 0


class TestWhatCannotBeRead:
    def test_tensors_without_a_kernel_pass_unread(self) -> None:
        meta = torch.empty(3, device="meta")
        other = torch.empty(3, dtype=torch.float8_e5m2fnuz)
        first, model = nn.Linear(2, 2), Apply(lambda *args: args)
        monitor = fastcheck.install(first, model)
        assert all(a is b for a, b in zip(model(meta, other), (meta, other)))
        assert not any("forward" in name for name in names(monitor))
        assert "tensors on meta are not read" in monitor.summary()

    def test_fake_tensors(self) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        model = Net()
        monitor = fastcheck.install(model)
        model(torch.ones(2, 8))
        count = len(monitor.records())
        with FakeTensorMode(allow_non_fake_inputs=True):
            model(torch.ones(2, 8))
        assert len(monitor.records()) == count

    def test_functorch_transforms(self) -> None:
        model = Net()
        monitor = fastcheck.install(model)
        expected = model(torch.ones(4, 8))
        assert torch.allclose(torch.vmap(model)(torch.ones(4, 8)), expected)
        assert monitor.event_count == 0

    def test_a_tensor_freed_under_us(self) -> None:
        is_freed = True

        def free(x: torch.Tensor) -> torch.Tensor:
            y = x.detach().clone()
            if is_freed:
                y.untyped_storage().resize_(0)
            return y

        model = nn.Sequential(nn.Linear(8, 8), Apply(free), Apply(lambda x: torch.ones(2)))
        monitor = fastcheck.install(model)
        with pytest.warns(
            fastcheck.FastcheckWarning, match=r"no longer observes 1 \(Apply\) · forward · output"
        ):
            model(torch.ones(2, 8))
        # Once is enough, and only that site is off.
        is_freed = False
        model(torch.ones(2, 8))
        assert names(monitor).count("1 (Apply) · forward · output") == 0
        assert names(monitor).count("2 (Apply) · forward · output") == 2

    @pytest.mark.parametrize("reads", ["output", "observe", "dump"])
    def test_a_view_without_a_graph_of_what_was_written_to_since(
        self, reads: str, tmp_path: Path
    ) -> None:
        class Viewing(nn.Module):
            def forward(self, x: torch.Tensor) -> Any:
                y = x * 2
                with torch.no_grad():
                    view = y[0]
                y.mul_(2)
                if reads == "observe":
                    view = fastcheck.observe("view", view)
                return (y, view) if reads != "observe" else (y, None)

        model = nn.Sequential(nn.Linear(8, 8), Viewing(), Apply(lambda pair: pair[0]))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if reads == "dump":
                with fastcheck.Dumper(tmp_path, step=0, level="module", model=model):
                    model(torch.ones(2, 8)).sum().backward()
                assert '"is_complete": true' in next(tmp_path.rglob("index.json")).read_text()
                return
            with fastcheck.install(model, overflow_nums=-1) as monitor:
                for _ in range(3):
                    model(torch.ones(2, 8)).sum().backward()
                    monitor.step()
        label = "view" if reads == "observe" else "output[1]"
        assert sum(label in str(name) for name in monitor.table()["name"]) == 3

    def test_parameters_without_memory(self) -> None:
        """As sharding leaves them outside of forward."""
        model = Net()
        monitor = fastcheck.install(model)
        x = torch.ones(2, 8)
        model(x).square().mean().backward()
        model.head.bias.grad.untyped_storage().resize_(0)
        optimizer = torch.optim.SGD([*model.blocks.parameters(), model.head.bias], lr=0.0)
        before = set(names(monitor))
        optimizer.register_step_pre_hook(lambda *args: setattr(model.head.bias, "grad", None))
        optimizer.step()
        read = set(names(monitor)) - before
        assert "blocks.0.a (Linear) · optimizer · gradient of blocks.0.a.weight" in read
        assert "head (Linear) · optimizer · gradient of head.bias" not in read


def test_a_stop_names_the_layer_through_a_wrapper() -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, *args: Any) -> Any:
            return self.module(*args)

    inner = nn.Sequential(nn.Linear(8, 8), Apply(poison))
    fastcheck.install(inner)
    stop = stopped(Wrapper(inner), torch.ones(2, 8))
    assert stop.culprit.site.module == "1"


def test_an_input_follows_from_nothing_before_the_last_pass_of_its_module() -> None:
    """Two passes in one step: what the first has made has no part in the second."""
    encoder, head = nn.Linear(2, 2), nn.Linear(2, 1)
    for module in (encoder, head):
        nn.init.ones_(module.weight)
    monitor = fastcheck.install(encoder, head, overflow_nums=-1)
    head(encoder(torch.full((1, 2), 3e38)))
    head(encoder(torch.ones(1, 2)) * torch.inf)
    found = [(event.site.role, event.verdict.name) for event in monitor.events]
    assert found == [
        ("output", "ORIGIN"),
        ("output", "PROPAGATED"),
        ("input", "ARRIVED"),
        ("output", "PROPAGATED"),
    ]
