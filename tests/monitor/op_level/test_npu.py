"""level="op" on an Ascend NPU that saturates, on the fake accelerator: its largest number is
followed from operator to operator.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fastcheck
from fastcheck.record.format import RECORD_DTYPE, DeviceMode
from fastcheck.record.site import Site
from fastcheck.types import Verdict
from fastcheck.verdict.entries import Entered
from support.devices import ascend
from support.devices.ascend import SATURATED, Computing, use_chip
from support.devices.ascend_ops import (
    NAME,
    Function,
    attention,
    counted,
    line,
    loop,
    net,
    overflowing,
    summary,
    upper,
    watching,
)
from support.programs.op_level import INF, culprit
from support.programs.training import Apply, batches, stopped

pytestmark = [pytest.mark.fake_npu, pytest.mark.usefixtures("fresh_npu", "op_observer")]
fake = ascend.fake
LOWEST = torch.finfo(torch.float16).min


class Scaled(torch.autograd.Function):
    """The identity, whose gradient is too large."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return (gradient.abs() + 1) * 3e38 * 3e38


class Bounded(Scaled):
    """Nothing of it is left in what the gradient becomes."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.tanh((gradient.abs() + 1) * 3e38 * 3e38)


class TestValues:
    @pytest.mark.parametrize("sync", ["never", "step", "call"])
    @pytest.mark.parametrize("record", ["health", "full"])
    def test_an_output(self, computing: Computing, sync: str, record: str) -> None:
        model = net(lambda x: x)

        def before(step: int) -> None:
            model[1].function = overflowing if step == 2 else Apply().function

        fastcheck.install(model, level="op", sync=sync, record=record)
        stop = stopped(loop, model, 8, before=before)
        assert culprit(stop) == ("1", "aten.exp", "forward", "origin")
        assert stop.step == 2 and line(overflowing) in stop.culprit.line
        assert stop.culprit.record["device_mode"] == int(DeviceMode.SATURATING)
        assert str(stop).startswith("32 saturated in output of aten.exp #0 in 1 (Apply)")
        assert "This device saturates" in str(stop)

    @pytest.mark.parametrize("sync", ["never", "call"])
    def test_a_gradient(self, computing: Computing, sync: str) -> None:
        model = net(Scaled.apply)
        fastcheck.install(model, level="op", sync=sync, record="stats")
        stop = stopped(loop, model)
        assert stop.culprit.site.direction == "backward" and stop.step == 0
        assert stop.culprit.verdict is Verdict.ORIGIN
        assert "aten.mul" in stop.culprit.site.label + str(stop.culprit.site.op)

    def test_what_follows_from_it_is_propagated(self, computing: Computing) -> None:
        model = net(lambda x: overflowing(x) * 3)
        with watching(model) as monitor, torch.no_grad():
            model(torch.ones(2, 8, dtype=torch.float16, device=NAME))
        assert counted(monitor) == ["aten.exp"]
        after = [event.verdict for event in monitor.events if not event.counted]
        assert after and set(after) == {Verdict.PROPAGATED}

    def test_finite_consumers_excuse_only_what_is_negative(self, computing: Computing) -> None:
        """Nothing makes a NaN of the largest number, so that no NaN proves nothing."""
        model = net(lambda x: torch.tanh(overflowing(x)))
        with watching(model) as monitor, torch.no_grad():
            model(torch.ones(2, 8, dtype=torch.float16, device=NAME))
        assert counted(monitor) == ["aten.exp"]
        model = net(lambda x: torch.exp((x.abs() + 2) * -60000))
        with watching(model) as monitor, torch.no_grad():
            model(torch.ones(2, 8, dtype=torch.float16, device=NAME))
        (event,) = (event for event in monitor.events if event.site.role == "output")
        assert (event.site.op, event.verdict) == ("aten.mul.Tensor", Verdict.ABSORBED)

    def test_a_negative_one_of_which_a_positive_is_made_counts(self, computing: Computing) -> None:
        def function(x: torch.Tensor) -> torch.Tensor:
            y = (x.abs() + 1).mul(-1).mul(60000).mul(2)
            return torch.tanh(y * y)

        model = net(function)
        with watching(model) as monitor:
            loop(model, 1)
        event = next(event for event in monitor.events if event.counted)
        assert event.verdict is Verdict.ORIGIN
        assert "made a positive one of it" in event.reason

    @pytest.mark.parametrize("record", ["health", "stats"])
    @pytest.mark.parametrize(
        "mask",
        [
            lambda s: s.masked_fill(upper(s), -INF),
            lambda s: s.masked_fill(upper(s), torch.finfo(s.dtype).min),
            lambda s: s + upper(s).to(s.dtype) * torch.finfo(s.dtype).min,
            lambda s: s + torch.full(s.shape[-2:], LOWEST, dtype=s.dtype, device=NAME).triu(1),
            lambda s: s + torch.full(s.shape[-2:], -INF, dtype=s.dtype, device=NAME).triu(1),
            lambda s: torch.where(upper(s), torch.tensor(LOWEST, dtype=s.dtype).to(NAME), s),
        ],
    )
    @pytest.mark.parametrize("sync", ["never", "call"])
    def test_a_mask_is_healthy(
        self, computing: Computing, mask: Function, record: str, sync: str
    ) -> None:
        model = attention(mask)
        with watching(model, record=record, sync=sync) as monitor:
            loop(model, 3, shape=(2, 6, 8))
        assert counted(monitor) == []
        assert {event.verdict for event in monitor.events} & {Verdict.INTENDED}

    def test_numbers_that_are_written_are_no_overflow(self, computing: Computing) -> None:
        """But a product with the largest number is one."""
        mask = torch.zeros(4, 8, dtype=torch.bool)
        mask[0, 0] = True

        def fill(x: torch.Tensor) -> torch.Tensor:
            return x.masked_fill(mask.to(NAME), SATURATED).amin(0).expand(4, 8)

        model = net(fill)
        with watching(model) as monitor:
            loop(model, 1)
        assert counted(monitor) == []
        scale = net(lambda x: torch.tanh((x.abs() + 2) * SATURATED))
        with watching(scale) as monitor:
            loop(scale, 1)
        assert counted(monitor)[0] == "aten.mul.Tensor"

    @pytest.mark.parametrize("sync", ["never", "call"])
    def test_a_batch_and_a_weight_may_hold_it(self, computing: Computing, sync: str) -> None:
        model = net(lambda x: x)
        with torch.no_grad():
            model[0].weight.zero_()
            model[0].weight[0, 0] = SATURATED
        x = torch.zeros(2, 8, dtype=torch.float16)
        x[0, 1] = SATURATED
        with watching(model, sync=sync) as monitor, torch.no_grad():
            model(x.to(NAME))
            model(x.pin_memory().to(NAME, non_blocking=True).clone())
        assert counted(monitor) == []
        assert {event.verdict for event in monitor.events} == {Verdict.INTENDED}

    def test_a_type_that_is_too_narrow(self, computing: Computing) -> None:
        """What a copy reads is not its excuse where that was no largest number."""
        with watching(net(lambda x: x)) as monitor:
            _ = torch.full((4,), 1e6).to(NAME).to(torch.float16)
        assert counted(monitor) == ["aten._to_copy"]

    def test_a_gradient_that_was_given(self, computing: Computing) -> None:
        model = net(lambda x: x)
        gradient = torch.full((2, 4), SATURATED, dtype=torch.float16, device=NAME)
        with watching(model) as monitor:
            model(torch.ones(2, 8, dtype=torch.float16, device=NAME)).backward(gradient)
        first = monitor.events[0]
        assert (first.site.role, first.verdict) == ("grad_output", Verdict.ARRIVED)

    # Each update is skipped, and the watch tells so.
    @pytest.mark.filterwarnings("ignore::fastcheck.PrecisionWarning")
    @pytest.mark.parametrize("skips", [True, False])
    def test_loss_scaling(self, computing: Computing, skips: bool) -> None:
        """What the scaler skips is scaled, and what it doesn't see counts."""
        model = net(Scaled.apply).float()
        scaler = torch.amp.GradScaler("npu", init_scale=2.0)
        original = torch._amp_foreach_non_finite_check_and_unscale_

        def check(gradients: Any, found: torch.Tensor, inverse: torch.Tensor) -> None:
            original(gradients, found, inverse)
            if skips:  # as torch_npu's does, which asks the status
                found.fill_(1)

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", check)
            with watching(model) as monitor:
                for x in batches(3):
                    optimizer.zero_grad()
                    loss = model(x.to(NAME)).square().mean()
                    scaler.scale(loss).backward()
                    scaler.step(optimizer)
                    scaler.update()
        verdicts = {event.verdict for event in monitor.events}
        assert Verdict.SCALED in verdicts if skips else Verdict.ORIGIN in verdicts
        assert bool(counted(monitor)) != skips

    def test_finite_consumers_do_not_excuse_a_scaled_gradient(self, computing: Computing) -> None:
        """That the scaler doesn't see."""
        model = net(Bounded.apply).float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("npu", init_scale=2.0)
        with watching(model) as monitor:
            scaler.scale(model(torch.ones(2, 8, device=NAME)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        (event,) = (event for event in monitor.events if event.counted)
        assert "aten.mul.Tensor" in event.site.label + str(event.site.op)

    def test_what_comes_through_a_collective_is_no_plain_number(self) -> None:
        record = np.zeros((), RECORD_DTYPE)[()]
        record["device_mode"], record["saturated_count"] = int(DeviceMode.SATURATING), 1
        record["dtype"], record["depth"], record["numel"] = 2, 1, 4
        model = nn.Linear(2, 2)
        with fastcheck.install(model, level="op") as monitor:
            record["site"] = monitor._session.sites.intern(
                Site("", "", "forward", "input", 0, "input")
            )
            step = monitor._event_store.new_step(9)
            for seq, verdict in ((0, Verdict.INTENDED), (1, Verdict.ARRIVED)):
                record["seq"] = seq
                step.rules.apply(Entered(seq, is_collective=seq == 1), {seq: record.copy()})
                assert step.findings.by_seq[seq].verdict is verdict


class TestHarmless:
    @pytest.mark.parametrize("record", ["health", "full"])
    @pytest.mark.parametrize("reset", [False, True])
    def test_nothing_waits_and_nothing_changes(
        self, computing: Computing, record: str, reset: bool
    ) -> None:
        def run(is_watched: bool) -> list[torch.Tensor]:
            torch.manual_seed(0)
            mask = attention(lambda s: s.masked_fill(upper(s), LOWEST))
            model = nn.Sequential(mask, net(torch.tanh))
            optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, foreach=False)
            options: dict[str, Any] = {"record": record, "overflow_nums": -1}
            options["stop"] = fastcheck.Stop(max_lag=None)
            options["training"] = fastcheck.Training(reset_overflow_status=reset)
            monitor = fastcheck.install(model, level="op", **options) if is_watched else None
            computing.inside = "aten.tanh.default"
            losses = loop(model, 3, shape=(2, 6, 8), optimizer=optimizer)
            fake.synchronize()
            before = fake.counters()
            losses += loop(model, 3, shape=(2, 6, 8), optimizer=optimizer)
            spent = fake.counters() - before
            fake.synchronize()
            assert spent.synchronisations == spent["blocking_copy"] == 0
            if monitor is not None:
                monitor.remove()
                hits = [e for e in monitor.events if e.site.role == "overflow_status"]
                assert len(hits) >= (6 if reset else 1)
                said = summary(monitor)
                assert "no longer observes" not in said and "full ring" not in said
            return [*losses, *model.parameters()]

        plain = run(False)
        for mine, theirs in zip(run(True), plain):
            assert torch.equal(mine.cpu(), theirs.cpu())

    @pytest.mark.parametrize("name", ["Ascend910B1", "Ascend9501"])
    def test_a_chip_with_infinities_is_followed_as_before(
        self, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        chip = use_chip(monkeypatch, name)
        computing = Computing(chip)
        computing.inside = "aten.tanh.default"
        model = net(lambda x: torch.tanh(overflowing(x)))
        with computing, watching(model) as monitor, torch.no_grad():
            model(torch.ones(2, 8, dtype=torch.float16, device=NAME))
        verdicts = {event.site.op: event.verdict for event in monitor.events}
        assert verdicts == {"aten.exp": Verdict.ABSORBED}
        assert "saturates" not in summary(monitor)
        assert "overflow_status" not in {site.role for site in monitor.sites}
        largest = net(lambda x: x.clamp(max=SATURATED) + (x * 0 + SATURATED))
        with watching(largest) as monitor, torch.no_grad():
            largest(torch.ones(2, 8, dtype=torch.float16, device=NAME))
        assert monitor.events == ()

    def test_the_step_that_is_run_again_knows_it(self, computing: Computing) -> None:
        model = net(overflowing)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monitor = fastcheck.install(model, sync="step", stop=fastcheck.Stop(replay=True))

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            F.relu(model(x)).float().sum().backward()
            optimizer.step()

        x = torch.ones(2, 8, dtype=torch.float16, device=NAME)
        stop = stopped(monitor.run, step, x)
        assert stop.culprit.site.module == "1" and stop.report.replay is not None
        assert stop.report.replay.stop is not None
        assert culprit(stop.report.replay.stop)[1] == "aten.exp"
