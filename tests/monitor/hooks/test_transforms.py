"""Models under functorch's transforms: the tensors inside the wrappers are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Callable

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, stack_module_state, vmap

import fastcheck
from support.processes import run_code
from support.programs.training import Apply, batches, chain, poison, stopped, where

pytestmark = [pytest.mark.fake_hooks, pytest.mark.usefixtures("fresh_start")]

NAN = float("nan")

Loop = Callable[[nn.Module, Iterator[torch.Tensor]], None]


def net(device: str = "cpu") -> nn.Module:
    return chain(a=nn.Linear(8, 8), act=nn.Tanh(), hole=Apply(), b=nn.Linear(8, 4)).to(device)


def detached(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def step_with(
    model: nn.Module, optimizer: torch.optim.Optimizer, gradients: dict[str, torch.Tensor]
) -> None:
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name]
    optimizer.step()


def by_grad(model: nn.Module, data: Iterator[torch.Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loss(parameters: Any, x: torch.Tensor) -> torch.Tensor:
        return functional_call(model, parameters, (x,)).square().mean()

    for x in data:
        step_with(model, optimizer, grad(loss)(detached(model), x))


def per_sample(model: nn.Module, data: Iterator[torch.Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loss(parameters: Any, x: torch.Tensor) -> torch.Tensor:
        return functional_call(model, parameters, (x[None],)).square().mean()

    for x in data:
        found = vmap(grad(loss), in_dims=(None, 0))(detached(model), x)
        step_with(model, optimizer, {name: one.mean(0) for name, one in found.items()})


def mapped(model: nn.Module, data: Iterator[torch.Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x in data:
        optimizer.zero_grad()
        vmap(model)(x).square().mean().backward()
        optimizer.step()


def of_the_input(model: nn.Module, data: Iterator[torch.Tensor]) -> None:
    """A penalty on the derivative by the input, as physics-informed networks have."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x in data:
        optimizer.zero_grad()
        vmap(jacrev(model))(x).square().mean().backward()
        optimizer.step()


def by_inner_steps(model: nn.Module, data: Iterator[torch.Tensor]) -> None:
    """MAML: a step of its own on the batch, and the loss behind it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x in data:
        parameters = dict(model.named_parameters())
        inner = functional_call(model, parameters, (x,)).square().mean()
        found = torch.autograd.grad(inner, list(parameters.values()), create_graph=True)
        moved = {k: p - 0.1 * g for (k, p), g in zip(parameters.items(), found)}
        optimizer.zero_grad()
        functional_call(model, moved, (x.clamp(-1, 1),)).square().mean().backward()
        optimizer.step()


LOOPS: dict[str, Loop] = {
    "grad": by_grad,
    "vmap of grad": per_sample,
    "vmap": mapped,
    "vmap of jacrev": of_the_input,
    "MAML": by_inner_steps,
}


def data(device: str, bad: int = -1) -> Iterator[torch.Tensor]:
    for number, x in enumerate(batches(4)):
        if number == bad:
            x[1, 1] = NAN
        yield x.to(device)


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
class TestWithin:
    def test_a_bad_batch_is_the_culprit(self, loop: Loop, device: str) -> None:
        model = net(device)
        fastcheck.install(model, sync="step")
        stop = stopped(loop, model, data(device, bad=2))
        assert where(stop.culprit) == ("", "input", "input[0]", "arrived")
        assert stop.step == 2
        assert stop.culprit.record["nan_count"] >= 1

    def test_a_module_inside_is_the_culprit(self, loop: Loop) -> None:
        model = net()
        model.hole.function = lambda x: torch.where(x > x.amax(-1, True) - 1e-6, NAN, x)
        fastcheck.install(model)
        stop = stopped(loop, model, data("cpu"))
        assert where(stop.culprit) == ("hole", "output", "output", "origin")

    def test_training_is_not_changed(self, loop: Loop, device: str) -> None:
        def run(is_observed: bool) -> list[torch.Tensor]:
            torch.manual_seed(0)
            model = net(device)
            monitor = fastcheck.install(model) if is_observed else None
            loop(model, data(device))
            if monitor is not None:
                monitor.flush()
                assert not monitor.events
                assert "no longer observes" not in monitor.summary()
            return [p.detach().cpu() for p in model.parameters()]

        assert all(map(torch.equal, run(False), run(True)))


def test_a_bad_parameter_that_the_call_was_given() -> None:
    model = net()
    fastcheck.install(model)
    parameters = detached(model)
    parameters["b.bias"][2] = NAN
    x = torch.ones(3, 8)

    def outputs(parameters: Any) -> torch.Tensor:
        result: torch.Tensor = functional_call(model, parameters, (x,))
        return result.sum()

    stop = stopped(grad(outputs), parameters)
    assert where(stop.culprit) == ("b", "param", "bias", "arrived")
    text = " ".join(str(stop).split())
    assert "functional_call() was given it in place of the model's own" in text
    assert "stored in the model" not in text and "hold NaN" not in text


def test_what_made_a_parameter_that_the_call_was_given() -> None:
    """It was moved by a gradient that is NaN; the model's own is as it was."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    fastcheck.install(model)

    def train() -> None:
        for number, x in enumerate(batches(4)):
            own = dict(model.named_parameters())
            root = (sum(p.square().sum() for p in own.values()) * (number < 2)).sqrt()
            found = torch.autograd.grad(root, list(own.values()), create_graph=True)
            moved = {k: p - 0.1 * g for (k, p), g in zip(own.items(), found)}
            optimizer.zero_grad()
            functional_call(model, moved, (x,)).square().mean().backward()
            optimizer.step()

    stop = stopped(train)
    assert where(stop.culprit) == ("a", "param", "weight", "arrived") and stop.step == 2
    made = stop.report.made_by
    assert made is not None and made.operator == "DivBackward0"
    text = " ".join(str(stop).split())
    assert "The divisor other (MulBackward1) is 0" in text
    assert "No weight holds NaN or Inf now." in text
    assert "The update of step" not in text


