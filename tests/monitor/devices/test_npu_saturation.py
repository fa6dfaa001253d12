"""An Ascend NPU that saturates, on the fake accelerator: its largest number as an event, and its
overflow status.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import fastcheck
from fastcheck.ring.device import DeviceRing
from fastcheck.selftest import check_values
from fastcheck.types import Verdict
from support.devices import ascend
from support.devices.ascend import SATURATED, Chip, Net, loop, too_large
from support.programs.training import change_gradient, poison, stopped, where

pytestmark = [pytest.mark.fake_npu, pytest.mark.usefixtures("fresh_npu")]
fake = ascend.fake
#: A ring that is always full: segments of so many slots, and how many segments.
NO_SLOTS = (4, 0)


class TestSaturatedValues:
    @pytest.mark.parametrize("record", ["health", "full"])
    @pytest.mark.parametrize("sync", ["never", "step", "call"])
    def test_an_output_stops_the_run(self, saturating_chip: Chip, sync: str, record: str) -> None:
        model = Net()
        fastcheck.install(model, sync=sync, record=record)
        stop = stopped(loop, model, 20, 3, too_large(saturating_chip))
        assert where(stop.culprit) == ("hole", "output", "output", "origin")
        assert stop.step == 3
        assert stop.culprit.record["saturated_count"] == 1
        assert not fastcheck.types.Flag.NONFINITE & int(stop.culprit.record["flags"])
        assert str(stop).startswith("1 saturated in output of hole (Apply)")
        assert "1. This device saturates" in str(stop)

    def test_a_gradient_stops_the_run(self, saturating_chip: Chip) -> None:
        model = Net()
        fastcheck.install(model)
        damage = too_large(saturating_chip)
        stop = stopped(loop, model, 20, 3, lambda x: change_gradient(x, damage))
        assert (stop.step, stop.culprit.site.direction) == (3, "backward")
        assert stop.culprit.verdict is Verdict.ORIGIN
        assert stop.culprit.site.module == "hole"

    def test_a_gradient_of_a_weight(self, saturating_chip: Chip) -> None:
        model = Net()
        fastcheck.install(model)
        model.first.weight.register_hook(lambda g: torch.full_like(g, SATURATED))
        stop = stopped(loop, model, 9)
        assert where(stop.culprit) == ("first", "param_grad", "weight", "origin")

    def test_a_negative_one_is_no_event_in_an_output_alone(self, saturating_chip: Chip) -> None:
        """A mask: -Inf, or finfo.min, becomes the same number."""
        model = Net()
        monitor = fastcheck.install(model)
        loop(model, 4, 2, lambda x: saturating_chip.result(poison(x, float("-inf"))))
        monitor.flush()
        found = [event for event in monitor.events if event.site.module == "hole"]
        assert [event.verdict for event in found] == [Verdict.UNRESOLVED]
        assert "all that saturated is negative" in found[0].reason
        assert monitor.event_count == 0

    def test_a_negative_one_counts_once_harm_follows(self, saturating_chip: Chip) -> None:
        model = Net()
        fastcheck.install(model)

        def damage(x: torch.Tensor) -> torch.Tensor:
            return saturating_chip.result(
                poison(change_gradient(x, too_large(saturating_chip)), float("-inf"))
            )

        stop = stopped(loop, model, 9, 2, damage)
        assert where(stop.culprit) == ("hole", "output", "output", "origin")

    def test_a_batch_and_a_weight_may_hold_the_largest_number(self, saturating_chip: Chip) -> None:
        model = Net()
        with torch.no_grad():
            model.first.weight[0, 0] = SATURATED
        monitor = fastcheck.install(model, overflow_nums=-1)
        with torch.no_grad():
            x = torch.zeros(2, 8, dtype=torch.float16)
            x[0, 1] = SATURATED
            model(x.to("npu"))
        monitor.flush()
        assert monitor.events == ()

    def test_a_nan_from_the_host_still_counts(self, saturating_chip: Chip) -> None:
        model = Net()
        fastcheck.install(model)
        stop = stopped(loop, model, 9, 1, poison)
        assert where(stop.culprit) == ("hole", "output", "output", "origin")
        assert str(stop).startswith("1 NaN in output of hole")

    def test_no_fused_update_applies_it(self, saturating_chip: Chip) -> None:
        model = Net()
        monitor = fastcheck.install(
            model, stop=fastcheck.Stop(protect_weights=True), overflow_nums=-1
        )
        model.first.bias.register_hook(lambda g: torch.full_like(g, -SATURATED))
        before = [p.detach().clone() for p in model.parameters()]
        loop(model, 2, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1, fused=True))
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
        monitor.remove()
        assert {event.site.label for event in monitor.events} == {"bias"}

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    def test_found_nonfinite_takes_it_for_what_it_was(
        self, saturating_chip: Chip, dtype: Any
    ) -> None:
        info = torch.finfo(dtype)
        x = torch.zeros(5, dtype=dtype, device="npu")
        below = torch.nextafter(torch.tensor(info.max, dtype=dtype), torch.tensor(0.0, dtype=dtype))
        for value, found in ((below, 0), (info.max, 1), (info.min, 1), (float("nan"), 1)):
            x[3] = value
            assert fastcheck.found_nonfinite([torch.ones(2, device="npu"), x]).item() == found

    def test_found_nonfinite_leaves_other_types_alone(self, saturating_chip: Chip) -> None:
        """Whatever stands first in the list."""
        x = torch.full((3,), torch.finfo(torch.float64).max, dtype=torch.float64, device="npu")
        y = torch.ones(2, device="npu")
        assert fastcheck.found_nonfinite([x, y]).item() == 0
        y[0] = torch.finfo(torch.float32).max
        assert fastcheck.found_nonfinite([x, y]).item() == 1

    def test_a_full_ring_keeps_it(
        self, saturating_chip: Chip, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(DeviceRing.__init__, "__defaults__", NO_SLOTS)
        model = Net()
        monitor = fastcheck.install(model, overflow_nums=-1)
        loop(model, 1, 0, too_large(saturating_chip))
        monitor.flush()
        assert "found no slot in a full ring" in monitor.summary()
        assert ("hole", "output", "output", "origin") in map(where, monitor.events)


class TestStatus:
    def hidden(self, chip: Chip) -> Any:
        """Overflows inside the operation alone: what it returns is an ordinary number."""

        def damage(x: torch.Tensor) -> torch.Tensor:
            chip.flag(poison(x))
            return x.clone()

        return damage

    def test_a_hit_that_no_value_shows_is_a_process_overflow(self, saturating_chip: Chip) -> None:
        model = Net()
        monitor = fastcheck.install(model)
        loop(model, 6, 2, self.hidden(saturating_chip))
        monitor.flush()
        (event,) = monitor.events
        assert (event.verdict, event.step, event.counted) == (Verdict.ABSORBED, 2, False)
        assert event.reason.startswith(
            "process overflow on npu:0 between the boundaries of step 1 and step 2"
        )
        assert event.site.role == "overflow_status"
        summary = " ".join(monitor.summary().split())
        assert "has been set since the boundary of step 2" in summary
        assert "absorbed 1" in summary

    def test_it_is_never_called_clean(self, saturating_chip: Chip) -> None:
        model = Net()
        monitor = fastcheck.install(model)
        loop(model, 3)
        monitor.flush()
        assert monitor.events == ()
        summary = " ".join(monitor.summary().split())
        assert "npu:0 saturates" in summary and "a NaN leaves 0" in summary
        assert "newly been set at 0 of 3 step boundaries" in summary

    def test_a_hit_that_values_explain_is_no_event_of_its_own(self, saturating_chip: Chip) -> None:
        model = Net()
        monitor = fastcheck.install(model, overflow_nums=-1)
        loop(model, 4, 2, too_large(saturating_chip))
        monitor.flush()
        assert "overflow_status" not in {event.site.role for event in monitor.events}
        assert {event.step for event in monitor.events} == {2}

    def test_the_word_is_left_alone_unless_asked(self, saturating_chip: Chip) -> None:
        model = Net()
        with fastcheck.install(model):
            loop(model, 4, 1, self.hidden(saturating_chip))
        assert saturating_chip.words[0].cpu()[0] == 1

    def test_on_request_it_is_cleared_and_dates_each_hit(self, saturating_chip: Chip) -> None:
        model = Net()
        saturating_chip.flag(torch.full((1,), float("nan"), device="npu"))
        monitor = fastcheck.install(model, training=fastcheck.Training(reset_overflow_status=True))
        for _ in range(3):
            loop(model, 2, 1, self.hidden(saturating_chip))
        loop(model, 1, 0, self.hidden(saturating_chip))
        monitor.flush()
        assert [event.step for event in monitor.events] == [1, 3, 5, 6]
        assert saturating_chip.words[0].cpu()[0] == 0
        assert "had been set at 4 of 7 step boundaries" in " ".join(monitor.summary().split())

    def test_what_was_set_before_is_said_to_be(self, saturating_chip: Chip) -> None:
        saturating_chip.flag(torch.full((1,), float("nan"), device="npu"))
        model = Net()
        monitor = fastcheck.install(model)
        loop(model, 2)
        monitor.flush()
        (event,) = monitor.events
        assert "before the boundary of step 0" in event.reason

    def test_what_someone_else_clears_is_seen_again(self, saturating_chip: Chip) -> None:
        model = Net()
        monitor = fastcheck.install(model)
        for _ in range(2):
            loop(model, 2, 1, self.hidden(saturating_chip))
            saturating_chip.words[0].zero_()
            loop(model, 1)
        monitor.flush()
        assert [event.step for event in monitor.events] == [1, 4]

    def test_the_interval_spans_the_steps_that_every_skips(self, saturating_chip: Chip) -> None:
        model = Net()
        monitor = fastcheck.install(model, every=3)
        loop(model, 5, 1, self.hidden(saturating_chip))
        monitor.flush()
        (event,) = monitor.events
        assert "between the boundaries of step 0 and step 3" in event.reason

    def test_a_full_ring_clears_nothing(
        self, saturating_chip: Chip, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What was not read yet must be there at the next boundary."""
        monkeypatch.setattr(DeviceRing.__init__, "__defaults__", NO_SLOTS)
        model = Net()
        monitor = fastcheck.install(model, training=fastcheck.Training(reset_overflow_status=True))
        loop(model, 1, 0, self.hidden(saturating_chip))
        monitor.flush()
        assert saturating_chip.words[0].cpu()[0] == 1

    def test_each_device_has_its_own(self, saturating_chip: Chip) -> None:
        models = [Net(f"npu:{index}") for index in (0, 1)]
        monitors = [
            fastcheck.install(model, training=fastcheck.Training(reset_overflow_status=True))
            for model in models
        ]
        for index, model in enumerate(models):
            damage = self.hidden(saturating_chip) if index else None
            loop(model, 3, 1 if index else None, damage, device=f"npu:{index}")
        for monitor in monitors:
            monitor.flush()
        assert monitors[0].events == ()
        (event,) = monitors[1].events
        assert "process overflow on npu:1" in event.reason
        assert fake.current_device() == 0

    @pytest.mark.parametrize("reset", [False, True])
    def test_nothing_waits(self, saturating_chip: Chip, reset: bool) -> None:
        model = Net()
        monitor = fastcheck.install(
            model,
            stop=fastcheck.Stop(max_lag=None),
            record="health",
            training=fastcheck.Training(reset_overflow_status=reset),
        )
        loop(model, 3, 1, self.hidden(saturating_chip))
        monitor.flush()
        fake.synchronize()
        before = fake.counters()
        loop(model, 2, 1, self.hidden(saturating_chip))
        spent = fake.counters() - before
        assert spent.synchronisations == spent["blocking_copy"] == 0
        monitor.flush()
        assert "overflow_status" in {site.role for site in monitor.sites}

    def test_training_is_bit_identical(self, saturating_chip: Chip) -> None:
        def run(observed: bool) -> list[torch.Tensor]:
            torch.manual_seed(0)
            model = Net()
            if observed:
                fastcheck.install(
                    model, overflow_nums=-1, training=fastcheck.Training(reset_overflow_status=True)
                )
            loop(model, 4, 1, too_large(saturating_chip))
            return [p.cpu() for p in model.parameters()]

        assert all(torch.equal(a, b) for a, b in zip(run(False), run(True)))

    def test_a_status_that_can_t_be_read_is_said_once(
        self, saturating_chip: Chip, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(tensor: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("EZ9999: no such operator")

        monkeypatch.setattr(sys.modules["torch_npu"], "npu_get_float_status", fail)
        model = Net()
        monitor = fastcheck.install(model)
        with pytest.warns(fastcheck.FastcheckWarning, match="the overflow status of npu:0") as said:
            loop(model, 3)
        assert len(said) == 1
        monitor.flush()
        assert "an overflow may be missed" in " ".join(monitor.summary().split())

    def test_a_torch_npu_without_the_operators(
        self, saturating_chip: Chip, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delattr(sys.modules["torch_npu"], "npu_get_float_status")
        model = Net()
        monitor = fastcheck.install(model)
        loop(model, 2)
        monitor.flush()
        assert "its overflow status can't be read" in " ".join(monitor.summary().split())


def test_the_option_is_checked() -> None:
    with pytest.raises(fastcheck.ConfigError, match="reset_overflow_status must be a bool"):
        fastcheck.install(Net(), training=fastcheck.Training(reset_overflow_status="yes"))  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.usefixtures("saturating_chip")
def test_doctor_knows_the_mode_of_the_records() -> None:
    assert check_values(torch.device("npu", 0)).endswith("17 dtypes")
