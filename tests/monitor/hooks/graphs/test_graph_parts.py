"""install() with captured graphs, on the fake accelerator with the CUDA kernels over the host
shim: parts of a step, and several steps.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from support.devices import graphs_on_fake
from support.devices.graphs_on_fake import NAME, data
from support.programs.graphs import WARM_UP, Training, guarded, said
from support.programs.training import Net, deep, where

pytestmark = [pytest.mark.fake_hooks, *graphs_on_fake.marks]


def test_forward_and_backward_alone() -> None:
    """The optimizer runs in Python: its hooks read the gradients and close the step."""

    def run(is_captured: bool) -> Any:
        torch.manual_seed(0)
        training = Training(Net(), NAME, guarded)
        monitor = fastcheck.install(
            training.model, overflow_nums=-1, stop=fastcheck.Stop(protect_weights=True)
        )
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


def test_an_update_alone_opens_no_step() -> None:
    """One that is applied twice belongs to one step, in a graph of its own as without."""

    def run(is_captured: bool) -> Any:
        torch.manual_seed(0)
        training = Training(deep(2), NAME, guarded)
        monitor = fastcheck.install(training.model, overflow_nums=-1)
        training.warm_up()
        update: Any = training.optimizer.step
        if is_captured:
            training.backward()
            update = training.capture(update).replay
        for x in data(3):
            training.run([x], training.backward)
            update()
            update()
        monitor.flush()
        return monitor

    here, there = run(False), run(True)
    assert there.step_index == here.step_index == WARM_UP + 2


def test_a_pause_within_a_step_is_a_matter_of_the_replays() -> None:
    """Of two passes of a step one is read, or the other."""

    def run(is_captured: bool) -> Any:
        torch.manual_seed(0)
        training = Training(deep(2), NAME, guarded)
        monitor = fastcheck.install(training.model, overflow_nums=-1)

        def accumulate() -> None:
            training.model(training.x).square().mean().backward()

        training.warm_up()
        training.optimizer.zero_grad(set_to_none=False)
        if is_captured:
            training.capture(accumulate)
        for pauses in ((False, True), (True, False)):
            for is_paused, x in zip(pauses, data(2)):
                monitor._pause(is_paused)
                training.run([x], None if is_captured else accumulate)
            training.optimizer.step()
            training.optimizer.zero_grad(set_to_none=False)
        monitor.flush()
        return monitor

    here, there = run(False), run(True)
    assert said(there) == said(here)
    batches = [step for step, site, _ in said(there) if "input[0]" in site]
    assert batches == [WARM_UP, WARM_UP + 1]


def test_a_loss_that_is_told_within_a_graph() -> None:
    """Minus infinity is a mask until it is the loss: of the replay that computed it."""

    def run(is_captured: bool) -> Any:
        torch.manual_seed(0)
        training = Training(deep(2), NAME)
        word = torch.zeros((), device=NAME)
        training.model.tail.function = lambda x: x.sum() - word
        monitor = fastcheck.install(training.model, overflow_nums=-1)

        def step() -> None:
            loss = training.model(training.x)
            loss.backward()
            monitor.step(loss=loss)

        training.warm_up(step)
        if is_captured:
            training.capture(step)
        for index, x in enumerate(data(4)):
            word.fill_(float("inf") if index == 2 else 0.0)
            training.run([x], None if is_captured else step)
        monitor.flush()
        return [(e.step, *where(e), e.counted) for e in monitor.events]

    here, there = run(False), run(True)
    assert there == here
    assert (WARM_UP + 2, "tail", "output", "output", "origin", True) in here


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


def test_gradients_of_a_graph_are_read_where_weights_are_updated_by_hand() -> None:
    """As monitor.step() closes the step; no optimizer of torch's has read them."""

    def run(is_captured: bool) -> Any:
        torch.manual_seed(0)
        training = Training(deep(2), NAME)
        monitor = fastcheck.install(training.model, overflow_nums=-1)

        def update() -> None:
            with torch.no_grad():
                for p in training.model.parameters():
                    p.sub_(p.grad, alpha=0.01)
            monitor.step()

        for _ in range(WARM_UP):
            training.backward()
            update()
        if is_captured:
            training.capture(training.backward)
        for x in data(4, 2):
            training.run([x], None if is_captured else training.backward)
            update()
        monitor.flush()
        return monitor

    here, there = run(False), run(True)
    assert sorted(said(there)) == sorted(said(here))
    read = {
        step for step, site, _ in said(there) if "gradient of " in site and site.endswith("weight")
    }
    assert read == {WARM_UP + index for index in range(4)}


def test_a_batch_behind_a_bad_replay_arrives_by_itself() -> None:
    """What is read of one pass of a step does not excuse the next one's input."""

    def run(is_captured: bool) -> Any:
        torch.manual_seed(0)
        training = Training(deep(2), NAME)
        model = training.model
        monitor = fastcheck.install(model, overflow_nums=-1)

        def forward() -> None:
            model(training.x)

        training.warm_up()
        if is_captured:
            training.capture(forward)
        first, second = data(2, 0, 1)
        training.run([first], None if is_captured else forward)
        model(second * torch.ones((), device=NAME, requires_grad=True))  # no batch, by its looks
        monitor.flush()
        return [(*where(event), event.counted) for event in monitor.events]

    here, there = run(False), run(True)
    assert there == here
    assert [event[3] for event in here if event[1] == "input"] == ["arrived", "arrived"]


def test_several_steps_in_one_graph() -> None:
    def run(is_captured: bool) -> Any:
        torch.manual_seed(0)
        training = Training(deep(2), NAME, guarded)
        options: Any = {"overflow_nums": -1, "stop": fastcheck.Stop(protect_weights=True)}
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
    # Of each step two that a replay has read, and the one that was given.
    assert mine == [0, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]
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