def test_an_ensemble() -> None:
    models = [net() for _ in range(3)]
    parameters, buffers = stack_module_state(models)
    base = net()
    fastcheck.install(base)

    def train() -> None:
        optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
        for x in data("cpu", bad=2):
            optimizer.zero_grad()
            outputs = vmap(
                lambda p, b: functional_call(base, (p, b), (x,)),  # noqa: B023  # called within the same turn of the loop
                in_dims=(0, 0),
            )(parameters, buffers)
            outputs.square().mean().backward()
            optimizer.step()

    stop = stopped(train)
    assert where(stop.culprit) == ("", "input", "input[0]", "arrived")


def test_the_short_way_is_taken_again_after_a_transform() -> None:
    model = net()
    monitor = fastcheck.install(model)
    vmap(model)(torch.ones(3, 8))
    before = len(monitor.records())
    model.hole.function = poison
    stop = stopped(model, torch.ones(3, 8))
    assert where(stop.culprit) == ("hole", "output", "output", "origin")
    assert len(monitor.records()) > before


class Mapped(nn.Module):
    """Calls a part of itself under vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.part = nn.Linear(8, 8), net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mapped: torch.Tensor = vmap(self.part)(self.before(x))
        return mapped


def test_a_transform_within_the_model() -> None:
    model = Mapped()
    fastcheck.install(model)
    hole = model.part.hole

    def train() -> None:
        for number, x in enumerate(batches(4)):
            if number == 2:
                hole.function = lambda x: torch.where(x > x.amax(-1, True) - 1e-6, NAN, x)
            model(x).square().mean().backward()

    stop = stopped(train)
    assert where(stop.culprit) == ("part.hole", "output", "output", "origin")


def test_after_a_stop_that_was_caught_what_is_not_wrapped_belongs_to_the_next_step() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Apply()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight + self.inner(torch.ones(8))

    model = Shifted()
    monitor = fastcheck.install(model)
    stopped(model, torch.full((2, 8), NAN))
    vmap(model)(torch.ones(2, 8))
    sites = [(monitor.sites[record["site"]].module, record["step"]) for record in monitor.records()]
    assert sites[-3:] == [("", 1), ("inner", 1), ("", 1)]


BATCHED_BACKWARD = """
import warnings, torch, fastcheck
warnings.simplefilter("error", fastcheck.FastcheckWarning)
model, x = torch.nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
monitor = fastcheck.install(model)
torch.autograd.grad(model(x), x, torch.eye(2)[:, None], is_grads_batched=True)
model(x).sum().backward()
print({monitor.sites[r["site"]].role for r in monitor.records()} >= {"grad_output", "grad_input"})
"""


def test_a_batched_backward_without_the_extension() -> None:
    done = run_code(BATCHED_BACKWARD, env={"FASTCHECK_NO_EXTENSION": "1"})
    assert (done.stdout, done.stderr) == ("True\n", "")
