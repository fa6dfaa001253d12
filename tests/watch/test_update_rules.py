"""Tests of the rules for updates of single parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import numpy as np
import pytest

from fastcheck.record.format import RECORD_DTYPE
from fastcheck.record.site import Site
from fastcheck.watch.signals import UPDATE, phase_of
from support.watched import Run, tensor


class Updates(Run):
    """A Run that reads the update of one of two parameters in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.places = {
            (role, name): self.sites.intern(Site(name, "Linear", "optimizer", role, 0, "weight"))
            for role in ("update_ratio", "lost_updates")
            for name in ("first", "second")
        }

    def read(
        self,
        role: str,
        value: float,
        name: Optional[str] = None,
        overflow: bool = False,
        changed: Any = None,
    ) -> list[str]:
        """A step in which this number was read; the kinds of its events."""
        records = self.healthy(changed)
        one = np.zeros(1, RECORD_DTYPE)
        site = self.places[role, name or ("first", "second")[self.count % 2]]
        fields = {"site": site, "step": self.count, "seq": self.count * 100 + 99, "numel": 1}
        fields |= {"sum": value, "max": value, "min": value, "sum_sq": value**2}
        for key, held in {**tensor(), **fields}.items():
            one[0][key] = held
        self.last = self.take([np.concatenate([records, one])], overflow=overflow)
        return [event.kind for event in self.last]


class TestLostUpdates:
    def test_three_readings_of_a_parameter_in_a_row(self) -> None:
        run = Updates()
        assert run.read("lost_updates", 0.2, "second") == []
        kinds = [run.read("lost_updates", 0.95, "first") for _ in range(6)]
        assert kinds == [[], [], ["lost_updates"], [], [], []]
        (event,) = run.watcher.events
        assert str(event.site) == "first (Linear) · optimizer · lost updates of first.weight"
        assert (event.value, event.cause, event.is_warning) == (0.95, "optimizer", False)
        assert "95.0% of the elements" in str(event) and "float32" in str(event)

    @pytest.mark.parametrize(("last", "kinds"), [(0.6, []), (0.4, ["lost_updates"])])
    def test_after_it_was_over_it_may_come_again(self, last: float, kinds: list[str]) -> None:
        run = Updates()
        run.read("lost_updates", 0.2, "second")
        values = [0.95, 0.95, 0.95, last, 0.95, 0.95, 0.95]
        found = [run.read("lost_updates", one, "first") for one in values]
        assert found == [[], [], ["lost_updates"], [], [], [], kinds]

    def test_of_all_parameters_is_warned_once(self) -> None:
        run = Updates()
        found = [run.read("lost_updates", 0.97) for _ in range(20)]
        assert found == [[]] * 4 + [["lost_updates"]] * 2 + [[]] * 14
        assert [event.is_warning for event in run.watcher.events] == [False, True]
        assert "all such parameters it is 97.0%" in str(run.watcher.events[1])

    @pytest.mark.parametrize(("numel", "steps"), [(16, [4, 6]), (1024, [4])])
    def test_a_parameter_that_moves_counts_by_its_elements(
        self, numel: int, steps: list[int]
    ) -> None:
        """A bias that was 0 at first loses no updates."""
        run = Updates()
        for _ in range(10):
            run.read("lost_updates", 0.97, "first")
            run.read("lost_updates", 0.1, "second", changed={5: {"numel": numel}})
        found = [(event.step, event.is_warning) for event in run.watcher.events]
        assert found == [(step, step == 6) for step in steps]

    def test_where_the_learning_rate_has_come_down_it_is_not(self) -> None:
        run = Updates()
        run.step(learning_rate=0.01)
        for _ in range(20):
            run.read("lost_updates", 0.97)
        assert [event.is_warning for event in run.watcher.events] == [False, False]

    def test_fewer_are_none(self) -> None:
        run = Updates()
        values = [0.95, 0.95, 0.8, 0.95, 0.95, 0.8]
        assert [run.read("lost_updates", one, "first") for one in values] == [[]] * 6

    def test_a_skipped_update_has_lost_nothing(self) -> None:
        run = Updates()
        found = [run.read("lost_updates", 1.0, "first", overflow=True) for _ in range(5)]
        assert found == [[]] * 5


