"""install() with captured graphs, on the fake accelerator with the CUDA kernels: each replay gives
the records, verdicts and stops of the same step without a graph.
"""

from __future__ import annotations

import functools
import time
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.monitor.session import drain as drain_module
from fastcheck.monitor.showing import notes_of
from fastcheck.record.format import Depth
from fastcheck.ring import graph_slots
from support.devices import graphs_on_fake
from support.devices.graphs_on_fake import NAME, data, fake
from support.programs.graphs import (
    WARM_UP,
    Training,
    assert_records_what_is_there,
    guarded,
    of_replays,
    said,
)
from support.programs.stalled import STEPS, Frozen
from support.programs.stats_every import whole_steps
from support.programs.training import Apply, Net, change_gradient, deep, stopped, where

pytestmark = [pytest.mark.fake_hooks, *graphs_on_fake.marks]


def trained(
    steps: list[torch.Tensor], is_captured: bool, **options: Any
) -> tuple[Any, list[float]]:
    """A run of whole steps, in a graph or not: its monitor, flushed, and its losses."""
    torch.manual_seed(0)
    training = Training(Net(), NAME, guarded)
    monitor = fastcheck.install(training.model, log=fastcheck.Log(None, history=1000), **options)
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
    here, expected = trained(
        steps, False, overflow_nums=-1, stop=fastcheck.Stop(protect_weights=True)
    )
    there, losses = trained(
        steps, True, overflow_nums=-1, stop=fastcheck.Stop(protect_weights=True)
    )
    assert np.array_equal(losses, expected, equal_nan=True)
    assert len(said(there)) == len(said(here)) > 100 * 20
    assert said(there) == said(here)
    assert np.all(np.diff(there.records()["seq"]) > 0)
    assert [(e.step, *where(e), e.reason) for e in there.events] == [
        (e.step, *where(e), e.reason) for e in here.events
    ]
    assert {e.step for e in there.events} == {7 + WARM_UP, 8 + WARM_UP, 50 + WARM_UP}
    assert there.event_count == here.event_count == 3
    assert not any("lost" in note or "replay" in note for note in notes_of(there._core))


def test_replays_leave_the_cpus_records_of_what_they_computed() -> None:
    training = Training(Net(), NAME, guarded)
    options: Any = {
        "overflow_nums": -1,
        "log": fastcheck.Log(None, history=200),
        "stop": fastcheck.Stop(protect_weights=True),
    }
    monitor = fastcheck.install(training.model, **options)
    training.warm_up()
    assert_records_what_is_there(training, monitor, 30)


