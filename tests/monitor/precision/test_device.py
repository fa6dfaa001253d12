"""install(record="range") on an accelerator: the CPU's counts and losses, and no waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from support.devices.training_on_fake import NAME, fake

pytestmark = [pytest.mark.fake_accelerator, pytest.mark.usefixtures("fake_accelerator")]


def run(device: str, record: str = "range") -> tuple[Any, list[float]]:
    """The monitor, and the losses; none of the steps asks the device for a value."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).to(device)
    data = [torch.randn(16, 8).to(device) for _ in range(5)]
    monitor = fastcheck.install(model, record=record, stop=fastcheck.Stop(max_lag=None))
    losses = []
    before = fake.counters()
    for step, x in enumerate(data):
        loss = model(x).square().mean()
        loss.backward()
        monitor.step()
        losses.append(loss.detach())
        if step == 1:  # the first ones copy constants
            before = fake.counters()
    spent = fake.counters() - before
    assert spent.synchronisations == 0
    fake.synchronize()
    return monitor, [float(loss) for loss in losses]


def test_the_counts_are_the_cpus_and_nothing_waits() -> None:
    monitor, losses = run(NAME)
    plain, same = run(NAME, "full")
    assert losses == same
    plain.remove()
    advice = {str(one.site): one for one in monitor.advice()}
    host, _ = run("cpu")
    # Forward alone: the fake accelerator's products are the CPU's.
    compared = [one for one in host.advice() if one.site.direction == "forward"]
    assert len(compared) == 4
    for one in compared:
        found = advice[str(one.site)]
        assert found.exponents == one.exponents and found.readings == one.readings == 4
    monitor.remove()
    host.remove()
