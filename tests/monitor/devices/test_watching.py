"""install(watch=) and rerun() on an accelerator: what they find is what they find on the CPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.monitor import watching
from support.devices.training_on_fake import NAME, fake

pytestmark = [pytest.mark.fake_accelerator, pytest.mark.usefixtures("fake_accelerator")]

#: Warmed up after a few steps, so that the test is short.
WATCH = fastcheck.Watch(window=16, warm_up=8)


def run(device: str, watch: Any, *, scaled_at: int = 20, is_shown: bool = False) -> Any:
    """The monitor, and the losses; none of the steps asks the device for a value."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = [torch.randn(16, 8).to(device) for _ in range(scaled_at + 3)]
    monitor = fastcheck.install(
        model, watch=watch, record="stats", stop=fastcheck.Stop(max_lag=None)
    )
    losses = []
    before = fake.counters()
    for step, x in enumerate(data):
        if step == scaled_at:
            with torch.no_grad():
                model[2].weight.mul_(1e4)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if is_shown and step == 5:  # what a notebook shows waits for nothing either
            assert monitor._repr_html_().startswith("<div")
        if step == 1:  # the first ones allocate
            before = fake.counters()
    spent = fake.counters() - before
    fake.synchronize()
    monitor.remove()
    assert spent.synchronisations == 0
    return monitor, [float(loss) for loss in losses]


@pytest.mark.filterwarnings("ignore::fastcheck.WatchWarning")
def test_the_events_are_the_cpus_and_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    # Steps that are judged together are compared with the same ranges: no clock is to divide them.
    monkeypatch.setattr(watching, "_SECONDS", math.inf)
    watched, losses = run(NAME, WATCH)
    assert losses == run(NAME, False)[1]
    kinds = [(event.step, event.kind) for event in watched.watch.events]
    assert (20, "explosion") in kinds
    assert kinds == [(event.step, event.kind) for event in run("cpu", WATCH)[0].watch.events]
    # By itself: what has come until then is judged without the rest.
    assert run(NAME, WATCH, is_shown=True)[1] == losses


@pytest.mark.filterwarnings("ignore::fastcheck.WatchWarning")
def test_an_update_that_is_too_large_is_skipped_without_a_wait() -> None:
    torch.manual_seed(0)
    weight = nn.Linear(8, 4).to(NAME)
    optimizer = torch.optim.Adam(weight.parameters(), lr=0.01, fused=True)
    data = [torch.randn(16, 8).to(NAME) * (1e4 if step == 20 else 1) for step in range(24)]
    watch = fastcheck.Watch(window=16, warm_up=8, skip_above=10)
    kept, before = [], fake.counters()
    stop = fastcheck.Stop(max_lag=None)
    with fastcheck.install(weight, watch=watch, record="stats", stop=stop) as monitor:
        for step, x in enumerate(data):
            optimizer.zero_grad()
            weight(x).square().mean().backward()
            optimizer.step()
            kept.append(weight.weight.detach().clone())
            if step == 1:  # the first ones allocate
                before = fake.counters()
            if step == 18:  # the records of the steps until now have come
                waited = fake.counters() - before
                monitor.flush()
                before = fake.counters()
        spent = fake.counters() - before
    assert waited.synchronisations == spent.synchronisations == 0
    same = [bool((a == b).all()) for a, b in zip(kept, kept[1:])]
    assert [step + 1 for step, one in enumerate(same) if one] == [20]
    assert [event.step for event in monitor.watch.events if "skipped" in event.text] == [20]


def test_an_optimizer_that_cannot_skip_is_named() -> None:
    model = nn.Linear(8, 4).to(NAME)
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    with fastcheck.install(model, watch=fastcheck.Watch(skip_above=10), record="stats"):
        with pytest.warns(fastcheck.FastcheckWarning, match="skips no update of Adam") as caught:
            for _ in range(3):
                model(torch.randn(16, 8).to(NAME)).square().mean().backward()
                optimizer.step()
        assert sum("skips no update" in str(one.message) for one in caught) == 1


def test_a_step_that_is_run_again() -> None:
    """A tensor of the device that differs in one run, and dropout drawn again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4)).to(NAME)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    calls = [0]

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        calls[0] += 1
        hidden = model[1](model[0](x))
        loss = model[2](hidden * (1 + 2.0**-20) if calls[0] == 5 else hidden).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    x = torch.randn(16, 8).to(NAME)
    step(x)
    before = [p.detach().cpu() for p in model.parameters()]
    assert fastcheck.rerun(step, x, model=model, optimizer=optimizer).identical
    report = fastcheck.rerun(step, x, model=model, optimizer=optimizer, deterministic=True)
    assert report.odd_runs == (2,) and report.cause == "hardware"
    assert (report.first.site.module, report.first.site.role) == ("2", "input")
    assert all(torch.equal(p.detach().cpu(), b) for p, b in zip(model.parameters(), before))
