"""Tests of causes: which batch an event names, what a batch that comes again shows, and what was
changed before.
"""

from __future__ import annotations

from typing import Any

import pytest

from support.watched import Run

INPUT, FIRST = 0, 1


def run_of(names: Any) -> Run:
    run = Run()
    run.watcher.causes._batch_of = names
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
    assert run.steps(steps) == []


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
    assert ("the batch also came with the loss_spike of step 100" in str(second)) is (
        cause == "data"
    )


@pytest.mark.parametrize("after", [0, 60, 70])
def test_replicas_that_differ_explain_what_comes_after_them(after: int) -> None:
    run = run_of(lambda step: None)
    run.watcher.causes.note_fault(99)
    run.steps(after)
    events = run.step({FIRST: 3e4}, loss=9.0, gradient_norm=30.0)
    causes = {one.kind: one.cause for one in events}
    expected = "hardware" if after < 65 else "layer"
    for kind in ("loss_spike", "gradient_spike", "explosion"):
        assert causes[kind] == expected
    texts = [one.text for one in events if one.kind == "loss_spike"]
    assert ("at step 99" in texts[0]) is (expected == "hardware")


def test_one_name_for_all_steps_shows_nothing() -> None:
    run = run_of(lambda step: "train")
    run.step({FIRST: 8.0}, loss=4.0, gradient_norm=1.0)
    (event,) = run.step({FIRST: 8.0}, loss=5.0, gradient_norm=90.0)
    assert (event.kind, event.cause) == ("gradient_spike", "layer")


def test_a_batch_that_came_without_a_spike_in_between_shows_nothing() -> None:
    run = run_of(lambda step: step % 35)
    run.step({FIRST: 8.0}, loss=4.0)
    later(run, 69)
    (second,) = (e for e in run.step({FIRST: 8.0}, loss=4.0) if e.kind == "loss_spike")
    assert second.cause == "layer"


class TestWhatWasChanged:
    def spike(self, run: Run) -> Any:
        return next(one for one in run.step({FIRST: 8.0}, loss=9.0) if one.kind == "loss_spike")

    @pytest.mark.parametrize(("later", "is_named"), [(3, True), (70, False)])
    def test_a_learning_rate_that_was_raised(self, later: int, is_named: bool) -> None:
        run = run_of(lambda step: None)
        assert run.steps(later, learning_rate=0.1)[0] == "settings"
        event = next(
            one
            for one in run.step({FIRST: 8.0}, loss=9.0, learning_rate=0.1)
            if one.kind == "loss_spike"
        )
        text = "the learning rate was changed from 0.001 to 0.1 at step 100"
        assert (text in event.text) is is_named
        assert event.cause == ("optimizer" if is_named else "layer")

    def test_of_the_steps_of_a_warm_up_the_largest_is_named(self) -> None:
        run = run_of(lambda step: None)
        for rate in (0.002, 0.2, 0.5):
            run.step(learning_rate=rate)
        events = run.step({FIRST: 8.0}, loss=9.0, learning_rate=0.5)
        (event,) = (one for one in events if one.kind == "loss_spike")
        assert event.text.count("the learning rate was changed") == 1
        assert "the learning rate was changed from 0.002 to 0.2 at step 101" in event.text

    def test_one_that_drops_is_named_and_is_no_cause(self) -> None:
        run = run_of(lambda step: None)
        assert run.steps(3, learning_rate=0.0001) == []
        events = run.step({FIRST: 8.0}, loss=9.0, learning_rate=0.0001)
        (event,) = (one for one in events if one.kind == "loss_spike")
        assert "the learning rate was changed from 0.001 to 0.0001 at step 100" in event.text
        assert event.cause == "layer"

    def test_the_steps_of_a_schedule_are_not_named(self) -> None:
        run = run_of(lambda step: None)
        for step in range(20):
            assert run.steps(1, learning_rate=0.001 * (1 + step / 5)) == []
        events = run.step({FIRST: 8.0}, loss=9.0, learning_rate=0.0048)
        assert all("learning rate" not in one.text for one in events) and len(events) == 1

    @pytest.mark.parametrize(("after", "cause"), [(100.0, "optimizer"), (0.01, "layer")])
    def test_the_threshold_of_clipping(self, after: float, cause: str) -> None:
        run = run_of(lambda step: None)
        run.watcher.setting("clipping.threshold", 1.0, after)
        assert run.steps(1) == ["settings"]
        event = self.spike(run)
        assert f"clipping.threshold was changed from 1 to {after:g} at step 100" in event.text
        assert event.cause == cause

    def test_the_size_of_the_batch(self) -> None:
        run = run_of(lambda step: None)
        small = {INPUT: {"numel": 32, "abs_sum": 25.0, "sum_sq": 32.0}}
        assert run.steps(2, small) == []
        event = next(
            one for one in run.step({**small, FIRST: 8.0}, loss=9.0) if one.kind == "loss_spike"
        )
        text = "the number of elements of the input was changed from 1024 to 32 at step 100"
        assert text in event.text

    def test_one_that_is_another_in_each_step_is_not_named(self) -> None:
        run = Run()
        for step in range(101):
            numel = 1024 >> step % 3
            run.step({INPUT: {"numel": numel, "sum_sq": float(numel)}})
        assert "elements of the input" not in self.spike(run).text
