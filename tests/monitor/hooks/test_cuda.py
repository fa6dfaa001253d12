"""install() with the CUDA backend, on the fake accelerator with the real kernels
(tests/fakes/cuda_on_fake): records and stops equal those of the CPU, and nothing waits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from fakes import fake_device
from fakes.cuda_on_fake.checks import spent
from fastcheck.ring.device import DeviceRing
from support.devices.on_device import of_cpu, random
from support.helpers import assert_same
from support.programs.training import (
    Apply,
    Net,
    assert_stops_with_the_culprit,
    batches,
    deep,
    nan_gradient,
    poison,
    where,
    without_waiting,
)

fake: Any = fake_device.load()
NAME = fake.name()

pytestmark = [pytest.mark.fake_hooks, pytest.mark.usefixtures("cuda_on_fake_device")]


def test_install_records_what_it_records_on_the_cpu() -> None:
    """Every field of every record: the fake device computes with the CPU's bits."""

    def run(device: str) -> Any:
        torch.manual_seed(0)
        model = Net().to(device)
        monitor = fastcheck.install(model, record="full")
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        for x in batches(4):
            optimizer.zero_grad()
            model(x.to(device)).square().mean().backward()
            optimizer.step()
        monitor.flush()
        records = monitor.records().copy()
        names = [str(monitor.sites[int(site)]) for site in records["site"]]
        records["site"] = records["seq"] = 0
        # A gradient of the first step is read at the end of backward() too on a device.
        steps = (int(n) for n in records["step"])
        return sorted(set(zip(names, steps, (r.tobytes() for r in records))))

    there, here = run(NAME), run("cpu")
    assert len(here) > 100
    # A device's step is judged later, and may read parameters at other moments: what both have.
    common = {key[:2] for key in there} & {key[:2] for key in here}
    assert len(common) > 50
    assert [key for key in there if key[:2] in common] == [key for key in here if key[:2] in common]


@pytest.mark.parametrize("sync", ["never", "step", "call"])
def test_install_stops_with_the_culprit(sync: Any) -> None:
    assert_stops_with_the_culprit(NAME, sync)


def test_install_waits_for_nothing() -> None:
    model = deep(6).to(NAME)
    monitor = fastcheck.install(model, stop=fastcheck.Stop(max_lag=None))
    train = without_waiting(model, [x.to(NAME) for x in batches(6)])
    train()
    monitor.flush()
    fake.synchronize()
    done, names = spent(train)
    assert done.synchronisations == done["blocking_copy"] == 0
    assert 6 * 4 < names.count("fastcheck records") < 6 * 20  # small tensors wait for each other
    monitor.remove()


def test_a_bad_gradient_does_not_reach_the_weights() -> None:
    """found_inf of the fused optimizer is the kernel's word."""
    model = deep(3).to(NAME)
    monitor = fastcheck.install(model, overflow_nums=-1, stop=fastcheck.Stop(protect_weights=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    with fake.recorded_launches() as names:
        for step, x in enumerate(batches(4)):
            model.tail.function = nan_gradient if step == 2 else Apply().function
            optimizer.zero_grad()
            model(x.to(NAME)).square().mean().backward()
            optimizer.step()
        assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert any("fastcheck found_nonfinite" in name for name in names)
    monitor.flush()
    assert {event.step for event in monitor.events} == {2}


@pytest.mark.parametrize("segments", [(8, 2), (8, 64), (3, 4)])
def test_the_ring_wraps(segments: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments are filled again while later ones are in flight."""
    monkeypatch.setattr(DeviceRing.__init__, "__defaults__", segments)
    model = nn.Sequential(Apply(torch.clone), Apply(torch.clone), nn.Linear(1, 1)).to(NAME)
    monitor = fastcheck.install(model, overflow_nums=-1, stop=fastcheck.Stop(max_lag=None))
    hosts = [random("float32", 300 + k, k).nan_to_num(0, 0, 0) for k in range(40)]
    with torch.no_grad():
        for x in hosts:
            for module in (model[0], model[1]):
                module(x.to(NAME))
            monitor.flush()
    wanted = {x.numel(): row for x, row in zip(hosts, of_cpu(hosts))}
    records = monitor.records()
    records = records[records["numel"] >= 300]  # without the parameters
    assert len(records) == 4 * len(hosts)
    for record in records:
        assert_same(
            record.tobytes()[:112] + bytes(80),
            wanted[int(record["numel"])][:112] + bytes(80),
            determinism="bitwise",
        )


def test_a_full_ring_keeps_the_first_non_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceRing.__init__, "__defaults__", (8, 2))
    model = deep(10).to(NAME)
    monitor = fastcheck.install(model, overflow_nums=-1)
    with fake.held(), torch.no_grad():
        model.tail.function = poison
        model(torch.ones(2, 8, device=NAME))
    monitor.flush()
    assert [where(e) for e in monitor.events] == [("tail", "output", "output", "origin")]
    assert len(monitor.records()) == 16 + 1
