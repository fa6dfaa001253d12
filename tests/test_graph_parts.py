"""install() with captured graphs, on the fake accelerator with the CUDA kernels over the host
shim: parts of a step, several steps, and several graphs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
import graphs_on_fake
from graphs import (
    WARM_UP,
    Training,
    guarded,
    new_graph,
    said,
)
from graphs_on_fake import NAME, data, fake
from training import Net, deep, where

pytestmark = graphs_on_fake.marks


# --- parts of a step, and several steps -----------------------------------------------------------


def test_forward_and_backward_alone() -> None:
    """The optimizer runs in Python: its hooks read the gradients and close the step."""

    def run(is_captured: bool) -> Any:
        torch.manual_seed(0)
        training = Training(Net(), NAME, guarded)
        monitor = fastcheck.install(training.model, overflow_nums=-1, protect_weights=True)
        training.warm_up()
        if is_captured:
            training.capture(training.backward)

        def step() -> None:
            training.graph.replay() if is_captured else training.backward()
            training.optimizer.step()

        training.run(data(6, 3), step)
        monitor.flush()
        return monitor

    here, there = run(False), run(True)
    assert said(there) == said(here)
    assert [(e.step, *where(e)) for e in there.events] == [(e.step, *where(e)) for e in here.events]


def test_a_graph_each_for_gradients_and_update_accumulating() -> None:
    training = Training(deep(2), NAME)
    monitor = fastcheck.install(training.model, overflow_nums=-1)

    def accumulate() -> None:
        training.model(training.x).square().mean().backward()

    def update() -> None:
        training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=False)

    def both() -> None:
        accumulate()
        update()

    training.warm_up(both)
    forward, step = training.capture(accumulate), training.capture(update)
    for index, x in enumerate(data(6)):
        training.x.copy_(x)
        forward.replay()
        if index % 2:
            step.replay()
    monitor.flush()
    records = monitor.records()
    inputs = [k for k, site in enumerate(monitor.sites) if site.role == "input" and not site.module]
    assert [int(r["step"]) for r in records if r["site"] in inputs] == [0, 1, 2, 2, 3, 3, 4, 4]
    weights = [k for k, site in enumerate(monitor.sites) if site.role == "param_grad"]
    assert {int(r["step"]) for r in records if r["site"] in weights} == {0, 1, 2, 3, 4}


def test_what_a_replay_wrote_is_read_again_by_what_is_not_captured() -> None:
    """Its memory has changed, and its version has not."""
    body, head = nn.Linear(8, 8), nn.Linear(8, 8)
    model = nn.ModuleList([body, head]).to(NAME)
    training = Training(model, NAME)
    monitor = fastcheck.install(model)
    outputs = []

    def forward() -> None:
        outputs[:] = [body(training.x)]

    with torch.no_grad():
        training.warm_up(forward)
        training.capture(forward)
        for x in data(3):
            training.x.copy_(x)
            training.graph.replay()
            head(outputs[0])
    monitor.flush()
    sites = [
        k for k, site in enumerate(monitor.sites) if (site.module, site.role) == ("1", "input")
    ]
    sums = [int(r["checksum"]) for r in monitor.records() if r["site"] in sites]
    assert len(sums) == len(set(sums)) == 3


def test_several_steps_in_one_graph() -> None:
    def run(is_captured: bool) -> Any:
        torch.manual_seed(0)
        training = Training(deep(2), NAME, guarded)
        options: Any = {"overflow_nums": -1, "protect_weights": True}
        monitor = fastcheck.install(training.model, **options)
        training.warm_up()

        def three() -> None:
            for _ in range(3):
                training.step()

        if is_captured:
            training.capture(three)
        training.run(data(4, 2), None if is_captured else three)
        monitor.flush()
        return monitor

    here, there = run(False), run(True)
    assert said(there) == said(here)
    assert {e.step for e in there.events} == {e.step for e in here.events} == {8, 9, 10}


def test_monitor_step_after_a_replay_closes_the_step() -> None:
    training = Training(deep(2), NAME)
    monitor = fastcheck.install(training.model, overflow_nums=-1)
    training.warm_up()
    training.capture()
    monitor.step()

    def step() -> None:
        training.graph.replay()
        training.graph.replay()
        monitor.step(loss=training.loss)

    training.run(data(3), step)
    monitor.flush()
    records = monitor.records()
    losses = [k for k, site in enumerate(monitor.sites) if site.role == "loss"]
    mine = [int(r["step"]) for r in records if r["site"] in losses]
    assert mine == [WARM_UP, WARM_UP + 1, WARM_UP + 2]
    weights = [k for k, site in enumerate(monitor.sites) if site.role == "param"]
    read = [int(r["step"]) for r in records if r["site"] == weights[0]]
    assert read == [0, 0, 1, 2, 2, 3, 3, 4, 4]  # before the first forward, and by each update
    inputs = [k for k, site in enumerate(monitor.sites) if site.role == "input" and not site.module]
    seen = [int(r["step"]) for r in records if r["site"] in inputs]
    assert seen == [0, 1, 2, 2, 3, 3, 4, 4]


def test_a_model_that_is_only_asked() -> None:
    """No step ever closes."""
    training = Training(deep(2), NAME)
    monitor = fastcheck.install(training.model, overflow_nums=-1)

    @torch.no_grad()
    def ask() -> None:
        training.model(training.x)

    training.warm_up(ask)
    training.capture(ask)
    for x in data(5, 3):
        training.run([x])
        monitor.flush()
    records = monitor.records()
    inputs = [k for k, site in enumerate(monitor.sites) if site.role == "input" and not site.module]
    assert sum(r["site"] in inputs for r in records) == 5 + WARM_UP
    assert [where(e)[3] for e in monitor.events] == ["arrived"] + ["propagated"] * 4


# --- more than one graph --------------------------------------------------------------------------


def test_two_graphs_at_once() -> None:
    """On two streams, of two models with a monitor each; both lag behind the host."""

    def run(seed: int, is_captured: bool) -> Any:
        torch.manual_seed(seed)
        training = Training(deep(2 + seed), NAME, guarded)
        options: Any = {"overflow_nums": -1, "protect_weights": True, "max_lag": None}
        monitor = fastcheck.install(training.model, **options)
        training.warm_up()
        if is_captured:
            training.capture()
        return training, monitor

    steps = [data(12, 4 + seed, seed=seed) for seed in range(2)]
    wanted = []
    for seed in range(2):
        training, monitor = run(seed, False)
        training.run(steps[seed], training.step)
        monitor.flush()
        wanted.append((said(monitor), {e.step for e in monitor.events}))
        monitor.remove()
    both = [run(seed, True) for seed in range(2)]
    streams = [fake.Stream() for _ in both]
    fake.synchronize()
    fake.set_delay(300, streams[0])
    for index in range(12):
        for (training, _), stream, batch in zip(both, streams, steps):
            with fake.stream(stream):
                training.x.copy_(batch[index])
                training.graph.replay()
    fake.set_delay(0, streams[0])
    for (_, monitor), expected in zip(both, wanted):
        monitor.flush()
        assert (said(monitor), {e.step for e in monitor.events}) == expected


def test_a_graph_changes_streams() -> None:
    """What one replay left is copied aside before the next one writes, whatever the streams."""

    def run(is_captured: bool) -> Any:
        torch.manual_seed(0)
        training = Training(deep(3), NAME, guarded)
        monitor = fastcheck.install(training.model, max_lag=None)
        training.warm_up()
        if is_captured:
            training.capture()
        streams = [fake.Stream() for _ in range(3)]
        fake.synchronize()
        fake.set_delay(3000, streams[0])
        for index in range(9):
            with fake.stream(streams[index % 3] if is_captured else streams[1]):
                training.graph.replay() if is_captured else training.step()
        fake.set_delay(0, streams[0])
        monitor.flush()
        return monitor

    assert said(run(True)) == said(run(False))


@pytest.mark.parametrize("what", ["another capture", "another stream"])
def test_what_can_t_be_followed_is_said_and_not_followed(what: str) -> None:
    training = Training(deep(2), NAME)
    monitor = fastcheck.install(training.model)
    training.warm_up()
    aside = fake.Stream()

    def step() -> None:
        training.step()
        with fake.stream(aside), torch.no_grad():
            if what == "another stream":
                training.model(torch.ones(4, 8, device=NAME))
                return
            other = new_graph(NAME)
            other.capture_begin()
            training.model(torch.ones(4, 8, device=NAME))
            other.capture_end()

    training.capture(step)
    training.run(data(4))
    monitor.flush()
    assert "a captured graph is not read: " in monitor.summary()
    assert set(monitor.records()["step"]) == set(range(WARM_UP))
    training.step()
    monitor.flush()
    assert set(monitor.records()["step"]) == set(range(WARM_UP + 1))
