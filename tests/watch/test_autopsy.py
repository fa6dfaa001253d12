"""Tests of the autopsy: which batch an event names, and what a batch that comes again shows."""

from __future__ import annotations

from typing import Any

import pytest

from support.watched import Run

FIRST, SECOND_WEIGHT = 1, 5


def run_of(names: Any) -> Run:
    run = Run()
    run.watcher.autopsy.batch_of = names
    assert run.steps(100) == []
    return run


def test_the_batch_is_that_of_the_first_movers_step() -> None:
    run = run_of(lambda step: f"row {step}")
    run.steps(1, {FIRST: 8.0})
    (event,) = (e for e in run.step({FIRST: 8.0}, loss=4.0) if e.kind == "loss_spike")
    assert event.first_mover is not None and event.first_mover.step == 100
    assert event.batch == "row 100"
    assert str(event).endswith("; batch row 100")


def test_without_a_first_mover_it_is_that_of_the_event() -> None:
    run = run_of(lambda step: step)
    (event,) = run.step({0: 100.0})
    assert (event.kind, event.batch) == ("batch", 100)


def later(run: Run, steps: int) -> None:
    assert set(run.steps(steps)) <= {"shift"}


@pytest.mark.parametrize(
    ("period", "cause"), [(70, "data"), (71, "layer")], ids=["the same batch", "another"]
)
def test_a_batch_that_comes_again_with_a_spike_is_to_blame(period: int, cause: str) -> None:
    run = run_of(lambda step: step % period)
    (first,) = (e for e in run.step({FIRST: 8.0}, loss=4.0) if e.kind == "loss_spike")
    assert first.cause == "layer"
    later(run, 69)
    (second,) = (e for e in run.step({FIRST: 8.0}, loss=4.0) if e.kind == "loss_spike")
    assert second.cause == cause
    assert ("the batch came with the loss_spike of step 100 too" in str(second)) is (
        cause == "data"
    )


@pytest.mark.parametrize(
    ("found", "cause"), [("replicas", "hardware"), ("hardware", "hardware"), ("program", "layer")]
)
@pytest.mark.parametrize("after", [0, 60, 70])
def test_a_fault_of_the_machine_explains_what_comes_after_it(
    found: str, cause: str, after: int
) -> None:
    run = run_of(lambda step: None)
    if found == "replicas":
        run.watcher.replicas_differ(99, "weights differ")
    else:
        run.watcher.rerun_done(99, "run again", found)
    run.steps(after)
    events = run.step({FIRST: 3e4}, loss=9.0, gradient_norm=30.0)
    causes = {one.kind: one.cause for one in events}
    expected = cause if after < 65 else "layer"
    for kind in ("loss_spike", "gradient_spike", "explosion"):
        assert causes[kind] == expected
    texts = [one.text for one in events if one.kind == "loss_spike"]
    assert ("at step 99" in texts[0]) is (expected == "hardware")


def test_one_name_for_all_steps_shows_nothing() -> None:
    run = run_of(lambda step: "train")
    run.step({FIRST: 8.0}, loss=4.0)
    later(run, 69)
    (second,) = (e for e in run.step({FIRST: 8.0}, loss=4.0) if e.kind == "loss_spike")
    assert second.cause == "layer"


def test_a_batch_that_came_without_a_spike_in_between_shows_nothing() -> None:
    run = run_of(lambda step: step % 35)
    run.step({FIRST: 8.0}, loss=4.0)
    later(run, 69)
    (second,) = (e for e in run.step({FIRST: 8.0}, loss=4.0) if e.kind == "loss_spike")
    assert second.cause == "layer"
