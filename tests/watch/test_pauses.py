"""Tests of the pause after an event: how long it is, and what it holds back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fastcheck.record.format import RECORD_DTYPE
from fastcheck.record.site import Site
from fastcheck.watch.event import WatchEvent
from support.watched import DTYPE_CODES, Run, tensor


def test_the_pause_ends_though_what_it_holds_back_goes_on() -> None:
    run = Run()
    run.steps(100)
    for step in range(400):
        run.step(gradient_norm=50.0 if step % 20 == 0 else 1.0)
    steps = [event.step for event in run.watcher.events if event.kind == "gradient_spike"]
    assert steps == list(range(100, 500, 40))


def test_it_ends_for_warnings_too() -> None:
    """Three tensors, one after another, are cut to the largest number of their dtype."""
    run = Run()
    run.steps(100)
    for step in range(60):
        run.step({1 + at: {"saturated_count": 3} for at in range(step // 20 + 1)})
    found = [(one.step, one.is_warning) for one in run.watcher.events if one.kind == "precision"]
    assert found == [(109, True), (129, False), (149, True)]


class Layers(Run):
    """With so many activations beside those of a Run."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.places = [
            self.sites.intern(Site(f"layer{number}", "Linear", "forward", "output", 0, "output"))
            for number in range(count)
        ]

    def all_of_them(self, **fields: Any) -> list[WatchEvent]:
        records = np.zeros(len(self.places), RECORD_DTYPE)
        for name, value in tensor(**fields).items():
            records[name] = value
        records["site"], records["step"] = self.places, self.count
        return self.take([np.concatenate([self.healthy(), records])])


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("dead", {"rms": 0.0, "zero_count": 1024}),
        ("dead", {"sum": 1024.0, "max": 1.0, "min": 1.0}),
        ("precision", {"saturated_count": 3}),
    ],
)
@pytest.mark.parametrize(("count", "left"), [(1, 0), (4, 0), (300, 296)])
def test_tensors_that_are_stuck_in_one_step_are_one_event(
    kind: str, fields: dict[str, Any], count: int, left: int
) -> None:
    run = Layers(count)
    for _ in range(80):
        run.all_of_them()
    events = [one for _ in range(60) for one in run.all_of_them(**fields) if one.kind == kind]
    (event,) = (one for one in events if one.is_warning)
    assert event.site is not None and event.site.module == "layer0"
    assert ("layer1 (Linear) · forward" in event.text) is (count > 1)
    assert ("and 296 more tensors" in event.text) is (left > 0)
    assert len(event.text) < 800


def test_tensors_that_grow_to_the_end_of_their_range_are_one_event() -> None:
    run, events = Layers(20), []
    for step in range(80):
        half = {"dtype": DTYPE_CODES["float16"], "rms": 30.0 * 2 ** (step * 0.1)}
        events += [one for one in run.all_of_them(**half) if one.kind == "headroom"]
    (event,) = events
    assert event.interval is not None and "and 16 more tensors" in event.text


def test_a_tensor_that_dies_soon_after_another_is_not_left_out() -> None:
    run, dead = Run(), {"rms": 0.0, "zero_count": 1024}
    run.steps(100)
    run.steps(10, {1: dead})
    run.steps(60, {1: dead, 2: dead})
    found = [(one.step, one.is_warning) for one in run.watcher.events if one.kind == "dead"]
    # At once, and when it has lasted.
    assert found == [(102, False), (112, False), (149, True), (159, False)]
