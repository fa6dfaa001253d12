"""Tests of the Watcher: what is an event, what left its range first, and what is none."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

import fastcheck
from fastcheck.log.step_table import StepRow
from fastcheck.watch.watcher import _reaches
from support.watched import (
    DTYPE_CODES,
    FIRST,
    FIRST_WEIGHT,
    GRADIENT,
    INPUT,
    SCALED,
    SECOND,
    SECOND_WEIGHT,
    Run,
    warmed_up,
)


def test_healthy_steps_have_no_event() -> None:
    assert Run().steps(600) == []


def test_a_schedule_and_convergence_are_no_events() -> None:
    run = Run()
    found = []
    for step in range(400):
        falls = 2.0 ** (-step / 40)
        found += run.steps(
            1,
            {GRADIENT: falls, FIRST_WEIGHT: 1 + step / 200},
            loss=2 * falls + 0.01 * float(run.random.normal()),
            gradient_norm=falls,
            learning_rate=0.001 * (1 - step / 500),
        )
    assert found == []


class TestTheLoss:
    def test_a_spike(self) -> None:
        run = warmed_up()
        (event,) = run.step(loss=4.0)
        assert (event.kind, event.step, event.value, event.is_warning) == (
            "loss_spike",
            100,
            4.0,
            True,
        )
        assert event.reference == pytest.approx(2.0, rel=0.05)
        assert event.score > 6
        assert run.steps(100) == []

    def test_a_small_one_is_none(self) -> None:
        assert warmed_up().steps(1, loss=2.3) == []

    def test_a_small_share_of_a_steady_loss_is_none(self) -> None:
        run = Run()
        assert [
            kind for step in range(100) for kind in run.steps(1, loss=2 + step % 2 * 1e-4)
        ] == []
        assert run.steps(1, loss=2.1) == []

    @pytest.mark.parametrize(("loss", "kinds"), [(7.0, []), (9.0, ["loss_spike"])])
    def test_a_jump_out_of_wild_noise(self, loss: float, kinds: list[str]) -> None:
        run = Run()
        for step in range(100):
            assert run.steps(1, loss=[1.0, 0.001, 0.1, 0.01][step % 4]) == []
        assert run.steps(1, loss=loss) == kinds

    @pytest.mark.parametrize(("loss", "kinds"), [(4.2, []), (7.0, ["loss_spike"])])
    @pytest.mark.parametrize("noise", [0.05, 0.5])
    def test_a_jump_while_the_loss_falls(self, noise: float, loss: float, kinds: list[str]) -> None:
        """The fall makes the range wide. Of much noise a jump is a part."""
        run = Run()
        for step in range(100):
            wave = [0.0, 1.0, -1.0, 0.5][step % 4]
            assert run.steps(1, loss=5 * math.exp(-step / 80 + noise * wave)) == []
        assert run.steps(1, loss=loss) == (kinds if noise < 0.1 else [])

    @pytest.mark.parametrize(
        ("later", "loss", "is_warning"),
        [(11, 500.0, True), (100, 5.0, False), (100, 7.0, True), (130, 5.0, True)],
    )
    def test_the_next_one_within_a_window_warns_if_it_is_twice_as_high(
        self, later: int, loss: float, is_warning: bool
    ) -> None:
        run = warmed_up()
        assert run.step(loss=4.0)[0].is_warning
        run.steps(later - 1)
        (spike,) = run.step(loss=loss)
        assert (spike.kind, spike.is_warning) == ("loss_spike", is_warning)

    @pytest.mark.parametrize(("later", "is_warning"), [(100, False), (130, True)])
    def test_a_rise_within_a_window_of_a_warning_is_silent_as_its_spike(
        self, later: int, is_warning: bool
    ) -> None:
        run = warmed_up()
        assert run.step(loss=4.0)[0].is_warning
        run.steps(later - 1)
        found = [event for _ in range(5) for event in run.step(loss=4.0)]
        assert [(one.kind, one.is_warning) for one in found] == [("loss_spike", is_warning)]

    def test_a_rise_that_warned_silences_the_next(self) -> None:
        run = Run()
        found = []
        for _ in range(2):
            for step in range(99):
                run.step(loss=1.9 + step % 3 / 10)
            found += [event for _ in range(5) for event in run.step(loss=2.75)]
        assert [(one.kind, one.is_warning) for one in found] == [
            ("loss_spike", True),
            ("loss_spike", False),
        ]
        assert all("the loss stays high: 2.75" in one.text for one in found)

    def test_after_a_spike_there_is_a_pause(self) -> None:
        run = warmed_up()
        kinds = [kind for step in range(20) for kind in run.steps(1, loss=9.0 if step % 2 else 2.0)]
        assert kinds == ["loss_spike"]

    def test_a_note_does_not_silence_the_warning_that_comes_after_it(self) -> None:
        run = Run()
        run.steps(20, loss=6.0)
        for step in range(200):
            run.step(loss=1.0 + 0.01 * (step % 3))
        (note,) = run.step(loss=1.3)
        assert (note.kind, note.is_warning) == ("loss_spike", False)
        run.steps(10, loss=1.01)
        found = [event for _ in range(8) for event in run.step(loss=500.0)]
        assert [(one.kind, one.is_warning) for one in found] == [("loss_spike", True)]

    def test_a_rise_that_lasts(self) -> None:
        run = warmed_up()
        assert run.steps(1, loss=3.0) == ["loss_spike"]
        assert run.steps(20, loss=3.0) == []  # it is one event
        run = Run()
        for step in range(100):
            run.step(loss=1.9 + step % 3 / 10)
        assert run.steps(4, loss=2.75) == []
        assert run.steps(1, loss=2.75) == ["loss_spike"]

    def test_a_new_level_is_learned(self) -> None:
        run = warmed_up()
        run.steps(200, loss=3.0)
        assert run.steps(1, loss=3.01) == []

    def test_wild_ratios_of_a_loss_near_0_are_none(self) -> None:
        run = warmed_up()
        run.steps(100, loss=0.001)
        assert run.steps(1, loss=0.15) == []
        assert run.steps(1, loss=0.9) == ["loss_spike"]

    @pytest.mark.parametrize(("loss", "kinds"), [(0.35, []), (0.45, ["loss_spike"])])
    def test_what_is_less_than_a_fifth_of_the_first_losses_is_none(
        self, loss: float, kinds: list[str]
    ) -> None:
        run = warmed_up()
        run.steps(100, loss=0.001)
        assert run.steps(1, loss=loss) == kinds

    def test_noise_that_reaches_as_far_by_itself_is_none(self) -> None:
        run = warmed_up()
        for _ in range(8):  # each of them less than 6 deviations above
            run.steps(15)
            assert run.steps(1, loss=2.25) == []
        assert run.steps(1, loss=2.35) == []
        assert run.steps(1, loss=2.6) == ["loss_spike"]

    @pytest.mark.parametrize(("loss", "is_warning"), [(1.3, False), (1.6, True)])
    def test_one_warns_if_it_takes_back_a_tenth_of_the_progress(
        self, loss: float, is_warning: bool
    ) -> None:
        run = Run()
        run.steps(20, loss=6.0)
        for step in range(200):
            run.step(loss=1.0 + 0.01 * (step % 3))
        (spike,) = run.step(loss=loss)
        assert (spike.kind, spike.is_warning) == ("loss_spike", is_warning)
        assert run.steps(3, loss=loss) == []

    def test_a_spike_does_not_hide_the_next(self) -> None:
        run = warmed_up()
        run.steps(8, loss=1e6)
        run.steps(40)
        assert run.steps(1, loss=4.0) == ["loss_spike"]

    def test_lopsided_noise_is_none(self) -> None:
        run = Run()
        noise = [float(x) for x in run.random.lognormal(-3, 1.0, 1000)]
        assert [kind for value in noise for kind in run.steps(1, loss=value)] == []

    def test_a_loss_that_is_not_finite_is_left_to_the_overflow_counter(self) -> None:
        run = warmed_up()
        assert run.steps(1, loss=math.nan, gradient_norm=math.inf) == []
        assert run.steps(10) == []

    def test_no_targets_explain_it(self) -> None:
        (event,) = warmed_up().step(loss=4.0)
        assert event.cause == "loss"
        assert "targets" in event.text


class TestTheFirstMover:
    def spike(self, run: Run, changed: dict[int, Any], **row: Any) -> Any:
        events = run.step(changed, loss=9.0, **row)
        return next(event for event in events if event.kind == "loss_spike")

    def test_the_batch(self) -> None:
        event = self.spike(warmed_up(), {INPUT: 30.0, FIRST: 30.0, SECOND: 30.0})
        assert (event.cause, event.first_mover.site.role) == ("data", "input")

    def test_the_layer_that_runs_first(self) -> None:
        event = self.spike(warmed_up(), {SECOND: 30.0, FIRST: 30.0, GRADIENT: 9.0})
        assert (event.cause, event.first_mover.site.module) == ("layer", "first")

    def test_an_update_the_step_before(self) -> None:
        run = warmed_up()
        run.steps(1, {SECOND_WEIGHT: 3.0})
        event = self.spike(run, {FIRST: 30.0, SECOND: 30.0, SECOND_WEIGHT: 3.0})
        assert (event.cause, event.first_mover.site.key) == ("optimizer", "second.weight")
        assert event.first_mover.step == 100

    def test_a_parameter_shows_the_update_before_the_step(self) -> None:
        event = self.spike(warmed_up(), {FIRST: 30.0, FIRST_WEIGHT: 9.0})
        assert event.first_mover.site.key == "first.weight"

    def test_a_loss_that_rose_before_any_tensor(self) -> None:
        run = warmed_up()
        run.steps(1, loss=3.0)
        found = run.step({FIRST: 30.0}, loss=3.0, gradient_norm=9.0)
        (event,) = [event for event in found if event.kind == "gradient_spike"]
        assert event.first_mover is not None and event.first_mover.site is None

    def test_the_learning_rate(self) -> None:
        run = warmed_up()
        run.steps(1, learning_rate=0.1)
        event = self.spike(run, {FIRST_WEIGHT: 9.0, FIRST: 30.0}, learning_rate=0.1)
        assert event.cause == "optimizer"
        assert "changed from 0.001 to 0.1 at step 100" in event.text

    def test_one_that_has_come_back_is_none(self) -> None:
        run = warmed_up()
        run.steps(1, {FIRST: 30.0})
        run.steps(10)
        event = self.spike(run, {SECOND: 30.0})
        assert event.first_mover.site.module == "second"

    def test_one_of_long_ago_is_none(self) -> None:
        run = warmed_up(window=200)
        run.steps(70, {FIRST: 3.0})
        event = self.spike(run, {FIRST: 3.0, SECOND: 30.0})
        assert event.first_mover.site.module == "second"

    def test_what_has_left_again_left_now(self) -> None:
        run = warmed_up()
        run.steps(1, {SECOND: 30.0})
        run.steps(10)
        event = self.spike(run, {FIRST: 30.0, SECOND: 30.0})
        assert (event.first_mover.site.module, event.first_mover.step) == ("first", 111)

    @pytest.mark.parametrize("place", [GRADIENT, FIRST_WEIGHT])
    def test_a_gradient_or_weight_that_falls_moves_nothing(self, place: int) -> None:
        run = warmed_up()
        run.steps(3, {place: 0.01})
        event = self.spike(run, {place: 0.01, SECOND: 30.0})
        assert event.first_mover.site.role == "output"

    def test_an_activation_that_collapses_does(self) -> None:
        run = warmed_up()
        run.steps(2, {FIRST: 0.01})
        event = self.spike(run, {FIRST: 0.01, SECOND: 30.0})
        assert event.first_mover.site.module == "first"

    def test_the_loss_comes_before_gradients_of_its_step(self) -> None:
        event = self.spike(warmed_up(), {GRADIENT: 30.0})
        assert event.first_mover.site is None
        event = self.spike(warmed_up(), {GRADIENT: 30.0, SECOND: 30.0})
        signals = [mover.signal for mover in event.movers]
        assert signals.index("loss") == 1

    def test_a_tensor_near_the_end_of_its_dtype(self) -> None:
        kind = {"dtype": DTYPE_CODES["float16"]}
        event = self.spike(warmed_up(), {SECOND: {**kind, "rms": 12000.0}})
        assert event.cause == "precision"

    def test_scaled_gradients_are_as_without_the_scale(self) -> None:
        run = Run()
        scaled = {"flags": SCALED, "rms": 1024.0}
        run.steps(100, {GRADIENT: scaled}, scale=1024.0)
        again = {"flags": SCALED, "rms": 2048.0}
        event = self.spike(run, {GRADIENT: again, SECOND: 30.0}, scale=2048.0)
        assert [mover.site.role for mover in event.movers if mover.site] == ["output"]


class TestTensors:
    def test_an_explosion_needs_no_long_past(self) -> None:
        run = Run()
        assert run.steps(20) == []
        (event,) = run.step({SECOND: 1e6})
        assert (event.kind, event.site.module, event.cause) == ("explosion", "second", "layer")
        assert event.is_warning
        assert "left its range first" not in event.text, "there are no ranges yet"

    def test_the_loss_is_first_of_nothing_while_tensors_have_no_ranges(self) -> None:
        run = Run()
        run.steps(40)
        run.step(loss=300.0)
        exploded = [e for e in run.step({SECOND: 1e6}, loss=1e4) if e.kind == "explosion"]
        assert [event.movers for event in exploded] == [()]
        assert "First out of its range" not in exploded[0].text

    def test_one_element_is_enough(self) -> None:
        (event,) = warmed_up().step({FIRST: {"max": 1e5}})
        assert (event.kind, event.site.module) == ("explosion", "first")
        assert (event.value, event.reference) == pytest.approx((1e5, 3.1), rel=0.1)
        assert "its abs max is 100,000, and was at most 3." in event.text

    def test_a_batch_out_of_its_range_is_a_note(self) -> None:
        (event,) = warmed_up().step({INPUT: {"rms": 5.0, "sum": 5.0 * 1024}})
        assert (event.kind, event.cause, event.is_warning) == ("batch", "data", False)

    def test_a_batch_whose_flags_are_all_0_now_and_then_is_none(self) -> None:
        run, none = Run(), {"rms": 0.0, "max": 0.0, "min": 0.0, "zero_count": 1024}
        events = [run.step({INPUT: none} if step % 5 == 0 else None) for step in range(200)]
        assert [event for found in events for event in found] == []
        assert [event.kind for event in run.step({INPUT: 30.0})] == ["batch"]

    def test_a_batch_as_large_as_one_of_the_first_steps_moved_first(self) -> None:
        run = Run()
        run.steps(10)
        assert run.step({INPUT: 30.0}) == []
        run.steps(60)
        movers = [e.movers for e in run.step({INPUT: 29.0, SECOND: 1e6}) if e.kind == "explosion"]
        assert [[m.site.role for m in one if m.site] for one in movers] == [["input", "output"]]

    def test_an_activation_that_dies(self) -> None:
        run = warmed_up()
        zero = {"rms": 0.0, "zero_count": 1024}
        found = [event for _ in range(60) for event in run.step({SECOND: zero})]
        assert [(one.kind, one.step, one.is_warning) for one in found] == [
            ("dead", 102, False),
            ("dead", 149, True),
        ]

    def test_one_that_was_never_alive_is_none(self) -> None:
        assert Run().steps(200, {SECOND: {"rms": 0.0, "zero_count": 1024}}) == []

    def test_an_activation_that_becomes_constant(self) -> None:
        run = warmed_up()
        constant = {"rms": 1.0, "sum": 1024.0, "max": 1.0, "min": 1.0}
        assert run.steps(60, {SECOND: constant}) == ["dead", "dead"]
        assert "all its elements have been equal for 50 steps" in run.watcher.events[-1].text

    def test_one_whose_elements_differ_in_their_last_digits_is_not_constant(self) -> None:
        run = warmed_up()
        narrow = {"rms": 1.0, "sum": 1024.0, "max": 1.0001, "min": 1.0}
        assert run.steps(60, {SECOND: narrow}).count("dead") == 0


def test_more_steps_together_have_the_same_events() -> None:
    steps: list[Any] = []
    run = Run()
    run.watcher = SimpleNamespace(add=lambda step: steps.append(step) or [])  # type: ignore[assignment]  # keeps the steps
    half, zero = {"dtype": DTYPE_CODES["float16"]}, {"rms": 0.0, "zero_count": 1024}
    for step in range(260):
        changed: dict[int, Any] = {GRADIENT: {**half, "rms": 30.0 * 2 ** (step * 0.037)}}
        changed[FIRST] = zero if 40 <= step < 42 or step >= 170 else 1.0
        changed[SECOND_WEIGHT] = 1.05 ** min(step, 80)
        changed[FIRST_WEIGHT] = {} if step % 3 else 1.2
        changed[INPUT] = 9.0 if step == 67 else 1.0
        changed[SECOND] = 40.0 if step in (75, 150) else 1.0
        run.step(changed, loss=9.0 if step in (75, 150, 231) else 2 + math.sin(step) / 20)
    sixteen, more = Run().watcher, Run().watcher
    for watcher, together in ((sixteen, 16), (more, 64)):
        for at in range(0, len(steps), together):
            watcher.add(*steps[at : at + together])
    assert {e.kind for e in sixteen.events} >= {"loss_spike", "headroom", "dead", "batch"}
    assert [repr(e.to_dict()) for e in more.events] == [repr(e.to_dict()) for e in sixteen.events]


@pytest.mark.parametrize("dtypes", [["float32", "float16"], ["float16", "float32"]])
def test_a_dtype_that_changes_within_steps_judged_together(dtypes: list[str]) -> None:
    """Positions up to 3,000 are exact in float32, and are not in float16."""
    whole = {"numel": 4096, "max": 3000.0, "min": 0.0, "sum": 10240.0}

    def found(together: int) -> list[str]:
        run, held = Run(), []
        for step in range(48):
            code = DTYPE_CODES[dtypes[step >= 20]]
            zeros = {"dtype": code, "rms": 0.0, "zero_count": 100}
            changed: dict[int, Any] = {INPUT: {**whole, "dtype": code}, GRADIENT: zeros}
            if step >= 28:
                changed[GRADIENT] = {**zeros, "zero_count": 1000, "subnormal_count": 24}
            row = StepRow(0, step, 2.0, False, None, 0.001, 1.0)
            held.append((row, [run.healthy(changed)]))
            run.count += 1
        for at in range(0, len(held), together):
            run.watcher.add(*held[at : at + together])
        return [event.text for event in run.watcher.events]

    one_by_one = found(1)
    rounded = f"step {22 if dtypes[0] == 'float32' else 2}: "
    assert one_by_one[0].startswith(rounded)
    assert "whole numbers up to 3,000 in float16" in one_by_one[0]
    assert f"too small for {dtypes[1]}" in one_by_one[1]
    assert found(64) == one_by_one


def test_events_are_held_in_order_with_their_movers() -> None:
    run = warmed_up()
    run.step(loss=9.0)
    run.step({SECOND: 1e6})
    events = list(run.watcher.events)
    assert [event.kind for event in events] == ["loss_spike", "explosion"]
    assert str(events[1].first_mover).startswith("second")


def test_steps_without_records_or_rows_are_passed_over() -> None:
    run = Run()
    assert run.watcher.add((None, [])) == []
    assert run.steps(10) == []


@pytest.mark.parametrize(
    "options",
    [
        {"threshold": 0},
        {"threshold": "6"},
        {"window": 4},
        {"warm_up": 200},
        {"horizon": 0},
        {"window": 8.5},
        {"window": 10**12},
        {"horizon": True},
        {"threshold": 10**400},
        {"threshold": float("nan")},
        {"skip_above": 10**400},
        {"skip_above": 1},
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(fastcheck.ConfigError, match=next(iter(options))):
        fastcheck.Watch(**options)


def test_several_steps_at_once_have_the_events_of_one_after_another() -> None:
    def found(together: int) -> list[tuple[str, int, str, bool]]:
        run, held = Run(), []
        half = {"dtype": DTYPE_CODES["float16"], "zero_count": 100}
        for step in range(240):
            changed: dict[int, Any] = {GRADIENT: half}
            if 160 <= step < 230:
                changed[SECOND] = {"rms": 0.0, "zero_count": 1024}
                changed[GRADIENT] = {**half, "zero_count": 1000, "subnormal_count": 24}
            if step == 150:
                changed[FIRST] = 1e6
            loss, norm = (9.0, 9.0) if step in (120, 235) else (2.0, 1.0)
            row = StepRow(0, step, loss, False, None, 0.001, norm)
            held.append((row, [run.healthy(changed)]))
            run.count += 1
            if len(held) == together:
                run.watcher.add(*held)
                held.clear()
        events = run.watcher.events
        return [(one.kind, one.step, one.cause, one.is_warning) for one in events]

    one_by_one = found(1)
    kinds = {"loss_spike", "gradient_spike", "explosion", "dead", "precision"}
    assert {kind for kind, *_ in one_by_one} == kinds
    assert found(8) == one_by_one and found(3) == one_by_one


@pytest.mark.parametrize(
    ("interval", "text"),
    [
        ((0.0, 0.5), "reaches in about a step"),
        ((3.0, 9.0), "reaches in about 3 to 9 steps"),
        ((12.0, 12.4), "reaches in about 12 steps"),
        ((0.0, 7682.0), "may reach at any step from now on"),
        ((12.0, math.inf), "may reach in about 12 steps, or much later"),
    ],
)
def test_a_forecast_whose_end_is_far_names_its_beginning_alone(
    interval: tuple[float, float], text: str
) -> None:
    assert _reaches(*interval) == text