class TestRatio:
    def test_a_large_one(self) -> None:
        run = Updates()
        assert [run.read("update_ratio", 1e-3) for _ in range(20)] == [[]] * 20
        assert run.read("update_ratio", 0.2) == ["update_ratio"]
        (event,) = run.last
        assert not event.is_warning and event.cause == "optimizer"
        assert (event.value, event.reference) == (0.2, pytest.approx(1e-3))

    def test_after_one_there_is_a_pause(self) -> None:
        run = Updates()
        for _ in range(20):
            run.read("update_ratio", 1e-3)
        found = [run.read("update_ratio", 0.2 * 10**step) for step in range(4)]
        assert found == [["update_ratio"], [], [], []]

    def test_what_is_not_far_above_its_own_is_none(self) -> None:
        run = Updates()
        assert [run.read("update_ratio", 0.1) for _ in range(20)] == [[]] * 20
        assert run.read("update_ratio", 0.5) == []

    def test_what_is_small_against_the_weight_is_none(self) -> None:
        run = Updates()
        assert [run.read("update_ratio", 1e-5) for _ in range(20)] == [[]] * 20
        assert run.read("update_ratio", 1e-2) == []

    def test_at_first_none_is(self) -> None:
        run = Updates()
        assert run.read("update_ratio", 1e-3, "first") == []
        assert run.read("update_ratio", 1e3, "first") == []

    def test_zero_is_no_reading(self) -> None:
        run = Updates()
        for _ in range(8):
            run.read("update_ratio", 0.0, "first")
        assert run.read("update_ratio", 0.5, "first") == []

    def test_an_update_that_left_its_range_comes_before_the_weights(self) -> None:
        """The update of a step shows in the weights of the next one."""
        run = Updates()
        for _ in range(200):
            run.read("update_ratio", 1e-3 * float(np.exp(run.random.normal(0, 0.05))), "first")
        run.read("update_ratio", 0.04, "first")
        events = run.step({4: 8.0}, loss=50.0)
        spike = next(event for event in events if event.kind == "loss_spike")
        movers = [(str(one.site), one.signal, one.step) for one in spike.movers]
        assert movers[0] == (
            "first (Linear) · optimizer · update of first.weight",
            "norm / norm of the weight",
            200,
        )
        assert movers[1][0] == "first (Linear) · optimizer · parameter first.weight"
        assert spike.cause == "optimizer" and "an update left its range first" in str(spike)


class TestTheRangeAtTheRateOfARun:
    """One parameter in eight steps, in turn, as in small models: each has 20 readings."""

    def watched(self, ratio: Callable[[int, int], float]) -> Updates:
        run = Updates()
        run.names = [f"layer{number}" for number in range(6)]
        for name in run.names:
            site = Site(name, "Linear", "optimizer", "update_ratio", 0, "weight")
            run.places["update_ratio", name] = run.sites.intern(site)
        for step in range(960):
            place = step // 8 % 6
            if step % 8:
                run.step()
            else:
                noise = float(np.exp(run.random.normal(0, 0.1)))
                run.read("update_ratio", ratio(step, place) * noise, run.names[place])
        return run

    def first_mover(self, run: Updates, ratio: float) -> str:
        run.read("update_ratio", ratio, "layer3")
        spike = next(one for one in run.step({4: 8.0}, loss=50.0) if one.kind == "loss_spike")
        assert spike.cause == "optimizer" and spike.first_mover is not None
        return str(spike.first_mover.site)

    def test_an_update_can_be_the_first_mover(self) -> None:
        """Each parameter has a usual ratio of its own."""
        run = self.watched(lambda step, place: 1e-3 * 2.0**place)
        assert "update of layer3.weight" in self.first_mover(run, 8e-3 * 6)

    def test_less_than_a_factor_of_four_is_inside(self) -> None:
        run = self.watched(lambda step, place: 1e-3 * 2.0**place)
        assert "parameter first.weight" in self.first_mover(run, 8e-3 * 3)

    @pytest.mark.parametrize("to", [0.01, 30.0])
    def test_a_schedule_is_inside(self, to: float) -> None:
        run = self.watched(lambda step, place: 1e-3 * to ** (step / 960))
        assert [event.kind for event in run.watcher.events] == []
        assert "parameter first.weight" in self.first_mover(run, 1e-3 * to)


def test_the_phase_of_a_ratio() -> None:
    assert phase_of(Site("a", "Linear", "optimizer", "update_ratio", 0, "weight")) == UPDATE
    assert phase_of(Site("a", "Linear", "optimizer", "lost_updates", 0, "weight")) == 0