def test_many_records_need_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_slots, "BLOCK_SLOTS", 8)
    training = Training(deep(4), NAME, guarded)
    monitor = fastcheck.install(
        training.model, overflow_nums=-1, stop=fastcheck.Stop(protect_weights=True)
    )
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
        training.model.tail.function = lambda x: change_gradient(x, lambda g: g + word)
    monitor = fastcheck.install(
        training.model, overflow_nums=-1, stop=fastcheck.Stop(protect_weights=True)
    )
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


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_verdicts_within_modules_are_those_of_the_step(place: str) -> None:
    """What the modules around a fault are blamed for goes by which call was within which."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.hole, self.last = nn.Linear(8, 8), Apply(), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            y = y + word if place == "forward" else change_gradient(y, lambda g: g + word)
            return self.last(self.hole(y)) * 1

    def run(is_captured: bool) -> Any:
        torch.manual_seed(0)
        blocks = nn.Sequential(Block(), nn.Tanh())
        training = Training(nn.Sequential(nn.Linear(8, 8), blocks, nn.Linear(8, 8)), NAME)
        monitor = fastcheck.install(training.model, overflow_nums=-1)
        training.warm_up()
        if is_captured:
            training.capture()
        for index, x in enumerate(data(4)):
            word.fill_(float("inf") if index == 2 else 0.0)
            training.run([x], None if is_captured else training.step)
        monitor.flush()
        return [(e.step, *where(e), e.counted, e.reason) for e in monitor.events]

    word = torch.zeros((), device=NAME)
    here, there = run(False), run(True)
    assert there == here
    assert WARM_UP + 2 in {step for step, *_ in here}


def test_the_evidence_for_a_gradient_is_that_of_the_step() -> None:
    """The gradients that the blamed module was given, its inputs and its weights."""

    def run(is_captured: bool) -> Any:
        torch.manual_seed(0)
        word = torch.zeros((), device=NAME)
        training = Training(deep(3), NAME)
        training.model.layer1.register_full_backward_hook(
            lambda module, of_inputs, of_outputs: (of_inputs[0] + word,)
        )
        fastcheck.install(training.model, sync="step")
        training.warm_up()
        if is_captured:
            training.capture()

        def train() -> None:
            for index, x in enumerate(data(5)):
                word.fill_(float("inf") if index == 3 else 0.0)
                training.run([x], None if is_captured else training.step)

        stop = stopped(train)
        found = [(str(site), record.tobytes()[:112]) for site, record in stop.report.inputs]
        return where(stop.culprit), stop.step, found

    here, there = run(False), run(True)
    assert there == here
    assert any("gradient of output" in site for site, _ in here[2])


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
    monitor = fastcheck.install(training.model, stop=fastcheck.Stop(max_lag=None))
    training.warm_up()
    training.capture()
    steps = data(4)
    before = fake.counters()
    for x in steps:
        training.x.copy_(x)
        training.graph.replay()
    done = fake.counters() - before
    monitor.flush()
    assert set(monitor.records()["step"]) == set(range(WARM_UP + 4))
    assert done.synchronisations == done["blocking_copy"] == 0
    assert done["alloc_below_cache"] == done["pinned_alloc"] == 0
    # The copy of the batch, and those of the slots: one aside and one to the host.
    assert (done["kernel"], done["graph_launch"], done["device_copy"]) == (4 * 4, 4, 2 * 4)


def test_a_host_that_is_far_ahead_loses_records_and_no_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(graph_slots, "_MAX_BYTES", 0)
    monkeypatch.setattr(graph_slots, "_FIRST_SNAPSHOTS", 2)  # replays on their way
    training = Training(deep(3), NAME, guarded)
    options: Any = {"overflow_nums": -1, "stop": fastcheck.Stop(max_lag=None, protect_weights=True)}
    monitor = fastcheck.install(training.model, **options)
    training.warm_up()
    training.capture()
    steps = data(8, 6)
    monitor.flush()
    per_step = sum(of_replays(monitor)["step"] == 1)
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
        ({"filter": fastcheck.Filter(steps=range(4, 6))}, {4, 5}),
    ):
        training = Training(deep(2), NAME)
        monitor = fastcheck.install(training.model, **options)  # type: ignore[arg-type]  # options of several types
        training.warm_up()
        training.capture()
        training.run(data(6))
        monitor.flush()
        assert set(monitor.records()["step"]) == wanted
        assert monitor.step_index == 7
        monitor.remove()


def test_the_kernels_of_a_replay_that_is_left_out_read_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their slots keep what the last replay that was read has written."""
    slots: list[graph_slots.GraphSlots] = []
    start = graph_slots.GraphSlots.start
    monkeypatch.setattr(
        graph_slots.GraphSlots, "start", lambda self: (slots.append(self), start(self))
    )
    training = Training(deep(2), NAME)
    monitor = fastcheck.install(training.model, every=3, log=fastcheck.Log(None, history=100))
    training.warm_up()
    training.capture()
    written: dict[int, torch.Tensor] = {}
    for x in data(8):
        training.run([x])
        written[monitor.step_index] = torch.cat(slots[0].pieces())[1:].cpu()
    assert sorted(written) == list(range(2, 10))
    for first in (3, 6):
        assert torch.equal(written[first], written[first + 1])
        assert torch.equal(written[first], written[first + 2])
        assert not torch.equal(written[first], written[first + 3])


@pytest.mark.parametrize("record", ["stats", "full"])
def test_replays_between_have_the_counts_alone(record: str) -> None:
    """With stats_every=, of one capture: the records of the same steps without a graph, and none of
    the sums that the replay before has left.
    """
    options: dict[str, Any] = {"stats_every": 3, "record": record}
    here, expected = trained(data(30), False, **options)
    there, losses = trained(data(30), True, **options)
    assert losses == expected
    assert said(there) == said(here)
    assert whole_steps(there) == set(range(0, 30 + WARM_UP, 3))
    counted = there.records()["depth"] == Depth.HEALTH
    assert not there.records()["sum"][counted].any()


