"""install() with captured graphs, on the fake accelerator: each replay leaves the records, the
verdicts and the stops that the same step would have left without a graph.

The kernels are those of csrc/cuda, over the host shim (tests/cuda_on_fake).
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fake_device
import fastcheck
from cuda_on_fake.checks import fresh_device
from fastcheck import _graph_slots, backends
from graphs import WARM_UP, Training, assert_records_what_is_there, new_graph, said
from on_device import deep
from training import Net, batches, stopped, where

fake: Any = fake_device.load()
NAME = fake.name()

pytestmark = pytest.mark.skipif(
    not hasattr(torch.accelerator, "Graph"), reason="this torch has no graphs of any device"
)


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, torch_threads: None) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    with fresh_device(monkeypatch):
        yield
        gc.collect()
        fake.empty_cache()


def data(count: int, *bad: int, seed: int = 3) -> list[torch.Tensor]:
    """Batches on the device, with a NaN in these."""
    found = list(batches(count, seed=seed))
    for index in bad:
        found[index][1, 2] = float("nan")
    there = [x.to(NAME) for x in found]
    fake.synchronize()
    return there


def guarded(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


def trained(
    steps: list[torch.Tensor], is_captured: bool, **options: Any
) -> tuple[Any, list[float]]:
    """A run of whole steps, in a graph or not: its monitor, flushed, and its losses."""
    torch.manual_seed(0)
    training = Training(Net(), NAME, guarded)
    monitor = fastcheck.install(training.model, history=1000, **options)
    training.warm_up()
    if is_captured:
        training.capture()
    losses = training.run(steps, None if is_captured else training.step)
    monitor.flush()
    return monitor, [loss.item() for loss in losses]


# --- a whole step ---------------------------------------------------------------------------------


def test_100_replays_leave_the_records_of_100_steps() -> None:
    """Every byte of every record, in their order; a NaN in three of them, and in no other."""
    steps = data(100, 7, 8, 50)
    here, expected = trained(steps, False, overflow_nums=-1, protect_weights=True)
    there, losses = trained(steps, True, overflow_nums=-1, protect_weights=True)
    assert np.array_equal(losses, expected, equal_nan=True)
    assert len(said(there)) == len(said(here)) > 100 * 20
    assert said(there) == said(here)
    assert np.all(np.diff(there.records()["seq"]) > 0)
    assert [(e.step, *where(e), e.reason) for e in there.events] == [
        (e.step, *where(e), e.reason) for e in here.events
    ]
    assert {e.step for e in there.events} == {7 + WARM_UP, 8 + WARM_UP, 50 + WARM_UP}
    assert there.event_count == here.event_count == 3
    assert not any("lost" in note or "replay" in note for note in there._notes())


def test_100_replays_leave_the_cpus_records_of_what_they_computed() -> None:
    training = Training(Net(), NAME, guarded)
    options: Any = {"overflow_nums": -1, "history": 200, "protect_weights": True}
    monitor = fastcheck.install(training.model, **options)
    training.warm_up()
    assert_records_what_is_there(training, monitor, 100)


def test_many_records_need_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_graph_slots, "BLOCK_SLOTS", 8)
    training = Training(deep(4), NAME, guarded)
    monitor = fastcheck.install(training.model, overflow_nums=-1, protect_weights=True)
    training.warm_up()
    assert_records_what_is_there(training, monitor, 6)


@pytest.mark.parametrize("sync", ["never", "step", "call"])
def test_a_stop_names_the_replay_that_was_bad(sync: Any) -> None:
    training = Training(deep(3), NAME)
    fastcheck.install(training.model, sync=sync)
    training.warm_up()
    training.capture()
    steps = data(20, 7)
    stop = stopped(lambda: training.run(steps))
    assert (stop.step, where(stop.culprit)) == (7 + WARM_UP, ("", "input", "input[0]", "arrived"))
    assert stop.culprit.record["nan_count"] == 1
    assert f"step {7 + WARM_UP}" in str(stop)


@pytest.mark.parametrize("place", ["output", "gradient"])
def test_the_module_and_the_direction_are_named(place: str) -> None:
    """What is captured makes it, from a word that changes."""
    word = torch.zeros((), device=NAME)
    training = Training(deep(3), NAME, guarded)
    if place == "output":
        training.model.tail.function = lambda x: x + word
    else:

        class Poisoned(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                return gradient + word

        training.model.tail.function = Poisoned.apply
    monitor = fastcheck.install(training.model, overflow_nums=-1, protect_weights=True)
    training.warm_up()
    training.capture()
    for index, x in enumerate(data(9)):
        word.fill_(float("inf") if index == 5 else 0.0)
        training.run([x])
    monitor.flush()
    counted = [event for event in monitor.events if event.counted]
    role = ("output", "origin") if place == "output" else ("grad_input", "origin")
    assert [(e.step, e.site.role, e.verdict.name.lower()) for e in counted] == [
        (5 + WARM_UP, *role)
    ]
    assert counted[0].site.module == "tail"
    assert all(bool(p.isfinite().all()) for p in training.model.parameters())


def test_training_is_not_touched() -> None:
    """Losses and weights are those of graphs without a monitor, bit for bit."""

    def run(is_observed: bool) -> list[Any]:
        torch.manual_seed(0)
        training = Training(Net(), NAME, guarded)
        if is_observed:
            fastcheck.install(training.model)
        training.warm_up()
        training.capture()
        losses = training.run(data(30))
        return [x.tolist() for x in (*losses, *training.model.parameters())]

    assert run(True) == run(False)


def test_replays_wait_for_nothing_and_allocate_nothing() -> None:
    training = Training(deep(6), NAME)
    monitor = fastcheck.install(training.model, max_lag=None)
    training.warm_up()
    training.capture()
    steps = data(6)
    training.run(steps)
    monitor.flush()
    fake.synchronize()
    before = fake.counters()
    for x in steps:
        training.x.copy_(x)
        training.graph.replay()
    done = fake.counters() - before
    assert done.synchronisations == done["blocking_copy"] == 0
    assert done["alloc_below_cache"] == done["pinned_alloc"] == 0
    # The copy of the batch, and those of the slots: one aside and one to the host.
    assert (done["kernel"], done["graph_launch"], done["device_copy"]) == (4 * 6, 6, 2 * 6)


def test_a_host_that_is_far_ahead_loses_records_and_no_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_graph_slots, "_MAX_BYTES", 0)  # two replays on their way
    training = Training(deep(3), NAME, guarded)
    options: Any = {"overflow_nums": -1, "max_lag": None, "protect_weights": True}
    monitor = fastcheck.install(training.model, **options)
    training.warm_up()
    training.capture()
    steps = data(8, 6)
    monitor.flush()
    per_step = sum(monitor.records()["step"] == 1)
    with fake.held():
        for x in steps:
            training.x.copy_(x)
            training.graph.replay()
    monitor.flush()
    kept = monitor.records()
    kept = kept[kept["step"] >= WARM_UP]
    assert set(kept["step"]) == {WARM_UP, WARM_UP + 1, WARM_UP + 6}
    assert sum(kept["step"] == WARM_UP) == per_step
    assert {e.step for e in monitor.events} == {WARM_UP + 6}
    assert where(monitor.events[0]) == ("", "input", "input[0]", "arrived")
    assert f"{6 * per_step:,} tensors found no slot" in monitor.summary()


def test_replays_that_nobody_saw_are_counted() -> None:
    training = Training(deep(2), NAME)
    monitor = fastcheck.install(training.model)
    training.warm_up()
    training.capture()
    steps = data(6)
    training.run(steps[:2])
    for _ in range(3):
        super(type(training.graph), training.graph).replay()
    training.run(steps[2:])
    monitor.flush()
    assert "3 replays of a graph left no record" in monitor.summary()
    assert set(monitor.records()["step"]) == set(range(WARM_UP + 6))


def test_every_and_steps_are_a_matter_of_the_replays() -> None:
    for options, wanted in (
        ({"every": 3}, {0, 3, 6}),
        ({"steps": range(4, 6)}, {4, 5}),
    ):
        training = Training(deep(2), NAME)
        monitor = fastcheck.install(training.model, **options)  # type: ignore[arg-type]
        training.warm_up()
        training.capture()
        training.run(data(6))
        monitor.flush()
        assert set(monitor.records()["step"]) == wanted
        assert monitor.step_index == 7
        monitor.remove()


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


# --- ends -----------------------------------------------------------------------------------------


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
            training.model.zero_grad()
            del graph
            training.graph = None
        training.run(data(4), training.step)
        monitor.flush()
        return monitor

    here, there = run(False), run(True)
    assert said(there) == said(here)
    assert not there._session.notes
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


def test_a_graph_that_is_gone_takes_its_memory_along() -> None:
    training = Training(deep(2), NAME)
    monitor = fastcheck.install(training.model, overflow_nums=-1, max_lag=None)
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
    assert not monitor._graphs._graphs


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
    counts = np.bincount(monitor.records()["step"])
    assert len(set(counts[1:])) == 1
    assert len(counts) == WARM_UP + 5
    assert not any("replay" in note for note in monitor._notes())


def test_an_error_within_fastcheck_ends_neither_capture_nor_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = Training(deep(2), NAME)
    monitor = fastcheck.install(training.model)
    training.warm_up()

    def fails(self: Any) -> None:
        raise ZeroDivisionError("within")

    monkeypatch.setattr(_graph_slots.GraphSlots, "seal", fails)
    with pytest.warns(fastcheck.FastcheckWarning, match="optimizer steps: ZeroDivisionError"):
        training.capture()
    losses = training.run(data(3))
    assert all(bool(loss.isfinite()) for loss in losses)
    monitor.remove()


def test_kernels_that_can_t_be_captured_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_of_type", lambda kind, index: backends._portable(kind))
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
    assert "only the CUDA kernels can be captured, not the portable ones" in said_so


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
    graph: Any = torch.accelerator.Graph
    before = {name: vars(graph)[name] for name in ("capture_begin", "capture_end", "replay")}
    monitor = fastcheck.install(nn.Linear(2, 2))
    assert all(vars(graph)[name] is not method for name, method in before.items())
    monitor.remove()
    assert all(vars(graph)[name] is method for name, method in before.items())
