"""Tests of robust ranges: what enters them, and what they are made of."""

from __future__ import annotations

import numpy as np
import pytest

from fastcheck.watch.bands import Bands

ONE = np.zeros(1, np.int64)
INSIDE, OUTSIDE = np.array([[False]]), np.array([[True]])


def filled(count: int, window: int = 64, **options: float) -> tuple[Bands, np.ndarray]:
    """A range of one signal of normal noise around 5, and its values."""
    bands = Bands(window, 16, options.get("least_spread", 0.01))
    bands.grow(1)
    values = np.random.default_rng(0).normal(5, 0.5, count)
    for value in values:
        bands.add(ONE, np.array([[value]]), INSIDE)
    return bands, values


def score(bands: Bands, value: float) -> float:
    return float(bands.scores(ONE, np.array([value]))[0])


def test_median_and_deviation_of_the_window() -> None:
    bands, values = filled(200)
    for _ in range(8):  # a signal's turn comes once in 16 steps: now in the 208th
        bands.add(ONE, np.array([[5.0]]), INSIDE)
    last = np.concatenate([values, np.full(8, 5.0)])[-64:]
    median = np.median(last)
    spread = 1.4826 * np.median(np.abs(last - median))
    assert np.isclose(bands.of["median"][0], median) and np.isclose(bands.of["spread"][0], spread)
    assert np.isclose(score(bands, 8.0), (8.0 - median) / spread)


def test_nothing_is_known_before_the_warm_up() -> None:
    bands, _ = filled(15)
    assert np.isnan(score(bands, 100.0))
    bands.add(ONE, np.array([[5.0]]), INSIDE)
    assert score(bands, 100.0) > 50


def test_values_outside_change_nothing() -> None:
    bands, _ = filled(200)
    before = score(bands, 9.0)
    for _ in range(31):
        bands.add(ONE, np.array([[1000.0]]), OUTSIDE)
    bands.add(ONE, np.array([[5.0]]), INSIDE)
    assert score(bands, 9.0) == before


def test_half_a_window_outside_is_a_new_level() -> None:
    bands, _ = filled(200)
    for _ in range(32):
        bands.add(ONE, np.array([[1000.0]]), OUTSIDE)
    assert np.isnan(score(bands, 5.0))
    for _ in range(16):
        bands.add(ONE, np.array([[1000.0]]), INSIDE)
    assert score(bands, 1000.0) == 0


def test_noise_around_a_constant_is_held_to_the_least_spread() -> None:
    bands = Bands(64, 16, 0.1)
    bands.grow(1)
    for _ in range(64):
        bands.add(ONE, np.array([[3.0]]), INSIDE)
    assert np.isclose(score(bands, 3.2), 2.0, rtol=1e-5)


def test_an_unknown_value_is_passed_over() -> None:
    bands, _ = filled(200)
    before = bands.of["count"][0]
    bands.add(ONE, np.array([[np.nan]]), INSIDE)
    assert bands.of["count"][0] == before and np.isnan(score(bands, np.nan))


@pytest.mark.parametrize("every", [1, 2, 16])
def test_a_signal_that_is_not_read_in_each_step_follows_its_values(every: int) -> None:
    bands = Bands(64, 16, 0.01)
    bands.grow(32)
    all_of_them, none = np.arange(32), np.zeros(0, np.int64)
    for step in range(200 * every):
        numbers = none if step % every else all_of_them
        level = float(step // every)
        bands.add(numbers, np.full((1, len(numbers)), level), np.zeros((1, len(numbers)), bool))
    # The medians of 64 values, the last of them at most 15 values old.
    medians = bands.of["median"][:32]
    assert medians.min() >= 199 - 15 - 32 and medians.max() <= 199 - 31
    assert len(set(medians.tolist())) == 16  # not all in one step


def test_signals_are_independent() -> None:
    bands = Bands(64, 16, 0.01)
    bands.grow(200)
    numbers = np.array([3, 150])
    for _ in range(40):
        bands.add(numbers, np.array([[1.0, 7.0]]), np.zeros((1, 2), bool))
    assert bands.scores(numbers, np.array([1.0, 7.0])).tolist() == [0.0, 0.0]
    assert np.isnan(bands.scores(np.array([4]), np.array([1.0])))[0]


@pytest.mark.parametrize("together", [2, 8, 40])
def test_steps_that_are_added_together_are_as_one_after_another(together: int) -> None:
    one_by_one, at_once = Bands(64, 16, 0.01), Bands(64, 16, 0.01)
    numbers, random = np.arange(40), np.random.default_rng(0)
    one_by_one.grow(40)
    at_once.grow(40)
    for _ in range(160 // together):
        values = random.normal(5, 1, (together, 40))
        values[random.random(values.shape) < 0.1] = np.nan
        outside = random.random(values.shape) < 0.1
        at_once.add(numbers, values, outside)
        for row, out in zip(values, outside):
            one_by_one.add(numbers, row[None], out[None])
    for bands in (one_by_one, at_once):
        bands._renew(numbers)
    for name in ("count", "rejected", "median", "spread", "highest"):
        assert np.array_equal(one_by_one.of[name][:40], at_once.of[name][:40])


def test_the_highest_is_that_of_the_window() -> None:
    bands = Bands(16, 8, 0.01)
    bands.grow(1)
    for value in [50.0] + [float(x) for x in range(31)]:
        bands.add(ONE, np.array([[value]]), INSIDE)
    assert bands.of["highest"][0] == 30


def test_signals_that_warm_up_at_different_steps_have_their_own_ranges() -> None:
    bands = Bands(64, 16, 0.01)
    bands.grow(32)
    values = np.random.default_rng(0).normal(5, 1, (100, 32)).astype(np.float32)
    for step, row in enumerate(values):
        numbers = np.arange(32 if step >= 30 else 16)
        bands.add(numbers, row[None, numbers], np.zeros((1, len(numbers)), bool))
        if step in (50, 61):  # fewer than the window: odd and even numbers of values
            bands._renew(np.arange(32))
            for number, first in ((0, 0), (31, 30)):
                mine = values[first : step + 1, number]
                median = np.median(mine)
                assert bands.of["median"][number] == median
                spread = 1.4826 * np.median(np.abs(mine - median))
                assert np.isclose(bands.of["spread"][number], spread)


def test_a_value_outside_that_float32_does_not_hold_gives_no_warning() -> None:
    """It is beside signals that are inside, with which it is written at first."""
    bands, numbers = Bands(64, 16, 0.01), np.arange(3)
    bands.grow(3)
    values, is_outside = np.ones((40, 3)), np.zeros((40, 3), bool)
    values[20, 1], is_outside[20, 1] = 1e300, True
    bands.add(numbers, values, is_outside)
    assert bands.of["median"][1] == bands.of["highest"][1] == 1.0


def test_values_that_float32_does_not_hold_enter_no_range() -> None:
    bands = Bands(64, 16, 0.01)
    bands.grow(1)
    values = np.where(np.arange(60) % 3 == 0, 1e300, 1.0)[:, None]
    for value in values:
        bands.add(ONE, value[None], INSIDE)
    assert bands.of["median"][0] == bands.of["highest"][0] == 1.0
