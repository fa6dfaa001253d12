"""install() on an accelerator: verdicts and stops are the CPU's, and weights are protected."""

from __future__ import annotations

import contextlib
import traceback
from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.types import Verdict
from support.devices.training_on_fake import NAME, fake, loop
from support.programs.training import Apply, batches, deep, nan_gradient, poison, stopped, where
from support.ranks import training_workers as training_work
from support.ranks.ranks_harness import run_ranks, values

pytestmark = [pytest.mark.fake_accelerator, pytest.mark.usefixtures("fake_accelerator")]


class TestStops:
    def test_never_names_the_culprit_of_an_earlier_step(self) -> None:
        model = deep(3).to(NAME)
        monitor = fastcheck.install(model, sync="never")
        stop = stopped(loop, model, 20, fault=7)
        assert where(stop.culprit) == ("tail", "output", "output", "origin")
        assert stop.step == 7
        assert monitor.step_index <= 7 + 3
        assert stop.log_path is not None
        assert stop.culprit.record["nan_count"] == 1

    def test_step_stops_before_the_optimizer_uses_a_bad_gradient(self) -> None:
        model = deep(3).to(NAME)
        fastcheck.install(model, sync="step", record="health")
        stop = stopped(loop, model, 20, fault=7, damage=nan_gradient)
        assert stop.step == 7
        assert stop.culprit.site.role == "grad_input"
        assert all(bool(p.isfinite().all()) for p in model.parameters())

    def test_call_stops_at_the_line(self) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.bad, self.b = nn.Linear(8, 8), Apply(poison), nn.Linear(8, 8)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = self.a(x)
                x = self.bad(x)  # the line
                return self.b(x)

        model = Model().to(NAME)
        # Elsewhere the end of the outermost call decides.
        strict = fastcheck.Stop(count="all")
        fastcheck.install(model, sync="call", record="health", stop=strict)
        with pytest.raises(fastcheck.OverflowDetected) as caught:
            model(torch.ones(2, 8, device=NAME))
        assert where(caught.value.culprit) == ("bad", "output", "output", "origin")
        frames = traceback.extract_tb(caught.value.__traceback__)
        mine = [frame.line for frame in frames if frame.filename == __file__]
        assert mine[-1] == "x = self.bad(x)  # the line"

    def test_a_weight_that_an_update_broke(self) -> None:
        model = deep(3).to(NAME)
        fastcheck.install(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loop(model, 2, optimizer=optimizer)
        with torch.no_grad():
            model.layer1.weight[0, 0] = float("nan")
        stop = stopped(loop, model, 10, optimizer=optimizer)
        assert where(stop.culprit) == ("layer1", "param", "weight", "arrived")
        assert "was finite just before the update of step 1" in stop.culprit.reason

    def test_a_weight_that_broke_before_a_pass_without_gradients(self) -> None:
        """The weight is read before the next update: what that pass has made is judged before."""
        model = deep(3).to(NAME)
        monitor = fastcheck.install(model)
        loop(model, 2)
        monitor.flush()
        with torch.no_grad():
            model.layer1.weight[0, 0] = float("nan")
            model(torch.ones(2, 8, device=NAME))
        stop = stopped(monitor.flush)
        assert where(stop.culprit) == ("layer1", "output", "output", "origin")
        assert "including its parameters when they were last read" in stop.culprit.reason
        assert stop.report.broken_weights == ("layer1.weight",)

    def test_only_its_own_training_is_stopped(self) -> None:
        """What is due for one model is not raised where another one trains."""
        bad, good = deep(2).to(NAME), deep(2).to(NAME)
        fastcheck.install(bad)
        fastcheck.install(good)
        loop(bad, 1, fault=0)
        optimizer = torch.optim.SGD(good.parameters(), lr=0.01)
        loop(good, 3, optimizer=optimizer)
        scaler = torch.amp.GradScaler(NAME)
        scaler.scale(good(torch.ones(2, 8, device=NAME)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        stop = stopped(loop, bad, 2)
        assert where(stop.culprit) == ("tail", "output", "output", "origin")

    def test_what_comes_last_is_delivered_by_remove(self) -> None:
        model = deep(2).to(NAME)
        monitor = fastcheck.install(model)
        loop(model, 2)
        fake.synchronize()
        with fake.held():
            loop(model, 1, fault=0)
        stop = stopped(monitor.remove)
        assert where(stop.culprit) == ("tail", "output", "output", "origin")
        monitor.remove()
        loop(model, 1, fault=0)

    @pytest.mark.parametrize("level", ["module", "op"])
    def test_what_ran_ahead_of_a_stop_is_no_stop_of_its_own(self, level: Any) -> None:
        model = deep(2).to(NAME)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        monitor = fastcheck.install(model, level=level, overflow_nums=1)
        x = next(iter(batches(1))).to(NAME)
        loop(model, 2, optimizer=optimizer)
        fake.synchronize()
        with fake.held():
            loop(model, 2, fault=0, damage=nan_gradient, optimizer=optimizer)
            model(x).square().mean().backward()  # with the weights that were updated
        fake.synchronize()
        while not monitor.events:
            pass
        assert stopped(optimizer.step).step == 2
        monitor.remove()

    def test_a_block_that_ends_by_an_exception_keeps_it(self) -> None:
        model = deep(2).to(NAME)
        with pytest.raises(KeyError), fastcheck.install(model):
            loop(model, 1, fault=0)
            raise KeyError

    def test_inference_without_steps(self) -> None:
        model = deep(2).to(NAME)
        monitor = fastcheck.install(model, overflow_nums=-1, record="health")
        with torch.inference_mode():
            for number in range(40):
                model.tail.function = poison if number == 20 else Apply().function
                model(torch.ones(2, 8, device=NAME))
        monitor.flush()
        assert [where(e)[0::3] for e in monitor.events] == [("tail", "origin"), ("", "propagated")]
        assert monitor.event_count == 1


class TestProtectedWeights:
    def test_the_word_of_another_monitor_is_no_loss_scaling(self) -> None:
        model = deep(2).to(NAME)
        monitors = [fastcheck.install(model, record="health")]
        with pytest.warns(fastcheck.FastcheckWarning, match="same options"):
            monitors.append(fastcheck.install(model, record="health"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        loop(model, 1, optimizer=optimizer)  # the first reading waits for constants
        fake.synchronize()
        with pytest.raises(fastcheck.OverflowDetected), fake.held():
            loop(model, 1, optimizer=optimizer, fault=0, damage=nan_gradient)
            fake.release()
            for monitor in monitors:
                monitor.flush()
        for monitor in monitors:
            with contextlib.suppress(fastcheck.OverflowDetected):
                monitor.flush()
            assert monitor.event_count == 1
            assert Verdict.SCALED not in {event.verdict for event in monitor.events}

    @pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
    def test_every_checkpoint_is_finite(self, kind: Any) -> None:
        model = deep(3).to(NAME)
        monitor = fastcheck.install(model, stop=fastcheck.Stop(max_lag=None), record="health")
        arguments = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        optimizer = kind(model.parameters(), lr=0.01, fused=True, **arguments)
        checkpoints = []
        with pytest.raises(fastcheck.OverflowDetected) as caught:
            loop(model, 1, optimizer=optimizer)  # the first reading waits for constants
            with fake.held():  # the host learns of nothing until the update is on its way
                loop(model, 1, optimizer=optimizer, fault=0, damage=nan_gradient)
                checkpoints.append([p.detach().clone() for p in model.parameters()])
            for _ in range(20):  # not held: a stop reads from the device
                loop(model, 1, optimizer=optimizer)
                checkpoints.append([p.detach().clone() for p in model.parameters()])
            monitor.flush()
        assert caught.value.step == 1
        assert checkpoints
        assert all(bool(p.isfinite().all()) for saved in checkpoints for p in saved)
        state = [v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
        assert all(bool(v.isfinite().all()) for v in state)

    def test_a_plain_optimizer_is_named_in_the_summary(self) -> None:
        model = deep(2).to(NAME)
        monitor = fastcheck.install(model, record="health")
        loop(model, 2)
        assert "the weights of SGD are not protected" in monitor.summary()
        assert "fused=True" in monitor.summary()

    def test_a_stop_has_what_was_updated(self) -> None:
        model = deep(2).to(NAME)
        monitor = fastcheck.install(model, record="health")
        with pytest.raises(fastcheck.OverflowDetected) as caught:
            loop(model, 1, fault=0)
            monitor.flush()
        assert caught.value.report.weights_intact is False
        text = " ".join(str(caught.value).split())
        assert "The weights have been updated in this step: parameter group 0 of SGD" in text

    def test_several_ranks_are_warned(self) -> None:
        model = deep(2).to(NAME)
        monitor = fastcheck.install(model, record="health")
        store = monitor._session.event_store
        store.ranks = store.ranks._replace(together=2)
        with pytest.warns(fastcheck.FastcheckWarning, match="not protected.*fused=True"):
            loop(model, 2)

    def test_true_warns(self) -> None:
        model = deep(2).to(NAME)
        fastcheck.install(model, record="health", stop=fastcheck.Stop(protect_weights=True))
        with pytest.warns(fastcheck.FastcheckWarning, match="not protected"):
            loop(model, 1)


class TestGradScaler:
    @pytest.mark.parametrize("fused", [False, True])
    def test_a_skipped_step_is_scaled_and_not_counted(self, fused: bool) -> None:
        model = deep(2).to(NAME)
        monitor = fastcheck.install(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=fused)
        scaler = torch.amp.GradScaler(NAME, init_scale=1024.0)
        for step, x in enumerate(batches(6)):
            model.tail.function = nan_gradient if step == 3 else Apply().function
            optimizer.zero_grad()
            scaler.scale(model(x.to(NAME)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        monitor.flush()
        assert scaler.get_scale() == 512.0
        assert monitor.event_count == 0
        assert {event.verdict for event in monitor.events} == {Verdict.SCALED}
        assert {event.step for event in monitor.events} == {3}


class TestRanks:
    @pytest.mark.parametrize("sync", ["never", "step"])
    def test_ranks_whose_devices_are_behind_stop_together(self, sync: str) -> None:
        results = values(run_ranks(training_work.on_a_fake_device, sync))
        assert len(set(results)) == 1, results
        step, of_step, rank, culprit, text, is_intact = results[0]
        assert (of_step, rank, is_intact) == (7, 2, True)
        assert culprit == ("1", "output", "output", "origin")
        assert "at step 7 on rank 2" in text
        # max_lag steps behind the device, and one boundary for the ranks.
        assert step == 7 if sync == "step" else 8 <= step <= 7 + 2 + 2
