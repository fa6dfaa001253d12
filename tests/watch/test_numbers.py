"""Tests of the Watcher: a step's numbers (norms, settings, updates, the scale), and forecasts."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, Optional

import numpy as np
import pytest

from fastcheck.record.format import RECORD_DTYPE
from fastcheck.record.site import Site
from fastcheck.watch.event import WatchEvent
from fastcheck.watch.numbers import Standstill
from support.watched import (
    DTYPE_CODES,
    FIRST_WEIGHT,
    SECOND,
    SECOND_WEIGHT,
    Run,
    tensor,
    warmed_up,
)


class Gradients(Run):
    """A Run with the gradient of a parameter of 1,024 elements."""

    def __init__(self) -> None:
        super().__init__()
        site = Site("first", "Linear", "optimizer", "param_grad", 0, "weight")
        self.number = self.sites.intern(site)

    def read(self, fields: Any) -> list[WatchEvent]:
        """The events of a step with a gradient of this rms, or with these fields."""
        fields = dict(fields) if isinstance(fields, dict) else {"rms": fields}
        fields["rms"] *= float(np.exp(self.random.normal(0, 0.05)))
        one = np.zeros(1, RECORD_DTYPE)
        for name, value in {**tensor(**fields), "site": self.number, "step": self.count}.items():
            one[name] = value
        return self.take([np.concatenate([self.healthy(), one])])


def test_what_adds_up_without_an_update_is_no_spike() -> None:
    run = warmed_up()
    assert run.steps(5, loss=200.0, gradient_norm=100.0, learning_rate=None) == []
    assert run.steps(5, loss=200.0, gradient_norm=100.0) == ["loss_spike", "gradient_spike"]


class TestNumbers:
    def test_a_norm_less_than_twice_its_median_is_none(self) -> None:
        run = Run()
        assert run.steps(100, gradient_norm=1.0) == []
        assert run.steps(1, gradient_norm=1.9) == []

    def test_updates_below_the_rounding_of_a_sum_are_none(self) -> None:
        run = Run()
        rounding = 1e-7 * 800  # of the sum of magnitudes

        def sums(step: int) -> dict[int, Any]:
            total = rounding * float(run.random.choice([0.001, 1.0, -1.0]))
            return {FIRST_WEIGHT: {"rms": 1.0, "sum": total if step > 120 else total * 1e-6}}

        assert [kind for step in range(200) for kind in run.steps(1, sums(step))] == []

    def test_the_norm_of_the_gradients(self) -> None:
        run = warmed_up()
        (event,) = run.step(gradient_norm=5.0)
        assert (event.kind, event.is_warning) == ("gradient_spike", False)
        assert event.reference == pytest.approx(1.0, rel=0.1)

    @pytest.mark.parametrize(
        ("name", "before", "after", "is_event"),
        [
            ("optimizers[0].groups[0].betas[1]", 0.999, 0.5, True),
            ("optimizers[0].groups[0].betas[0]", 0.9, 0.91, False),
            ("optimizers[0].groups[0].momentum", 0.9, 1.0, True),
            ("optimizers[0].groups[1].eps", 1e-8, 0.1, True),
            ("optimizers[0].groups[1].eps", 1e-8, 2e-8, False),
            ("clipping.threshold", 1.0, 20.0, True),
            ("clipping.threshold", 1.0, 2.0, False),
            ("optimizers[0].groups[1].lr", 1e-3, 1.0, True),
            ("optimizers[0].groups[1].lr", 1e-3, 2e-3, False),
            ("optimizers[0].groups[1].lr", 0.0, 1e-3, False),
        ],
    )
    def test_settings(self, name: str, before: float, after: float, is_event: bool) -> None:
        run = warmed_up()
        run.watcher.setting(name, before, after)
        events = run.step()
        assert [event.kind for event in events] == ["settings"] * is_event
        assert all(name in event.text and event.cause == "optimizer" for event in events)
        assert run.steps(5) == []

    @pytest.mark.parametrize(("rate", "is_event"), [(0.003, False), (0.005, True), (1e-6, False)])
    def test_a_learning_rate_that_rises_at_once(self, rate: float, is_event: bool) -> None:
        run = warmed_up()
        events = run.step(learning_rate=rate)
        assert [(one.kind, one.cause) for one in events] == [("settings", "optimizer")] * is_event
        text = "the learning rate was changed from 0.001 to 0.005"
        assert all(text in one.text and not one.is_warning for one in events)

    @pytest.mark.parametrize(("rate", "is_event"), [(0.011, False), (0.03, True)])
    @pytest.mark.parametrize("of_group", [False, True])
    def test_a_warm_up_of_which_one_step_in_ten_is_observed(
        self, rate: float, is_event: bool, of_group: bool
    ) -> None:
        run = warmed_up(every=10)
        if of_group:
            run.watcher.setting("optimizers[0].groups[0].lr", 0.001, rate)
        events = run.step(learning_rate=rate)
        assert [one.kind for one in events] == ["settings"] * is_event

    def test_optimizers_that_take_turns_are_no_change_of_the_rate(self) -> None:
        run = warmed_up()
        run.watcher.setting("optimizers[0].groups[0].lr", None, 0.001)
        assert [run.step(learning_rate=0.001) for _ in range(3)] == [[]] * 3
        run.watcher.setting("optimizers[1].groups[0].lr", None, 0.05)
        (event,) = run.step(learning_rate=0.05)
        text = "the learning rate (another optimizer's) was changed from 0.001 to 0.05"
        assert text in event.text
        assert [run.step(learning_rate=(0.001, 0.05)[k % 2]) for k in range(80)] == [[]] * 80
        # As where each stage of a run has an optimizer of its own.
        run.watcher.setting("optimizers[2].groups[0].lr", None, 1.0)
        (event,) = run.step(learning_rate=1.0)
        assert "was changed from 0.05 to 1" in event.text
        for _ in range(40):
            run.step(learning_rate=1.0)
        run.watcher.setting("optimizers[0].groups[1].lr", None, 50.0)
        assert "settings" not in [event.kind for event in run.step(learning_rate=50.0)]

    @pytest.mark.parametrize(("beta2", "is_event"), [(0.5, True), (0.7, False)])
    def test_a_beta2_that_is_too_small_at_first(self, beta2: float, is_event: bool) -> None:
        run = Run()
        for place, beta in enumerate((0.9, beta2)):
            run.watcher.setting(f"optimizers[0].groups[0].betas[{place}]", None, beta)
        events = run.step()
        assert [(one.kind, one.is_warning) for one in events] == [("settings", True)] * is_event
        assert all(one.value == 0.5 and "beta1^4 = 0.6561" in one.text for one in events)

    @pytest.mark.parametrize(("rms", "is_event"), [(4e-9, True), (8e-9, False), (1.0, False)])
    def test_gradients_below_the_eps_of_adam(self, rms: float, is_event: bool) -> None:
        run, kinds = Gradients(), []
        run.watcher.setting("optimizers[0].groups[0].eps", None, 1e-8)
        for step in range(40):
            kinds += [(step, one.kind, one.is_warning) for one in run.read(rms)]
        assert kinds == [(19, "settings", True)] * is_event

    def test_gradients_that_were_above_eps_shrink_with_the_loss(self) -> None:
        run = Gradients()
        run.watcher.setting("optimizers[0].groups[0].eps", None, 1e-8)
        run.read(1.0)
        assert [one for _ in range(40) for one in run.read(4e-9)] == []

    @pytest.mark.parametrize("together", [1, 16, 64])
    def test_gradients_that_rise_above_eps_later_were_below_it(self, together: int) -> None:
        held: list[Any] = []
        run = Gradients()
        watcher = run.watcher
        run.watcher = SimpleNamespace(add=lambda step: held.append(step) or [])  # type: ignore[assignment]  # keeps the steps
        watcher.setting("optimizers[0].groups[0].eps", None, 1e-8)
        for step in range(64):
            run.read(4e-9 if step < 30 else 1.0)
        for at in range(0, 64, together):
            watcher.add(*held[at : at + together])
        assert [(one.step, one.kind) for one in watcher.events] == [(19, "settings")]

    def test_the_rows_of_an_embedding_that_were_used_count(self) -> None:
        run = Gradients()
        run.watcher.setting("optimizers[0].groups[0].eps", None, 1e-8)
        few = {"rms": 4e-9, "zero_count": 1008}
        assert [one for _ in range(40) for one in run.read(few)] == []

    @pytest.mark.parametrize(
        ("growth", "fall", "first", "is_event"),
        [
            (0.1, 0.0, 4.0, True),
            (0.1, 0.02, 4.0, False),  # the loss comes down
            (0.1, 0.0, 3.0, False),  # it never has: a plateau at the beginning
            (0.01, 0.0, 4.0, False),  # weights hardly grow
            (0.1, 0.0, 6.5, False),  # less than half of the first loss is left
        ],
    )
    def test_weights_that_grow_while_the_loss_stands_still(
        self, growth: float, fall: float, first: float, is_event: bool
    ) -> None:
        run = Run()
        kinds, texts = [], []
        for step in range(160):
            loss = first if step < 8 else 3.0 - fall * max(0, step - 64)
            large = {"rms": 0.02 * (1 + growth * step), "sum": float(step)}
            for event in run.step({FIRST_WEIGHT: large, SECOND_WEIGHT: large}, loss=loss):
                if event.is_warning:
                    kinds.append(event.kind)
                    texts.append(event.text)
        assert kinds == ["update"] * is_event
        assert all("times as large as at first" in text for text in texts)

    def test_weights_that_move_in_turns_have_losses_of_their_own(self) -> None:
        """As with an optimizer for each layer, whose losses do not compare."""
        run, kinds = Run(), []
        for step in range(160):
            size = 0.02 * (1 + 0.1 * step)
            moved = {
                place: {"rms": size, "sum": float((step + turn) // 2)}
                for turn, place in enumerate((FIRST_WEIGHT, SECOND_WEIGHT))
            }
            events = run.step(moved, loss=4.0 if step < 8 else 3.0)
            kinds += [one.kind for one in events if one.is_warning]
        assert kinds == []

    @pytest.mark.parametrize(
        ("rms", "growth", "is_event"), [(0.05, 0.1, False), (0.05, 0.5, True), (0.005, 0.5, False)]
    )
    @pytest.mark.parametrize("other", [0.5, None])
    def test_updates_that_are_large_beside_the_weights(
        self, rms: float, growth: float, is_event: bool, other: Optional[float]
    ) -> None:
        """What begins small may grow. ``other``: a parameter of a tenth of the elements does not
        matter.
        """
        run, kinds = Run(), []
        small = {"numel": 100, "rms": 1.0}
        for step in range(30):
            large = {"rms": rms * (1 + growth * step)}
            changed: dict[int, Any] = {FIRST_WEIGHT: large, SECOND_WEIGHT: {**large, **small}}
            if other is not None:
                changed[SECOND_WEIGHT]["rms"] = rms * (1 + other * step)
            kinds += [(one.step, one.kind, one.is_warning) for one in run.step(changed)]
        assert kinds == [(10, "update", True)] * is_event

    def test_a_parameter_that_was_zero_may_grow(self) -> None:
        run, kinds = Run(), []
        for step in range(30):
            grown = {"rms": 0.02 * step, "zero_count": 0 if step else 1024}
            kinds += run.steps(1, {FIRST_WEIGHT: grown, SECOND_WEIGHT: grown})
        assert kinds == []

    def test_a_weight_that_one_update_changes(self) -> None:
        run = warmed_up()
        (event,) = run.step({FIRST_WEIGHT: 3.0})
        assert (event.kind, event.cause, event.is_warning) == ("update", "optimizer", False)
        assert event.site is not None and event.site.key == "first.weight"
        assert (
            event.value == pytest.approx(3.0, rel=0.1) and run.steps(5, {FIRST_WEIGHT: 3.0}) == []
        )

    def test_updates_that_vanish(self) -> None:
        run = Run()

        def sums(size: float) -> dict[int, Any]:
            return {
                place: {"rms": 1.0, "sum": float(run.random.normal(0, size))}
                for place in (FIRST_WEIGHT, SECOND_WEIGHT)
            }

        found = [kind for _ in range(150) for kind in run.steps(1, sums(1.0))]
        assert found == []
        found = [kind for _ in range(6) for kind in run.steps(1, sums(1e-4))]
        assert found == ["update"]
        assert run.watcher.events[-1].cause == "optimizer"

    def test_a_scale_that_falls(self) -> None:
        run = Run()
        run.steps(150, scale=65536.0)
        kinds = []
        for power in range(15, 9, -1):
            kinds += run.steps(1, scale=2.0**power, overflow=True)
        assert kinds == ["loss_scale"]

    @pytest.mark.parametrize(("halvings", "kinds"), [(3, []), (4, ["loss_scale"])])
    def test_a_scale_that_is_halved_in_a_row(self, halvings: int, kinds: list[str]) -> None:
        run = Run()
        run.steps(150, scale=65536.0)
        found = []
        for power in range(15, 15 - halvings, -1):
            found += run.steps(1, scale=2.0**power, overflow=True)
        assert found + run.steps(5, scale=2.0 ** (16 - halvings)) == kinds

    @pytest.mark.parametrize(("every", "kinds"), [(4, ["loss_scale"]), (8, [])])
    def test_a_fifth_of_the_steps_skipped(self, every: int, kinds: list[str]) -> None:
        """It grows back in between, so that no two halvings are in a row."""
        run = Run()
        run.steps(150, scale=65536.0)
        found = []
        for step in range(120):
            is_skipped = step % every == every - 1
            found += run.steps(1, scale=65536.0 / (1 + is_skipped), overflow=is_skipped)
        assert found == kinds
        assert all(0.2 <= event.reference < 0.25 for event in run.watcher.events)

    def test_the_search_of_a_new_scaler_is_none(self) -> None:
        run = Run()
        for power in range(16, 6, -1):
            assert run.steps(1, scale=2.0**power, overflow=True) == []

    def test_a_scale_at_its_end_is_an_event_at_any_time(self) -> None:
        assert "loss_scale" in Run().steps(1, scale=1.0, overflow=True)


class TestForecasts:
    def test_growth_towards_the_end_of_float16(self) -> None:
        run = Run()
        kind = DTYPE_CODES["float16"]
        events = []
        for step in range(200):
            largest = 100.0 * 2 ** (step * 0.1)
            if largest > 65504:
                break
            events += run.step({SECOND: {"dtype": kind, "rms": largest / 3}})
        (event,) = [event for event in events if event.kind == "headroom"]
        assert event.site is not None and event.site.module == "second"
        assert event.interval is not None
        low, high = event.interval
        truth = math.log2(65504 / 100) / 0.1 - event.step
        assert truth >= 10 and low <= truth + 1 and truth <= high
        assert event.reference == pytest.approx(65504, rel=1e-3)

    def test_noise_near_the_end_is_none(self) -> None:
        run, kind = Run(), DTYPE_CODES["float16"]
        found: list[str] = []
        for _ in range(400):
            largest = float(30000 * np.exp(run.random.normal(0, 0.15)))
            found += run.steps(1, {SECOND: {"dtype": kind, "max": min(largest, 60000.0)}})
        assert "headroom" not in found

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_a_wide_format_has_room(self, dtype: str) -> None:
        run, kind = Run(), DTYPE_CODES[dtype]
        kinds = []
        for step in range(120):
            kinds += run.steps(1, {SECOND: {"dtype": kind, "rms": 100.0 * 2 ** (step * 0.1)}})
        assert "headroom" not in kinds

    def test_a_large_value_that_does_not_grow_is_none(self) -> None:
        kind = DTYPE_CODES["float16"]
        assert "headroom" not in Run().steps(300, {SECOND: {"dtype": kind, "max": 60000.0}})


@pytest.mark.parametrize(
    ("factor", "grown", "told"),
    [
        (1.3, 5.0, "divergence"),
        (1.3, 3.9, ""),
        (1.02, 5.0, ""),
        (-1.3, 1.0, "descent"),
        (-1.05, 1.0, ""),
        (-1.02, 5.0, ""),
    ],
)
def test_a_loss_that_goes_on_growing(factor: float, grown: float, told: str) -> None:
    """Above 0 with the weights, or below 0 whatever these do."""
    standstill, found = Standstill(), []
    for at in range(80):
        standstill.add(math.copysign(abs(factor) ** at, factor))
        found += standstill.look(at, grown)
    assert [number.name for number in found[:1]] == [told] * bool(told)


def test_a_loss_near_zero_may_fall_by_orders_of_magnitude() -> None:
    """As the gain of a policy, which is 0 at first."""
    standstill = Standstill()
    for at in range(80):
        standstill.add(-1e-6 * 1.3**at)
        assert not standstill.look(at, 1.0)


def test_a_loss_that_was_near_zero_at_first_may_grow_slowly() -> None:
    """As that of a policy before its first reward, or one whose weight is ramped up."""
    standstill = Standstill()
    for at in range(160):
        standstill.add(1e-6 if at < 40 else 1.03**at)
        assert not standstill.look(at, 5.0)


def test_a_loss_of_zero_does_not_grow() -> None:
    standstill = Standstill()
    for at in range(80):
        standstill.add(0.0)
        assert not standstill.look(at, 5.0)


def test_a_loss_that_comes_to_another_level_and_stays_is_no_short_run() -> None:
    """What it was before, at the level that it has left, is no measure of it."""
    run = Run()
    kinds = [kind for step in range(150) for kind in run.steps(1, loss=2.0 * 0.99**step)]
    assert kinds == [] and run.steps(1, loss=250.0) == ["loss_spike"]
    assert "loss_spike" not in run.steps(200, loss=120.0)
