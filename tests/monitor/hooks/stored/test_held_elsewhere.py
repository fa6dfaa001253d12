"""Modules that return nested tensors or DTensors: what these hold is read, and their gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Replicate, distribute_module

import fastcheck
from support.programs.training import Apply, chain, nan_gradient, stopped, where

pytestmark = [
    pytest.mark.usefixtures("fresh_start"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]

NAN = float("nan")


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


def rows() -> list[torch.Tensor]:
    return [torch.randn(3, 4), torch.randn(5, 4)]


def jagged() -> torch.Tensor:
    return torch.nested.nested_tensor(rows(), layout=torch.jagged)


def strided() -> torch.Tensor:
    return torch.nested.nested_tensor(rows())


def model(function: Callable[[torch.Tensor], torch.Tensor]) -> nn.Sequential:
    torch.manual_seed(0)
    return chain(first=nn.Linear(4, 4), middle=Apply(function), last=nn.Linear(4, 4))


def train(
    layers: nn.Module,
    batch: Callable[[], torch.Tensor],
    loss: Callable[[torch.Tensor], torch.Tensor],
) -> list[float]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        value = loss(layers(batch()))
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def of_nested(output: torch.Tensor) -> torch.Tensor:
    return torch.cat([row.square().flatten() for row in output.unbind()]).mean()


def of_sharded(output: torch.Tensor) -> torch.Tensor:
    assert isinstance(output, DTensor)
    return output.square().mean().to_local()


@pytest.mark.parametrize("batch", [jagged, strided])
class TestNested:
    def test_a_nan_is_the_modules_that_made_it(self, batch: Callable[[], torch.Tensor]) -> None:
        layers = model(lambda x: x * NAN)
        fastcheck.install(layers)
        stop = stopped(train, layers, batch, of_nested)
        assert where(stop.culprit) == ("middle", "output", "output.values", "origin")
        assert stop.culprit.record["numel"] == 32

    def test_a_healthy_run_is_read_once_and_equal(self, batch: Callable[[], torch.Tensor]) -> None:
        plain = train(model(lambda x: x * 2.0), batch, of_nested)
        layers = model(lambda x: x * 2.0)
        monitor = fastcheck.install(layers)
        assert train(layers, batch, of_nested) == plain and not monitor.events
        read = [str(monitor.sites[r["site"]]) for r in monitor.records() if r["step"] == 1]
        assert [name for name in read if "put" in name and "grad" not in name] == [
            "Sequential · forward · input[0].values",
            "first (Linear) · forward · output.values",
            "middle (Apply) · forward · output.values",
            "last (Linear) · forward · output.values",
        ]
        assert len(set(read)) == len(read)


def test_a_nan_gradient_of_a_jagged_tensor() -> None:
    layers = model(nan_gradient)
    fastcheck.install(layers)
    stop = stopped(train, layers, jagged, of_nested)
    assert where(stop.culprit) == ("middle", "grad_input", "input[0].values", "origin")
    assert "aten.mul.Tensor's backward made it" in str(stop)


def test_observe_reads_one_and_its_gradient() -> None:
    def named(x: torch.Tensor) -> torch.Tensor:
        return fastcheck.observe("doubled", x * 2.0)

    layers = model(named)
    monitor = fastcheck.install(layers)
    train(layers, jagged, of_nested)
    read = [str(monitor.sites[r["site"]]) for r in monitor.records() if r["step"] == 1]
    assert [name for name in read if "doubled" in name] == [
        "middle.doubled (observe) · forward · output",
        "middle.doubled (observe) · backward · gradient of output",
    ]


def test_elements_beyond_the_lengths_of_rows_are_not_read() -> None:
    def gaps() -> torch.Tensor:
        padded = torch.randn(2, 5, 4)
        padded[0, 3:] = NAN
        return torch.nested.narrow(padded, 1, 0, torch.tensor([3, 5]), layout=torch.jagged)

    layers = chain(first=Apply(lambda x: x), second=Apply(lambda x: torch.cat(x.unbind())))
    monitor = fastcheck.install(layers)
    assert layers(gaps()).isfinite().all() and not monitor.events


class TestDTensors:
    def batch(self, mesh: DeviceMesh) -> Callable[[], torch.Tensor]:
        return lambda: DTensor.from_local(torch.randn(8, 4), mesh, [Replicate()])

    def test_a_nan_is_the_modules_that_made_it(self, mesh: DeviceMesh) -> None:
        layers = distribute_module(model(lambda x: x * NAN), mesh)
        fastcheck.install(layers)
        stop = stopped(train, layers, self.batch(mesh), of_sharded)
        assert where(stop.culprit) == ("middle", "output", "output.local", "origin")

    def test_a_nan_gradient(self, mesh: DeviceMesh) -> None:
        layers = distribute_module(model(nan_gradient), mesh)
        fastcheck.install(layers)
        stop = stopped(train, layers, self.batch(mesh), of_sharded)
        assert where(stop.culprit) == ("middle", "grad_input", "input[0].local", "origin")

    def test_a_healthy_run_is_equal(self, mesh: DeviceMesh) -> None:
        plain = train(distribute_module(model(torch.relu), mesh), self.batch(mesh), of_sharded)
        layers = distribute_module(model(torch.relu), mesh)
        monitor = fastcheck.install(layers)
        assert train(layers, self.batch(mesh), of_sharded) == plain and not monitor.events

    @pytest.mark.parametrize("is_partial", [False, True])
    def test_a_loss_is_read_if_it_is_whole(self, mesh: DeviceMesh, is_partial: bool) -> None:
        layers = distribute_module(model(torch.relu), mesh)
        monitor = fastcheck.install(layers)
        value = layers(self.batch(mesh)()).square().mean().to_local()
        DTensor.from_local(value, mesh, [Partial() if is_partial else Replicate()]).backward()
        torch.optim.SGD(layers.parameters(), lr=0.01).step()
        monitor.step()
        assert monitor.step_table()[0].loss == (None if is_partial else value.item())
