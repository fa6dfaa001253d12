"""observe() inside torch.compile: no break in the graph, and the records of eager mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastcheck
from fastcheck import observe
from support.programs import compiling
from support.programs.compiling import compiled, contents, counter, eager, observed
from support.programs.training import batches, poison, stopped, train, where

pytestmark = compiling.marks


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(observe("attn.logits", self.a(x).square()).tanh())


class Poisoned(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(observe("attn.logits", poison(self.a(x))).tanh())


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False).sin()


def named(monitor: fastcheck.Monitor) -> list[str]:
    found = (str(monitor.sites[record["site"]]) for record in monitor.records())
    return [name for name in found if "(observe)" in name]


def test_records_equal_those_of_eager_mode() -> None:
    expected, monitor = observed(Model, eager, train)
    losses, traced = observed(Model, compiled, train)
    assert losses == expected
    assert contents(traced) == contents(monitor)
    assert named(traced)[:2] == [
        "attn.logits (observe) · forward · output",
        "attn.logits (observe) · backward · gradient of output",
    ]


def test_it_is_compiled_again_only_when_a_monitor_comes_or_goes() -> None:
    frames = counter()
    model = Model()
    fast = torch.compile(model, backend=frames, fullgraph=True)
    plain = fast(torch.ones(2, 8))
    assert frames.frame_count == 1
    monitor = fastcheck.install(model)
    for _ in range(3):
        assert torch.equal(fast(torch.ones(2, 8)), plain)
    assert frames.frame_count == 2 and len(named(monitor)) == 3
    monitor.remove()
    for _ in range(2):
        fast(torch.ones(2, 8))
    assert len(named(monitor)) == 3


def test_a_function_without_modules() -> None:
    monitor = fastcheck.install(Model())

    @torch.compile(backend="aot_eager", fullgraph=True)
    def loss(x: torch.Tensor) -> torch.Tensor:
        return observe("loss.parts", x.square()).mean()

    x = torch.ones(3, requires_grad=True)
    loss(x).backward()
    assert named(monitor) == [
        "loss.parts (observe) · forward · output",
        "loss.parts (observe) · backward · gradient of output",
    ]


def test_a_stop() -> None:
    model = Poisoned()
    fastcheck.install(model)
    stop = stopped(compiled(model), next(batches(1)))
    assert where(stop.culprit) == ("attn.logits", "output", "output", "origin")


def test_a_checkpointed_region_leaves_the_gradient_out() -> None:
    run: Any = train
    _, monitor = observed(Checkpointed, compiled, lambda model: run(model, 1))
    found = named(monitor)
    assert found[0] == "inner.attn.logits (observe) · forward · output"
    assert not [name for name in found if "backward" in name]


def test_inductor() -> None:
    _, monitor = observed(
        Model, lambda model: torch.compile(model, fullgraph=True), lambda model: train(model, 1)
    )
    assert len(named(monitor)) == 2
