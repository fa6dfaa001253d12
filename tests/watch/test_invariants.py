"""Tests of the invariants that records show, on records that no training has made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fastcheck.log.step_table import StepRow
from fastcheck.record.site import Site
from fastcheck.watch.invariant_numbers import Clipping
from support.watched import DTYPE_CODES, FIRST_WEIGHT, INPUT, TENSORS, Run


class Weights(Run):
    """A weight has a gradient, and its checksum is that of ``value``."""

    def __init__(self) -> None:
        super().__init__()
        self.gradient = self.sites.intern(
            Site("first", "Linear", "optimizer", "param_grad", 0, "weight")
        )

    def update(
        self, value: int, rms: float = 1.0, dtype: str = "float32", largest: float = 1.7, **row: Any
    ) -> list[str]:
        weight = {"checksum": value, "rms": 1.01, "max": largest, "dtype": DTYPE_CODES[dtype]}
        weight["min"] = -largest
        chunk = self.healthy({FIRST_WEIGHT: weight})
        gradient = chunk[FIRST_WEIGHT : FIRST_WEIGHT + 1].copy()
        gradient["site"], gradient["seq"] = self.gradient, self.count * 100 + len(TENSORS)
        gradient["sum_sq"] *= rms**2
        events = self.take([np.concatenate([chunk, gradient])], **row)
        return [event.text for event in events if event.kind == "invariant"]


def stood_still(run: Weights, steps: int = 60, **update: Any) -> list[str]:
    return [text for _ in range(steps) for text in run.update(1000, **update)]


def moved(steps: int = 30, **update: Any) -> Weights:
    run = Weights()
    assert not [text for step in range(steps) for text in run.update(step + 1, **update)]
    return run


def test_a_weight_that_stands_still_is_told_once() -> None:
    texts = stood_still(moved(), 200)
    assert len(texts) == 1
    assert "no bit of it has changed in 48 updates in a row, though it moved before" in texts[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_updates_may_be_smaller_than_the_spacing(dtype: str) -> None:
    (text,) = stood_still(moved(dtype=dtype), 200, dtype=dtype)
    assert f"updates may be smaller than the spacing of {dtype}" in text


@pytest.mark.parametrize(
    "update",
    [{"rms": 0.1}, {"learning_rate": 1e-5}, {"learning_rate": 0.0}, {"overflow": True}],
    ids=["small gradient", "small rate", "no rate", "skipped"],
)
def test_it_may_stand_still_where_no_update_was_due(update: dict[str, Any]) -> None:
    assert not stood_still(moved(), 100, **update)


@pytest.mark.parametrize("largest", [1.01, 1.2])
def test_a_weight_with_most_elements_at_a_bound_may_stand_still(largest: float) -> None:
    assert not stood_still(moved(), 100, largest=largest)


def test_a_weight_that_has_hardly_moved_may_stand_still() -> None:
    assert not stood_still(moved(10), 100)


def test_a_weight_that_moves_now_and_then_may_stand_still() -> None:
    run = moved()
    for step in range(60):
        assert not run.update(1000 + step // 2)
    assert not stood_still(run, 100)


def test_each_move_begins_the_count_anew() -> None:
    run = moved()
    for round_number in range(4):
        assert not stood_still(run, 40)
        run.update(2000 + round_number)


@pytest.mark.parametrize(("last", "is_told"), [(0.9e-9, True), (1.1e-9, False)])
def test_a_rate_far_below_the_largest_until_now(last: float, is_told: bool) -> None:
    run, texts = Weights(), []
    for step, rate in enumerate([1e-4, 1e-3, 1e-5, *[last] * 40]):
        texts += [(step, text) for text in run.update(step + 1, learning_rate=rate)]
    assert [step for step, _ in texts] == [22] * is_told
    assert all("millionth of its largest value until now, 0.001" in text for _, text in texts)


@pytest.mark.parametrize(("full", "tiny", "told_at"), [(30, 70, 93), (100, 99, 0), (100, 101, 199)])
def test_a_schedule_that_has_ended_long_ago(full: int, tiny: int, told_at: int) -> None:
    """In as many steps as it was larger, and 64 at least."""
    run, texts = Weights(), []
    for step, rate in enumerate([1e-3] * full + [1e-12] * tiny):
        texts += [(step, text) for text in run.update(step + 1, learning_rate=rate)]
    told = [(step, text) for step, text in texts if "hardly anything is learned" in text]
    assert [step for step, _ in told] == [told_at] * bool(told_at)
    assert all("Look at the schedule" in text for _, text in told)


def given(run: Run, **fields: Any) -> list[str]:
    return [e.text for e in run.step({INPUT: fields}) if e.kind == "invariant"]


@pytest.mark.parametrize("length", [2, 5])
def test_each_batch_comes_several_times_in_a_row(length: int) -> None:
    run = Run()
    texts = [t for k in range(20 * length) for t in given(run, checksum=1 + k // length)]
    assert len(texts) == 1 and f"each batch comes {length} times in a row" in texts[0]


def test_runs_of_changing_length_are_no_habit() -> None:
    run = Run()
    batches = [number for number in range(1, 60) for _ in range(1 + number % 3)]
    assert not [t for number in batches for t in given(run, checksum=number)]


def test_a_cycle_and_one_batch() -> None:
    texts = (
        [t for k in range(128) for t in given(run, checksum=1 + k % 11)] if (run := Run()) else []
    )
    assert len(texts) == 1 and "the batches repeat every 11 observed steps" in texts[0]
    run = Run()
    texts = [text for _ in range(128) for text in given(run, checksum=7)]
    assert len(texts) == 1 and "the first 64 observed steps" in texts[0]


def test_shuffled_epochs_are_no_cycle() -> None:
    run, random = Run(), np.random.default_rng(0)
    order = np.concatenate([random.permutation(11) for _ in range(20)]) + 1
    assert not [t for number in order for t in given(run, checksum=int(number))]


WHOLE = {"min": -100.0, "max": -100.0, "sum": -102400.0, "sum_sq": 1024e4, "abs_sum": 102400.0}


def test_labels_that_are_all_ignored() -> None:
    run = Run()
    texts = [t for _ in range(20) for t in given(run, dtype=DTYPE_CODES["int64"], **WHOLE)]
    assert len(texts) == 1 and "every label is -100" in texts[0]


def test_a_constant_input() -> None:
    """Floating point ones are common in small programs, zeros are not."""
    nothing = {
        "min": 0.0,
        "max": 0.0,
        "sum": 0.0,
        "sum_sq": 0.0,
        "abs_sum": 0.0,
        "zero_count": 1024,
    }
    ones = {"min": 1.0, "max": 1.0, "sum": 1024.0, "sum_sq": 1024.0, "abs_sum": 1024.0}
    run = Run()
    texts = [text for _ in range(20) for text in given(run, **nothing)]
    assert len(texts) == 1 and "all its elements are 0 in 10 steps in a row" in texts[0]
    run = Run()
    mask = {**nothing, "neginf_count": 496}
    assert not [text for _ in range(20) for text in given(run, **mask)]
    assert not [text for _ in range(20) for text in given(run, **ones)]
    texts = [text for _ in range(20) for text in given(run, dtype=DTYPE_CODES["int64"], **ones)]
    assert len(texts) == 1


def test_a_threshold_of_clipping_counts_from_its_step_on() -> None:
    """Steps are judged together, when a later threshold may be known already."""
    clipping = Clipping()
    clipping.noticed(2, 1.0)
    clipping.noticed(4, 5.0)
    nothing = (None, False, None, None, None)
    ratios = [clipping.of_step(10.0, StepRow(0, step, *nothing))[0] for step in range(1, 6)]
    assert ratios == [None, 10.0, 10.0, 2.0, 2.0]
