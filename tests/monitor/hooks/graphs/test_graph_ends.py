"""install() with captured graphs, on the fake accelerator with the CUDA kernels over the host shim:
captures that fail, monitors and graphs that are deleted, and what cannot be captured.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.backends import table
from fastcheck.backends.portable.backend import portable_backend
from fastcheck.monitor.hooks import graphs as graphs_module
from fastcheck.monitor.showing import notes_of
from fastcheck.ring import graph_slots
from support.devices import graphs_on_fake
from support.devices.graphs_on_fake import NAME, data, fake
from support.programs.graphs import (
    WARM_UP,
    Training,
    guarded,
    of_replays,
    said,
)
from support.programs.training import Net, deep, stopped

pytestmark = [pytest.mark.fake_hooks, *graphs_on_fake.marks]


def test_an_exception_in_a_capture() -> None:
    """The graph is gone, and training goes on as if nothing had been captured."""

    def run(is_captured: bool) -> Any:
        torch.manual_seed(0)
        training = Training(Net(), NAME, guarded)
        monitor = fastcheck.install(training.model)
        training.warm_up()

        def fails() -> None:
            training.model(training.x)
            raise KeyError("within")

        def waits() -> None:
            training.step()
            training.loss.item()

        if is_captured:
            with pytest.raises(KeyError, match="within"):
                training.capture(fails)
            graph = training.graph
            training.model.zero_grad()
            with pytest.raises(RuntimeError, match="captur"):
                training.capture(waits)
            assert (
                training.graph not in monitor._core.hooks.graphs._graphs
            )  # nothing is kept for it
            training.model.zero_grad()
            del graph
            training.graph = None
        training.run(data(4), training.step)
        monitor.flush()
        return monitor

    here, there = run(False), run(True)
    assert said(there) == said(here)
    assert not there._session.faults.notes
    assert there._session.next_seq == here._session.next_seq
    assert there.step_index == here.step_index


@pytest.mark.parametrize("end", ["remove", "drop the model's monitor", "remove while captured"])
def test_a_monitor_that_is_gone_leaves_the_graph_alone(end: str) -> None:
    """Its memory stays, for as long as the graph: nothing else is overwritten by a replay."""
    training = Training(deep(3), NAME)
    monitors = [fastcheck.install(training.model)]
    training.warm_up()
    if end == "remove while captured":

        def step() -> None:
            training.backward()
            monitors[0].remove()
            training.optimizer.step()

        training.capture(step)
    else:
        training.capture()
        training.run(data(2))
    if end == "remove":
        monitors[0].remove()
    monitors.clear()
    gc.collect()
    fake.empty_cache()
    # The memory that the slots would have had, if it were free.
    others = [torch.zeros(1024, 192, dtype=torch.uint8, device=NAME) for _ in range(40)]
    losses = training.run(data(5))
    fake.synchronize()
    assert all(bool(loss.isfinite()) for loss in losses)
    assert not any(bool(other.any()) for other in others)


def test_a_monitor_removed_while_captured_keeps_what_it_had() -> None:
    training = Training(deep(3), NAME)
    monitor = fastcheck.install(training.model)
    training.warm_up()
    before = len(monitor.records())

    def step() -> None:
        training.backward()
        monitor.remove()
        training.optimizer.step()

    training.capture(step)
    training.run(data(2))
    assert len(monitor.records()) == before
    assert monitor.step_index == WARM_UP - 1
    assert f"{WARM_UP} steps, {before} records" in monitor.summary()


def test_a_capture_leaves_no_hook_on_a_leaf() -> None:
    """A batch that requires a gradient would gather one with each capture."""
    training = Training(deep(2), NAME)
    training.x.requires_grad_()
    monitor = fastcheck.install(training.model)

    def backward() -> None:
        training.model(training.x).square().mean().backward()
        assert training.x._backward_hooks

    for _ in range(WARM_UP):
        training.step()
    monitor.flush()
    before = len(training.x._backward_hooks or ())
    training.capture(backward)
    assert len(training.x._backward_hooks or ()) == before


def test_a_graph_that_is_gone_takes_its_memory_along() -> None:
    training = Training(deep(2), NAME)
    monitor = fastcheck.install(training.model, overflow_nums=-1, stop=fastcheck.Stop(max_lag=None))
    training.warm_up()
    training.capture()
    graph = weakref.ref(training.graph)
    steps = data(3, 2)
    with fake.held(fake.default_stream()):
        for x in steps:
            training.x.copy_(x)
            training.graph.replay()
        training.graph = None
        gc.collect()
        assert graph() is None
    monitor.flush()
    assert set(monitor.records()["step"]) == set(range(WARM_UP + 3))
    assert {e.step for e in monitor.events} == {WARM_UP + 2}
    assert not monitor._core.hooks.graphs._graphs


def test_a_graph_is_captured_again() -> None:
    training = Training(deep(2), NAME)
    monitor = fastcheck.install(training.model)
    training.warm_up()
    graph = training.capture()
    training.run(data(2))
    fake.synchronize()
    graph.reset()
    training.run(data(1), training.step)
    fake.synchronize()
    with fake.stream(training.stream), graph:
        training.step()
    training.run(data(2))
    monitor.flush()
    counts = np.bincount(of_replays(monitor)["step"])
    assert len(set(counts[1:])) == 1
    assert len(counts) == WARM_UP + 5
    assert not any("replay" in note for note in notes_of(monitor._core))


def test_a_stop_is_not_raised_by_the_capture_of_something_else() -> None:
    training = Training(deep(2), NAME)
    monitor = fastcheck.install(training.model)
    training.warm_up()
    training.run(data(1, 0), training.step)
    x = torch.ones(4, device=NAME)
    training.capture(lambda: x.add_(1))
    training.graph.replay()
    assert x.tolist() == [2.0] * 4
    assert stopped(monitor.flush).step == WARM_UP


def test_an_error_within_fastcheck_ends_neither_capture_nor_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = Training(deep(2), NAME)
    monitor = fastcheck.install(training.model)
    training.warm_up()

    def fails(self: Any) -> None:
        raise ZeroDivisionError("within")

    monkeypatch.setattr(graph_slots.GraphSlots, "end_capture", fails)
    with pytest.warns(fastcheck.FastcheckWarning, match="captured graphs: ZeroDivisionError"):
        training.capture()
    losses = training.run(data(3))
    assert all(bool(loss.isfinite()) for loss in losses)
    monitor.remove()


def test_kernels_that_can_t_be_captured_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_of_type", lambda kind, index: portable_backend(kind))
    training = Training(deep(2), NAME)
    monitor = fastcheck.install(training.model)
    training.warm_up()
    training.stream = fake.Stream()  # on which nothing has been read
    training.capture()
    losses = training.run(data(3))
    assert all(bool(loss.isfinite()) for loss in losses)
    training.run(data(1), training.step)
    monitor.flush()
    assert set(monitor.records()["step"]) == set(range(WARM_UP + 1))
    said_so = " ".join(monitor.summary().split())
    assert "only the CUDA kernels can be captured, not the portable kernels" in said_so


def test_op_level_leaves_a_capture_alone(op_observer: None) -> None:
    training = Training(deep(2), NAME)
    monitor = fastcheck.install(training.model, level="op", sync="call")
    training.warm_up()
    training.capture()
    monitor.flush()
    before = len(monitor.records())
    for _ in range(2):
        training.graph.replay()
    monitor.flush()
    assert len(monitor.records()) == before > 0
    assert "nothing that is captured in a graph is read" in monitor.summary()
    monitor.remove()


def test_torch_is_as_it_was_when_no_monitor_is_left() -> None:
    # Models of other tests may still be there, and observed.
    for follower in graphs_module.followers:
        graphs_module.followers.disconnect(follower)
    graph: Any = torch.accelerator.Graph
    before = {name: vars(graph)[name] for name in ("capture_begin", "capture_end", "replay")}
    monitor = fastcheck.install(nn.Linear(2, 2))
    assert all(vars(graph)[name] is not method for name, method in before.items())
    monitor.remove()
    assert all(vars(graph)[name] is method for name, method in before.items())
