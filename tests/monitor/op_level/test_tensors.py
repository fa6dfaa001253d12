"""level="op" reads the memory behind a tensor: the local shard of a DTensor, the values of a lazy
view, gradients that are zeros without memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Callable

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard, distribute_tensor

import fastcheck
from fastcheck.types import Verdict
from support.programs.training import Net

pytestmark = pytest.mark.usefixtures("op_observer")


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Two ranks of which this is the first; the other one only seems to be there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield DeviceMesh("cpu", [0, 1])
    finally:
        dist.destroy_process_group()


# Nothing uses what is computed here: it counts by its appearance.
EVERYTHING = fastcheck.Stop(count="all")


def counted(monitor: fastcheck.Monitor) -> list[tuple[Any, ...]]:
    return [
        (event.site.op, int(event.record["numel"]))
        for event in monitor.events
        if event.verdict is Verdict.ORIGIN
    ]


def checksums(monitor: fastcheck.Monitor, op: str) -> list[int]:
    return [
        int(record["checksum"])
        for record in monitor.records()
        if monitor.sites[int(record["site"])].op == op
        and monitor.sites[int(record["site"])].role == "output"
    ]


def test_a_dtensor_is_read_as_its_local_shard(mesh: DeviceMesh) -> None:
    whole = torch.arange(16.0).reshape(8, 2) + 1
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    expected = fastcheck.stats(whole[:4] * 2, record="full").checksum
    other = distribute_tensor(torch.full((8, 2), 2.0), mesh, [Shard(0)])
    monitor = fastcheck.install(Net(), level="op", overflow_nums=-1, stop=EVERYTHING)
    product = sharded * other
    bad = torch.sqrt(-sharded)
    monitor.remove()
    assert isinstance(product, DTensor) and isinstance(bad, DTensor)
    assert checksums(monitor, "aten.mul.Tensor") == [int(expected)]
    assert counted(monitor) == [("aten.sqrt", 8)]
    assert "unread" not in monitor.summary()


def test_a_replicated_dtensor_and_its_backward(mesh: DeviceMesh) -> None:
    weight = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Replicate()]))
    monitor = fastcheck.install(Net(), level="op", overflow_nums=-1, stop=EVERYTHING)
    torch.sqrt(weight).sum().backward()
    monitor.step()
    origins = [e for e in monitor.events if e.verdict is fastcheck.types.Verdict.ORIGIN]
    assert [event.site.direction for event in origins] == ["backward"]
    monitor.remove()


def test_a_conjugate_view_is_read_as_it_shows() -> None:
    x = torch.randn(4, dtype=torch.complex64)
    monitor = fastcheck.install(Net(), level="op", overflow_nums=-1, stop=EVERYTHING)
    _ = torch.real(x.conj()) + torch.imag(x.conj())  # the latter a negative view
    taken = x.conj() * 1
    monitor.flush()
    read = {int(record["checksum"]) for record in monitor.records()}
    for shown in (torch.imag(x.conj()).resolve_neg(), taken):
        assert int(fastcheck.stats(shown, record="full").checksum) in read
    assert not monitor.event_count
    monitor.remove()


def test_zeros_without_memory_are_no_blind_spot() -> None:
    monitor = fastcheck.install(Net(), level="op", overflow_nums=-1, stop=EVERYTHING)
    with forward_ad.dual_level():
        zeros = torch._efficientzerotensor(4)
        dual = forward_ad.make_dual(torch.ones(4), zeros)
        made = torch.log(dual * 0) + 1
        tangent = forward_ad.unpack_dual(made).tangent
    monitor.flush()
    assert tangent is not None and tangent.isnan().all()
    assert counted(monitor)
    assert not monitor._session.level.unread_ops()  # type: ignore[attr-defined]  # of the op level's session
    monitor.remove()


def test_chunks_that_count_versions_by_themselves_keep_what_is_known_of_each() -> None:
    """As the gates of a GRU, which are written in place one after the other."""

    class Gates(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            reset, update, new = torch.unsafe_chunk(x * 2, 3, 1)
            reset.sub_(100).log_()
            update.add_(1).sigmoid_()
            return (new * reset + update).sum()

    model = nn.Sequential(nn.Linear(4, 6), Gates())
    monitor = fastcheck.install(model, level="op", overflow_nums=-1)
    with torch.no_grad():
        model(torch.ones(2, 4))
    assert [(e.site.op, e.verdict.name) for e in monitor.events if e.counted] == [
        ("aten.log_", "ORIGIN")
    ]


def reads_rows(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([row * 2 for row in (x - 1).log()])


def writes_rows(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    for row, values in zip(out, x):
        row.copy_((values - 1).log())
    return out * 2


def splits_rows(split: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: torch.stack([part * 2 for row in (x - 1).log() for part in split(row)])


def writes_parts_often(x: torch.Tensor) -> torch.Tensor:
    rows = (x - 1).log()
    for count, part in enumerate(torch.unsafe_split(rows, 4)):
        for _ in range(count):
            part.mul_(1)
    return rows * 2


@pytest.mark.parametrize(
    "compute",
    [
        reads_rows,
        writes_rows,
        splits_rows(lambda row: torch.unsafe_chunk(row, 2)),
        splits_rows(lambda row: torch.unsafe_split(row, 2)),
        splits_rows(lambda row: torch.unsafe_split_with_sizes(row, [2, 2])),
        writes_parts_often,
    ],
    ids=["read", "written", "chunk", "split", "sizes", "versions"],
)
@pytest.mark.parametrize("bad", [3, 20, 90])
def test_of_many_parts_it_is_known_where_each_began(
    compute: Callable[[torch.Tensor], torch.Tensor], bad: int
) -> None:
    """As the steps of a GRU, each of which splits its gates."""
    monitor = fastcheck.install(Net(), level="op", overflow_nums=-1, stop=EVERYTHING)
    x = torch.full((100, 4), 2.0)
    x[bad, 1] = 0
    with torch.no_grad():
        compute(x).sum()
    monitor.flush()
    began = [e for e in monitor.events if e.verdict is not Verdict.PROPAGATED]
    assert [(e.site.op, e.verdict.name) for e in began] == [("aten.log", "ORIGIN")]
    monitor.remove()
