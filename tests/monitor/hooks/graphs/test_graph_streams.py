"""install() with captured graphs, on the fake accelerator with the CUDA kernels over the host
shim: several graphs, and graphs on several streams.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fastcheck
from support.devices import graphs_on_fake
from support.devices.graphs_on_fake import NAME, data, fake
from support.programs.graphs import WARM_UP, Training, guarded, new_graph, said
from support.programs.training import deep

pytestmark = [pytest.mark.fake_hooks, *graphs_on_fake.marks]


def test_two_graphs_at_once() -> None:
    """On two streams, of two models with a monitor each; both lag behind the host."""

    def run(seed: int, is_captured: bool) -> Any:
        torch.manual_seed(seed)
        training = Training(deep(2 + seed), NAME, guarded)
        options: Any = {
            "overflow_nums": -1,
            "stop": fastcheck.Stop(protect_weights=True, max_lag=None),
        }
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
        monitor = fastcheck.install(training.model, stop=fastcheck.Stop(max_lag=None))
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