def test_a_replay_that_is_only_counted_is_stopped() -> None:
    training = Training(deep(3), NAME)
    monitor = fastcheck.install(training.model, stats_every=10, sync="step")
    training.warm_up()
    training.capture()
    stop = stopped(lambda: training.run(data(20, 9)))
    assert (stop.step, where(stop.culprit)) == (9 + WARM_UP, ("", "input", "input[0]", "arrived"))
    assert stop.culprit.record["depth"] == Depth.HEALTH
    assert whole_steps(monitor) == {0, 10}


@pytest.mark.parametrize("stats_every", [1, 3])
def test_a_graph_that_begins_in_a_step_that_is_counted(stats_every: int) -> None:
    """Of what the capture was told: the depth of each replay is that of its own step."""
    training = Training(deep(2), NAME)
    monitor = fastcheck.install(
        training.model, stats_every=stats_every, log=fastcheck.Log(None, history=100)
    )
    training.warm_up()
    training.run(data(2), training.step)
    training.capture()
    training.run(data(6))
    monitor.flush()
    steps = range(2 + WARM_UP + 6)
    assert whole_steps(monitor) == set(steps[::stats_every])


class Rescaled(nn.Module):
    """Writes to what a layer has returned, if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.writes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.embed(x)
        if self.writes:
            y.mul_(2)
        out: torch.Tensor = self.head(y.relu())
        return out


def test_small_tensors_of_a_graph_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one launch for each pass, and one for each of what is read at once and of the optimizer's
    lists.
    """
    launches: list[int] = []
    observe_list = graph_slots.GraphSlots.observe_list

    def counted(self: Any, tensors: Any, identities: Any) -> None:
        launches.append(len(tensors))
        observe_list(self, tensors, identities)

    monkeypatch.setattr(graph_slots.GraphSlots, "observe_list", counted)
    training = Training(deep(6), NAME)
    fastcheck.install(training.model)
    training.warm_up()
    training.capture()
    assert sum(launches) > 40
    assert len(launches) <= 6


def test_a_small_tensor_that_is_overwritten_in_a_graph_alone_leaves_no_record() -> None:
    """In the warm-up nothing was written to it, so it may wait in the capture."""
    training = Training(Rescaled(), NAME)
    monitor = fastcheck.install(training.model, log=fastcheck.Log(None, history=100))
    training.warm_up()
    training.model.writes = True
    training.capture()
    training.run(data(3))
    monitor.flush()
    embeds = [
        int(record["step"])
        for record in monitor.records()
        if (site := monitor.sites[int(record["site"])]).module == "embed" and site.role == "output"
    ]
    assert embeds == list(range(WARM_UP))
    assert "small tensors that left no record: 3, overwritten" in str(monitor.summary())


def test_what_a_loop_writes_to_after_a_forward_was_read_before() -> None:
    """As in eager mode, where nothing waits beyond the end of a pass."""

    def run(is_captured: bool) -> list[Any]:
        torch.manual_seed(0)
        training = Training(Net(), NAME)

        def step() -> None:
            training.optimizer.zero_grad()
            loss = training.model(training.x).mul_(0.5).square().mean()
            loss.backward()
            training.loss.copy_(loss.detach())
            training.optimizer.step()

        monitor = fastcheck.install(training.model, log=fastcheck.Log(None, history=100))
        training.warm_up(step)
        if is_captured:
            training.capture(step)
        training.run(data(3), None if is_captured else step)
        monitor.flush()
        assert "left no record" not in str(monitor.summary())
        return said(monitor)

    assert run(True) == run(False)


def test_what_another_stream_of_a_capture_holds_is_read_at_once() -> None:
    """A launch on it after the streams were joined would end the capture in failure."""
    training = Training(Net(), NAME)
    monitor = fastcheck.install(training.model)
    training.warm_up()
    ring = next(iter(monitor._session.rings.of.values()))
    first, other = fake.Stream(), fake.Stream()
    slots = ring.new_graph_slots(first, lambda tensor, site: True)
    identity = (0, 0, 0, 0, 0, 0, 0, 3)
    with fake.stream(other):
        slots.observe(training.x, identity)
        assert len(slots.identities) == 1
    with fake.stream(first):
        slots.observe(training.x, identity)
        assert len(slots.identities) == 1
    slots.end_capture()
    assert len(slots.identities) == 2


