"""The Triton backend end to end on the fake accelerator: the kernels run in Triton's interpreter,
which uses the host; the backend's own launches and waits are counted without the kernels. `make
test-fake-triton` runs it.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="triton is not installed")
if (os.environ.get("FASTCHECK_TRITON"), os.environ.get("TRITON_INTERPRET")) != ("on", "1"):
    pytest.skip("needs FASTCHECK_TRITON=on TRITON_INTERPRET=1", allow_module_level=True)

import fastcheck
from fakes import fake_device
from fastcheck import _C
from fastcheck.backends.table import backend_for
from fastcheck.backends.triton import kernels as triton_kernels
from fastcheck.backends.triton import launch as triton_launch
from support.helpers import assert_same, tensor_of
from support.records.reference import VALUE_BYTES, pattern

fake: Any = fake_device.load()
NAME = fake.name()

pytestmark = [pytest.mark.fake_triton, pytest.mark.usefixtures("fake_accelerator")]


def test_the_table_has_it() -> None:
    backend = backend_for(torch.device(NAME, 0))
    assert (backend.name, backend.determinism) == ("triton", "sums")


def test_records_of_the_device() -> None:
    x = tensor_of(pattern("random", "bfloat16", 9001, 1), "bfloat16")
    others = [x[:70], torch.arange(5000), torch.randn(6, 5).double(), torch.empty(0)]
    for device in (f"{NAME}:0", f"{NAME}:1"):
        alone = fastcheck.stats(x.to(device))
        listed = fastcheck.stats([y.to(device) for y in others])
        for y, s in zip([x, *others], [alone, *listed]):
            wanted = _C.record(y).numpy().tobytes()
            actual = s.record.tobytes()[:VALUE_BYTES] + wanted[VALUE_BYTES:]
            assert_same(actual, wanted, (device, y.dtype), determinism="sums")


def test_install_stops_where_the_numbers_went_wrong(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).to(NAME)
    with torch.no_grad():
        model[2].weight[1, 1] = float("inf")
    monitor = fastcheck.install(model, sync="step", record="health")
    try:
        with pytest.raises(fastcheck.OverflowDetected) as stop:
            model(torch.ones(3, 4, device=NAME)).sum().backward()
            monitor.step()
        assert stop.value.culprit.site.module == "2"
        assert "Triton" not in monitor.summary()  # nothing was given up
    finally:
        monitor.remove()


class Launched:
    """A kernel that is not run."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *_, **__: self.grids.append(grid)


def test_nothing_waits_and_little_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch for a small tensor, two for a large one; no copy, no wait, and no memory but for
    the rows of partials.
    """
    taken = {name: Launched() for name in ("whole_kernel", "part_kernel", "fold_kernel")}
    for name, stand_in in taken.items():
        monkeypatch.setattr(triton_kernels, name, stand_in)
    backend = backend_for(torch.device(NAME, 0))
    slots = torch.zeros(2, 192, dtype=torch.uint8, device=NAME)
    small, large = torch.ones(1000).to(NAME), torch.ones(1 << 20).to(NAME)
    programs = triton_launch.target_of(large.device).programs

    def observe() -> None:
        backend.observe(small, slots, 0, 3)
        backend.observe(large, slots, 1, 3)

    observe()  # what the caching allocator keeps
    before = fake.counters()
    with fake.recorded_launches() as names:
        observe()
    done = fake.counters() - before
    assert done.synchronisations == 0
    assert done["blocking_copy"] == done["async_copy"] == 0
    assert done["alloc_below_cache"] == done["pinned_alloc"] == 0
    assert list(names) == []
    assert taken["whole_kernel"].grids == [(1,)] * 2
    assert taken["part_kernel"].grids == [(min(programs, 256),)] * 2
    assert taken["fold_kernel"].grids == [(1,)] * 2
