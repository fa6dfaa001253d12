"""Tests of the first mover where not every step is observed, and where each is."""

from __future__ import annotations

import pytest

from support.watched import TENSORS, Run

INPUT, FIRST, SECOND, FIRST_WEIGHT = 0, 1, 2, 4


def watched(every: int) -> Run:
    run = Run(every)
    assert run.steps(100) == []
    return run


@pytest.mark.parametrize("every", [1, 10])
def test_what_stays_outside_left_once(every: int) -> None:
    run = watched(every)
    events = [one for _ in range(20) for one in run.step({FIRST_WEIGHT: 8.0, FIRST: 8.0}, loss=9.0)]
    assert {one.kind for one in events} == {"loss_spike", "update"}
    events += run.step({FIRST_WEIGHT: 8.0, FIRST: 8.0}, loss=500.0)
    for event in events:
        assert event.cause == "optimizer", event.text
    for event in (one for one in events if one.kind == "loss_spike"):
        assert event.first_mover is not None and event.first_mover.step == 100 * every


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize(("between", "first"), [(2, "first"), (3, "second")])
def test_what_was_inside_for_three_readings_has_come_back(
    every: int, between: int, first: str
) -> None:
    run = watched(every)
    run.steps(1, {FIRST: 8.0})
    run.steps(between)
    events = run.step({FIRST: 8.0, SECOND: 8.0} if between == 2 else {SECOND: 8.0}, loss=9.0)
    (spike,) = (one for one in events if one.kind == "loss_spike")
    assert spike.first_mover is not None and spike.first_mover.site is not None
    assert spike.first_mover.site.module == first


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize(("later", "cause"), [(60, "optimizer"), (66, "layer")])
def test_a_raised_learning_rate_explains_as_many_readings(
    every: int, later: int, cause: str
) -> None:
    run = watched(every)
    run.steps(later, learning_rate=0.1)
    events = run.step({FIRST: 8.0}, loss=9.0, learning_rate=0.1)
    (spike,) = (one for one in events if one.kind == "loss_spike")
    assert spike.cause == cause


@pytest.mark.parametrize(("outlier", "cause"), [(5.0, "layer"), (50.0, "data")])
def test_an_outlier_of_random_data_is_no_first_mover(outlier: float, cause: str) -> None:
    """One element of the batch; the like of it has come before, with no spike."""
    run = watched(1)
    assert run.steps(1, {INPUT: {"max": 4.2}}) == []
    run.steps(20)
    events = run.step({INPUT: {"max": outlier}, FIRST: 8.0}, loss=9.0)
    (spike,) = (one for one in events if one.kind == "loss_spike")
    assert spike.cause == cause


def test_a_buffer_is_no_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.watched.TENSORS", [*TENSORS, ("second", "buffer", "optimizer")])
    run, buffer = watched(1), len(TENSORS)
    run.step({buffer: 8.0})
    events = run.step({buffer: 8.0}, loss=9.0)
    (spike,) = (one for one in events if one.kind == "loss_spike")
    assert spike.cause == "layer" and "; a buffer left its range first" in spike.text