def test_a_weight_that_does_not_move_is_said_of_replays() -> None:
    """Healthy replays are examined too: the same warnings as for steps."""
    model = Net().to(NAME)
    frozen = functools.partial(Frozen, out=[model.head.weight], lr=0.01)
    training = Training(model, NAME, frozen)
    monitor = fastcheck.install(training.model)
    training.warm_up()
    training.capture()
    with pytest.warns(fastcheck.FastcheckWarning, match="don't move: head.weight kept"):
        training.run(data(STEPS))
        monitor.flush()


def test_a_buffer_that_each_replay_writes_to_was_never_constant() -> None:
    """It held the same numbers for as long as what it is multiplied with was 1."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.factor = nn.Linear(8, 4), torch.ones((), device=NAME)
            self.register_buffer("mask", torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mask.mul_(self.factor)
            return self.linear(x) * self.mask

    training = Training(Scaled(), NAME)
    monitor = fastcheck.install(training.model)
    training.warm_up()
    training.capture()
    training.run(data(STEPS))
    training.model.factor.fill_(0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error", fastcheck.FastcheckWarning)
        training.run(data(2))
        monitor.flush()
    assert float(training.model.mask[0]) == 0.25


def test_loss_scaling_is_captured_with_its_decisions() -> None:
    """A GradScaler and a fused optimizer decide on the device whether an update is skipped."""

    def run(is_captured: bool) -> Any:
        torch.manual_seed(0)
        training = Training(Net(), NAME, guarded)
        monitor = fastcheck.install(training.model, overflow_nums=-1)
        scaler = torch.amp.GradScaler(NAME, init_scale=2.0**120)

        def step() -> None:
            training.optimizer.zero_grad()
            loss = training.model(training.x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(training.optimizer)
            scaler.update()

        training.warm_up(step)
        if is_captured:
            training.capture(step)
        steps = data(6)
        steps[3].mul_(1000)  # too large for its gradients, times the scale
        training.run(steps, None if is_captured else step)
        monitor.flush()
        return monitor

    here, there = run(False), run(True)
    assert said(there) == said(here)
    told = [(e.step, *where(e), e.counted) for e in here.events]
    assert [(e.step, *where(e), e.counted) for e in there.events] == told
    assert "scaled" in {each[4] for each in told}


@pytest.mark.parametrize("protect_weights", [False, True])
def test_a_stop_says_whether_the_update_was_applied(protect_weights: bool) -> None:
    """The host can't hold it back; ``protect_weights`` can."""
    training = Training(deep(3), NAME, guarded)
    fastcheck.install(
        training.model, sync="step", stop=fastcheck.Stop(protect_weights=protect_weights)
    )
    training.warm_up()
    training.capture()
    stop = stopped(lambda: training.run(data(6, 3)))
    are_intact = all(bool(p.isfinite().all()) for p in training.model.parameters())
    assert are_intact == protect_weights
    assert ("No optimizer has updated a weight in this step." in str(stop)) == are_intact


def test_a_stop_says_the_loss_scale_of_the_capture() -> None:
    training = Training(deep(3), NAME, guarded)
    fastcheck.install(training.model)
    scaler = torch.amp.GradScaler(NAME, init_scale=512.0, growth_interval=10**6)

    def step() -> None:
        training.optimizer.zero_grad()
        scaler.scale(training.model(training.x).square().mean()).backward()
        scaler.step(training.optimizer)
        scaler.update()

    training.warm_up(step)
    training.capture(step)
    stop = stopped(lambda: training.run(data(6, 3)))
    assert stop.report.scale == scaler.get_scale()


def test_nothing_asks_the_device_while_it_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was on its way when the capture began was taken in before."""
    monkeypatch.setattr(drain_module, "_POLL_SECONDS", 0.05)
    training = Training(deep(2), NAME)
    monitor = fastcheck.install(training.model, stop=fastcheck.Stop(max_lag=None))
    training.warm_up()

    def step() -> None:
        training.step()
        time.sleep(0.3)  # several looks of a drain that has something to look for

    for _ in range(3):
        training.step()
        training.capture(step)
        training.run(data(2))
    monitor.flush()
    assert set(monitor.records()["step"]) == set(range(WARM_UP + 9))
    assert not any("graph" in note for note in monitor._session.faults.notes)
