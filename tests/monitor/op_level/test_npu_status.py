"""level="op" on an Ascend NPU that saturates, on the fake accelerator: its overflow status, read
behind each operator.
"""

from __future__ import annotations

import sys
from typing import Any, Callable

import pytest
import torch

import fastcheck
from fastcheck.types import Verdict
from support.devices import ascend
from support.devices.ascend import SATURATED, Chip, Computing
from support.devices.ascend_ops import (
    NAME,
    counted,
    line,
    loop,
    net,
    overflowing,
    summary,
    watching,
)

pytestmark = [pytest.mark.fake_npu, pytest.mark.usefixtures("fresh_npu", "op_observer")]
fake = ascend.fake


class TestStatus:
    def hit(self, computing: Computing, *steps: int) -> Callable[[int], None]:
        """In these steps something overflows within tanh."""

        def before(step: int) -> None:
            computing.inside = "aten.tanh.default" if step in steps else ""

        return before

    def test_it_names_the_operators_between_which_it_was_set(self, computing: Computing) -> None:
        def function(x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x * 2) + 1

        model = net(function)
        with watching(model) as monitor:
            loop(model, 5, before=self.hit(computing, 2, 3))
        (event,) = monitor.events
        assert (event.verdict, event.step, event.counted) == (Verdict.ABSORBED, 2, False)
        assert event.reason.startswith(
            "process overflow on npu:0 between aten.mul.Tensor #0 in 1 (Apply) and aten.tanh #0 in "
            "1 (Apply): its overflow status was set"
        )
        assert (event.site.role, event.site.op) == ("overflow_status", "aten.tanh")
        assert line(function) in event.line
        said = summary(monitor)
        assert "has been set since aten.tanh #0 in 1 (Apply) of step 2" in said
        assert "absorbed 1" in said and "npu:0 saturates" in said

    def test_in_backward(self, computing: Computing) -> None:
        model = net(torch.tanh)
        computing.inside = "aten.tanh_backward.default"
        with watching(model) as monitor:
            loop(model, 1)
        (event,) = monitor.events
        assert "and the backward of aten.tanh #0 in 1 (Apply)" in event.reason

    def test_with_reset_each_hit_is_dated(
        self, saturating_chip: Chip, computing: Computing
    ) -> None:
        model = net(torch.tanh)
        saturating_chip.words[0].fill_(1)
        with watching(model, training=fastcheck.Training(reset_overflow_status=True)) as monitor:
            loop(model, 6, before=self.hit(computing, 1, 2, 4))
        assert [event.step for event in monitor.events] == [1, 2, 4]
        assert {event.site.op for event in monitor.events} == {"aten.tanh"}
        assert saturating_chip.words[0].cpu()[0] == 0
        assert "had been set at 3 of " in summary(monitor)

    def test_without_it_the_word_is_left_alone(
        self, saturating_chip: Chip, computing: Computing
    ) -> None:
        model = net(torch.tanh)
        with watching(model):
            loop(model, 3, before=self.hit(computing, 1))
        assert saturating_chip.words[0].cpu()[0] == 1

    def test_what_someone_else_clears_is_seen_again(
        self, saturating_chip: Chip, computing: Computing
    ) -> None:
        model = net(torch.tanh)

        def before(step: int) -> None:
            saturating_chip.words[0].zero_()
            self.hit(computing, 1, 3)(step)

        with watching(model) as monitor:
            loop(model, 5, before=before)
        assert [event.step for event in monitor.events] == [1, 3]
        assert "had newly been set at 2 of " in summary(monitor)

    def test_what_was_set_before(self, saturating_chip: Chip, computing: Computing) -> None:
        saturating_chip.words[0].fill_(1)
        model = net(torch.tanh)
        with watching(model) as monitor:
            loop(model, 2)
        (event,) = monitor.events
        assert "process overflow on npu:0 until aten." in event.reason

    @pytest.mark.parametrize("reset", [False, True])
    def test_values_that_show_it_say_more(self, computing: Computing, reset: bool) -> None:
        model = net(lambda x: torch.tanh(overflowing(x)))
        with watching(model, training=fastcheck.Training(reset_overflow_status=reset)) as monitor:
            loop(model, 1)
        assert "aten.exp" in counted(monitor)
        assert "overflow_status" not in {event.site.role for event in monitor.events}

    def test_values_elsewhere_in_the_step_do_not_hide_it(self, computing: Computing) -> None:
        def function(x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(x)
            return y + torch.tanh(overflowing(x * 1))

        model = net(function)
        computing.inside = "aten.tanh.default"
        with watching(model, training=fastcheck.Training(reset_overflow_status=True)) as monitor:
            loop(model, 1)
        hits = [event for event in monitor.events if event.site.role == "overflow_status"]
        assert [int(event.record["call"]) for event in hits] == [0, 1]

    def test_what_no_operator_shows_is_left_to_the_boundary(
        self, saturating_chip: Chip, computing: Computing
    ) -> None:
        """An overflow that one reading has shown is not reported again there."""
        model = net(torch.tanh)
        with watching(
            model,
            filter=fastcheck.Filter(ops=["addmm"]),
            training=fastcheck.Training(reset_overflow_status=True),
        ) as monitor:
            loop(model, 3, before=self.hit(computing, 1))
        (event,) = monitor.events
        assert "between aten.addmm #0 in 0 (Linear) and aten.addmm #1 in 2 (Linear)" in event.reason
        with watching(model, filter=fastcheck.Filter(ops=["addmm"])) as monitor:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)

            def overflow(*_: Any) -> None:
                saturating_chip.words[0].fill_(1)

            optimizer.register_step_pre_hook(overflow)
            loop(model, 2, optimizer=optimizer)
        (event,) = monitor.events
        assert "aten.addmm #0 in 0 (Linear) and the boundary of step 0" in event.reason

    def test_a_loss_explains_what_no_operator_shows(
        self, saturating_chip: Chip, computing: Computing
    ) -> None:
        model = net(torch.tanh)
        with watching(model, filter=fastcheck.Filter(ops=["addmm"])) as monitor, torch.no_grad():
            model(torch.ones(2, 8, dtype=torch.float16, device=NAME))
            saturating_chip.words[0].fill_(1)
            monitor.step(loss=torch.full((), SATURATED, dtype=torch.float16, device=NAME))
        assert [event.site.role for event in monitor.events] == ["loss"]

    def test_each_device_has_its_own(self, saturating_chip: Chip, computing: Computing) -> None:
        model = net(torch.tanh)
        with watching(model) as monitor:
            y = model(torch.ones(4, 8, dtype=torch.float16, device=NAME))
            computing.inside = "aten.sin.default"
            _ = torch.cos(torch.ones(4, device="npu:1"))
            _ = torch.sin(torch.ones(4, device="npu:1"))
            y.sum().backward()
        (event,) = monitor.events
        assert "process overflow on npu:1 between aten.ones #2 in outside" in event.reason
        assert fake.current_device() == 0
        assert "npu:0 saturates" in summary(monitor) and "npu:1 saturates" in summary(monitor)

    def test_clean_words_are_no_records(self, computing: Computing) -> None:
        model = net(torch.tanh)
        with watching(model) as monitor:
            loop(model, 3)
        roles = [monitor.sites[int(record["site"])] for record in monitor.records()]
        assert sum(site.role == "overflow_status" for site in roles) == 3
        said = summary(monitor)
        assert "newly been set at 0 of " in said and "behind operators and at step" in said
        assert monitor.events == ()

    @pytest.mark.parametrize("fails", ["npu_get_float_status", "npu_clear_float_status"])
    def test_one_that_can_t_be_read_is_said_once(
        self, computing: Computing, monkeypatch: pytest.MonkeyPatch, fails: str
    ) -> None:
        def fail(tensor: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("EZ9999: no such operator")

        model = net(torch.tanh)
        monkeypatch.setattr(sys.modules["torch_npu"], fails, fail)
        told = pytest.warns(fastcheck.FastcheckWarning, match="the overflow status of npu:0")
        with (
            told as said,
            watching(model, training=fastcheck.Training(reset_overflow_status=True)) as monitor,
        ):
            loop(model, 3)
        assert len(said) == 1 and monitor.events == ()
        assert "an overflow may be missed" in summary(monitor)

    def test_call_reads_it_at_boundaries(self, computing: Computing) -> None:
        model = net(torch.tanh)
        with watching(model, sync="call") as monitor:
            loop(model, 4, before=self.hit(computing, 2))
        (event,) = monitor.events
        assert "between the boundaries of step 1 and step 2" in event.reason
        assert "npu:0 saturates" in summary(monitor)
