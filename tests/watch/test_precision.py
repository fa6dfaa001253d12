"""Tests of the cause "precision": a tensor loses precision before anything leaves its range."""

from __future__ import annotations

from typing import Any

import pytest

from fastcheck.watch.event import WatchEvent
from support.watched import DTYPE_CODES, FIRST, FIRST_WEIGHT, GRADIENT, INPUT, SCALED, SECOND, Run

HALF = {"dtype": DTYPE_CODES["float16"]}
NEAR = {**HALF, "rms": 12000.0}


def spike(run: Run, changed: dict[int, Any]) -> WatchEvent:
    return next(one for one in run.step(changed, loss=9.0) if one.kind == "loss_spike")


class TestNearTheEndOfItsRange:
    def test_what_was_always_there_explains_nothing(self) -> None:
        run, mask = Run(), {**HALF, "max": 0.0, "min": -60000.0, "rms": 1000.0}
        run.steps(100, {FIRST: mask})
        assert spike(run, {FIRST: mask, SECOND: 30.0}).cause == "layer"

    def test_what_came_there_before_the_first_mover_does(self) -> None:
        run = Run()
        run.steps(100, {FIRST: HALF})
        run.steps(5, {FIRST: NEAR})
        event = spike(run, {FIRST: NEAR, SECOND: 30.0})
        assert event.cause == "precision"
        assert "first (Linear) · forward · output came near the end of its dtype's" in event.text
        assert "range at step 100" in event.text

    def test_what_comes_there_after_it_does_not(self) -> None:
        run = Run()
        run.steps(100, {SECOND: HALF})
        run.steps(2, {FIRST: 8.0, SECOND: HALF})
        assert spike(run, {FIRST: 8.0, SECOND: NEAR}).cause == "layer"

    @pytest.mark.parametrize(
        ("place", "cause"), [(FIRST_WEIGHT, "optimizer"), (FIRST, "layer"), (GRADIENT, "precision")]
    )
    def test_within_a_step_its_place_counts(self, place: int, cause: str) -> None:
        run = Run()
        run.steps(100, {SECOND: {**HALF, "rms": 8000.0}})
        # Near the end, though not out of its own range.
        event = spike(run, {SECOND: {**HALF, "rms": 11000.0}, place: 30.0})
        assert event.cause == cause

    def test_a_batch_is_never_due_to_it(self) -> None:
        run = Run()
        run.steps(100, {FIRST: {**HALF, "rms": 8000.0}})
        near = {FIRST: {**HALF, "rms": 11000.0}}
        run.steps(5, near)
        assert spike(run, {INPUT: 30.0, **near}).cause == "data"

    @pytest.mark.parametrize(("later", "cause"), [(60, "precision"), (66, "layer")])
    def test_it_counts_for_64_steps(self, later: int, cause: str) -> None:
        run = Run()
        run.steps(100, {FIRST: HALF})
        run.steps(later, {FIRST: NEAR})
        assert spike(run, {FIRST: NEAR, SECOND: 30.0}).cause == cause

    def test_one_that_goes_there_now_and_then_explains_nothing(self) -> None:
        run = Run()
        for step in range(200):
            run.steps(1, {FIRST: {**HALF, "rms": 8000.0 if step % 8 else 11000.0}})
        assert spike(run, {FIRST: {**HALF, "rms": 11000.0}, SECOND: 30.0}).cause == "layer"

    def test_one_with_a_loss_scale_is_none(self) -> None:
        run, scaled = Run(), {**HALF, "flags": SCALED}
        run.steps(100, {GRADIENT: {**scaled, "rms": 8000.0}}, scale=1024.0)
        run.steps(5, {GRADIENT: {**scaled, "rms": 16000.0}}, scale=2048.0)
        near = {GRADIENT: {**scaled, "rms": 16000.0}, SECOND: 30.0}
        event = next(one for one in run.step(near, loss=9.0, scale=2048.0))
        assert event.cause == "layer"

    def test_an_integer_is_none(self) -> None:
        run, integer = Run(), {"dtype": DTYPE_CODES["int8"]}
        run.steps(100, {FIRST: {**integer, "rms": 10.0}})
        assert spike(run, {FIRST: {**integer, "rms": 25.0}, SECOND: 30.0}).cause == "layer"


class TestUnderflow:
    def test_it_has_the_cause_itself_and_explains_what_comes_after(self) -> None:
        run = Run()
        run.steps(80, {GRADIENT: {**HALF, "zero_count": 100}})
        zero = {GRADIENT: {**HALF, "zero_count": 1000, "subnormal_count": 20}}
        found = [one for _ in range(15) for one in run.step(zero)]
        assert [(one.kind, one.cause) for one in found] == [("precision", "precision")]
        event = spike(run, zero)
        assert event.cause == "precision" and "lost precision since step 80" in event.text

    def test_not_what_was_there_before(self) -> None:
        run = Run()
        run.steps(80, {GRADIENT: {**HALF, "zero_count": 100}})
        run.steps(3, {SECOND: 8.0, GRADIENT: {**HALF, "zero_count": 100}})
        zero = {SECOND: 8.0, GRADIENT: {**HALF, "zero_count": 1000, "subnormal_count": 20}}
        run.steps(12, zero)
        assert spike(run, zero).cause == "layer"

    def test_after_64_steps_it_is_forgotten(self) -> None:
        run = Run()
        run.steps(80, {GRADIENT: {**HALF, "zero_count": 100}})
        zero = {GRADIENT: {**HALF, "zero_count": 1000, "subnormal_count": 20}}
        run.steps(80, zero)
        assert spike(run, zero).cause == "loss"

    @pytest.mark.parametrize(
        ("place", "fields"),
        [
            (GRADIENT, {"subnormal_count": 900}),
            (SECOND, {"saturated_count": 3}),
        ],
    )
    def test_of_other_rules(self, place: int, fields: dict[str, int]) -> None:
        run = Run()
        run.steps(80, {place: HALF})
        found = [one for _ in range(15) for one in run.step({place: {**HALF, **fields}})]
        assert [(one.kind, one.cause) for one in found] == [("precision", "precision")]

    def test_a_dead_activation_has_none(self) -> None:
        run = Run()
        run.steps(80)
        found = [one for _ in range(60) for one in run.step({SECOND: {"zero_count": 1024}})]
        assert [(one.kind, one.cause) for one in found] == [("dead", "layer")] * 2
