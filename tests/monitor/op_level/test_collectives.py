"""level="op" and collectives: what one has not written yet is not read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn

import fastcheck
from support.programs.training import Apply, chain, stopped

pytestmark = [
    pytest.mark.usefixtures("fresh_start"),
    pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning"),
]


Install = Callable[..., fastcheck.Monitor]


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def install() -> Iterator[Install]:
    """Installs the only monitor at op level, until the test is over."""
    with ExitStack() as until_the_end:
        yield lambda model, **options: until_the_end.enter_context(
            fastcheck.install(model, level="op", **options)
        )


def wrapped(x: torch.Tensor) -> torch.Tensor:
    """The result waits for itself where an operator reads it."""
    return funcol.all_reduce(x, "sum", dist.group.WORLD)


def waited_for(x: torch.Tensor) -> torch.Tensor:
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]  # it is there
    begun = torch.ops._c10d_functional.all_reduce(x, "sum", name)
    return funcol.wait_tensor(begun)


def derived(x: torch.Tensor) -> torch.Tensor:
    return funcol.all_to_all_single_autograd(x, [3], [3], dist.group.WORLD)


@pytest.mark.parametrize("collective", [wrapped, waited_for, derived])
def test_what_is_under_way_is_not_read(
    install: Install, collective: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    layers = chain(
        first=nn.Linear(4, 4), between=Apply(collective), last=nn.Linear(4, 4, bias=False)
    )
    monitor = install(layers)
    layers(torch.randn(3, 4)).square().mean().backward()
    monitor.step()
    read = [str(monitor.sites[record["site"]]) for record in monitor.records()]
    assert not [name for name in read if "wait_tensor" in name or "_wrap_tensor" in name]
    # Forward and backward go on with what has arrived.
    assert "last (Linear) · aten.mm · forward · self" in read
    assert "first (Linear) · aten.addmm · backward · grad_output[0] (aten.mm)" in read


def gathered(out: torch.Tensor, x: torch.Tensor) -> None:
    dist.all_gather_into_tensor(out, x)


def gathered_to_list(out: torch.Tensor, x: torch.Tensor) -> None:
    dist.all_gather([out], x)


def scattered(out: torch.Tensor, x: torch.Tensor) -> None:
    dist.reduce_scatter_tensor(out, x)


def exchanged(out: torch.Tensor, x: torch.Tensor) -> None:
    dist.all_to_all_single(out, x)


@pytest.mark.parametrize("receive", [gathered, gathered_to_list, scattered, exchanged])
def test_what_is_received_is_read_when_it_has_come(
    install: Install, receive: Callable[[torch.Tensor, torch.Tensor], None]
) -> None:
    model = nn.Linear(4, 4)
    monitor = install(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    received = torch.empty(3, 4)  # the same memory in each step
    for _ in range(3):
        made = model(torch.randn(3, 4))
        receive(received, made.detach())
        (made * received).sum().backward()
        optimizer.step()
    sites = [str(monitor.sites[record["site"]]) for record in monitor.records()]
    assert not [name for name in sites if "c10d" in name and "output" in name]
    # Gloo itself copies by operators.
    copied = sum("aten.copy_ · forward · output" in name for name in sites)
    assert copied + sum("aten.mul.Tensor · forward · other" in name for name in sites) >= 3


def test_a_fully_sharded_model_reads_nothing_that_was_not_written(install: Install) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # A group of one gathers nothing. Of this group the other rank sends nothing.
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in (*model, model):
        fully_shard(layer)
    monitor = install(model, overflow_nums=-1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
    sites = [str(monitor.sites[record["site"]]) for record in monitor.records()]
    assert not [name for name in sites if "output_tensor" in name or "copy_in" in name]
    # What is within DTensors is read; fake tensors, by which torch plans, are no other subclass.
    assert [name for name in sites if "aten.addcdiv_" in name]
    assert "a tensor subclass" not in monitor.summary()


def test_a_nan_that_has_come_stops(install: Install) -> None:
    model = nn.Linear(4, 4)
    install(model)
    received, bad = torch.empty(3, 4), torch.full((3, 4), float("nan"))

    def step() -> None:
        made = model(torch.randn(3, 4))
        exchanged(received, bad)
        (made * received).sum().backward()

    assert "aten.mul.Tensor" in str(stopped(step))
