"""Nothing of fastcheck's keeps torch from swapping or replacing the tensors of a model, and the new
ones are observed under their names.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Callable

import pytest
import torch
from torch import nn

import fastcheck

pytestmark = pytest.mark.usefixtures("fresh_start")

Loop = Callable[[nn.Module, torch.optim.Optimizer, torch.Tensor], torch.Tensor]


def model_of(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(device)


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def clipping(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor
) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss


def by_hand(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor
) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)
    optimizer.step()
    return loss


def scaled(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    scaler = torch.amp.GradScaler(batch.device.type, init_scale=4.0)
    loss: torch.Tensor = scaler.scale(model(batch).square().mean())
    loss.backward()
    scaler.step(optimizer)
    scaler.update()
    return loss


def only_scaled(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor
) -> torch.Tensor:
    loss: torch.Tensor = torch.amp.GradScaler(batch.device.type).scale(model(batch).mean())
    return loss


LOOPS = (plain, clipping, by_hand, scaled, only_scaled)
OPTIONS: dict[str, dict[str, Any]] = {
    "module": {},
    "watch": {"watch": True},
    "own scale": {"training": fastcheck.Training(scaler=lambda: 2.0)},
    "op": {"level": "op"},
    "op, call": {"level": "op", "sync": "call"},
}


def tensors_of(model: nn.Module) -> Iterator[torch.Tensor]:
    for parameter in model.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    yield from model.buffers()


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("options", OPTIONS)
def test_nothing_refers_to_a_tensor_of_the_program(loop: Loop, options: str, device: str) -> None:
    counts = []
    for is_observed in (False, True):
        model = model_of(device)
        optimizer = torch.optim.Adam(model.parameters())
        monitor = fastcheck.install(model, **OPTIONS[options]) if is_observed else None
        batch = torch.randn(8, 4).to(device)
        for _ in range(3):
            optimizer.zero_grad()
            loss = loop(model, optimizer, batch)
            held = [*tensors_of(model), batch, loss]
            assert [weakref.getweakrefs(tensor) for tensor in held] == [[]] * len(held)
        counts.append([tensor._use_count() for tensor in held])
        if monitor is not None:
            monitor.remove()
    assert counts[0] == counts[1]


@pytest.fixture
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def convert(model: nn.Module) -> None:
    model.double()


def load(model: nn.Module) -> None:
    model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()})


def swap(model: nn.Module) -> None:
    for parameter in model.parameters():
        torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().clone()))


def replace(model: nn.Module) -> None:
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                setattr(module, name, nn.Parameter(parameter.detach().clone()))


CHANGES = (convert, load, swap, replace)


@pytest.mark.usefixtures("swapping")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("options", ["watch", "op"])
def test_what_was_observed_can_be_changed_after_the_end(
    options: str, change: Callable[[nn.Module], None], device: str
) -> None:
    model = model_of(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with fastcheck.install(model, **OPTIONS[options]):
        for _ in range(2):
            clipping(model, optimizer, torch.randn(8, 4).to(device))
    change(model)


@pytest.mark.usefixtures("swapping")
@pytest.mark.parametrize("loop", [clipping, by_hand])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("options", ["watch", "op"])
def test_the_new_parameters_are_observed(
    options: str, change: Callable[[nn.Module], None], loop: Loop, device: str
) -> None:
    model = model_of(device)
    batch = torch.randn(8, 4).to(device)
    with fastcheck.install(model, overflow_nums=-1, **OPTIONS[options]) as monitor:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loop(model, optimizer, batch)
        change(model)  # with its gradients, which are swapped too
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        optimizer.zero_grad()
        weight = model[2].weight
        weight.register_hook(lambda gradient: gradient * float("nan"))
        loop(model, optimizer, batch.to(weight.dtype))
        monitor.flush()
        table = monitor.table()
        dtypes = {
            dtype
            for name, step, dtype in zip(table["name"], table["step"], table["dtype"])
            if step == 3 and name.startswith("2 (Linear)") and "weight" in name
        }
        if options != "op":
            assert dtypes == {"float64" if change is convert else "float32"}
        (event, *_) = monitor.events
        if options == "op":
            assert event.step == 3 and "reached the gradient of 2.weight" in event.reason
        else:
            assert (event.step, event.site.module, event.site.label) == (3, "2", "weight")
