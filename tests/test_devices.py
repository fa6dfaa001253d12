"""install() on an accelerator: nothing waits, nothing is lost, and the verdicts are the CPU's."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import weakref
from typing import Any, Optional

import pytest
import torch
from torch import nn

import fake_device
import fastcheck
import ranks_workers as work
from fastcheck import Verdict
from fastcheck._device_ring import DeviceRing
from ranks_harness import run_ranks, values
from training import Apply, Net, batches, nan_gradient, poison, stopped, where

fake: Any = fake_device.load()
NAME = fake.name()

pytestmark = pytest.mark.usefixtures("fake_accelerator")


def deep(layers: int = 30, width: int = 8) -> nn.Sequential:
    """Linear layers and activations, and a hole at the end into which a test puts a fault."""
    model = nn.Sequential()
    for index in range(layers):
        model.add_module(f"layer{index}", nn.Linear(width, width))
        model.add_module(f"act{index}", nn.Tanh())
    model.add_module("tail", Apply())
    return model


def loop(
    model: nn.Module,
    steps: int,
    *,
    fault: Optional[int] = None,
    damage: Any = poison,
    optimizer: Optional[torch.optim.Optimizer] = None,
) -> list[torch.Tensor]:
    """Trains without ever asking the device for a value; the losses stay there."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for step, x in enumerate(batches(steps)):
        if step == fault:
            model.tail.function = damage
        optimizer.zero_grad()
        loss = model(x.pin_memory().to(NAME, non_blocking=True)).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        del loss
        model.tail.function = Apply().function
    return losses


class TestNothingWaits:
    def test_30_layers_100_steps(self) -> None:
        def run(observed: bool) -> tuple[list[float], Any, Any]:
            torch.manual_seed(0)
            model = deep().to(NAME)
            monitor = fastcheck.install(model, record="health", max_lag=None) if observed else None
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            losses = loop(model, 10, optimizer=optimizer)
            fake.synchronize()
            if monitor is not None:
                monitor.flush()
            fake.set_delay(20)
            spent = fake.Counts()
            for _ in range(10):  # the host may be ten steps ahead, not a hundred
                before = fake.counters()
                losses += loop(model, 10, optimizer=optimizer)
                passed = fake.counters() - before
                spent = fake.Counts({k: v + spent.get(k, 0) for k, v in passed.items()})
                fake.synchronize()
            fake.set_delay(0)
            return [loss.item() for loss in losses], spent, monitor

        plain, spent_plain, _ = run(False)
        losses, spent, monitor = run(True)
        assert losses == plain
        assert spent_plain.synchronisations == 0  # the loop itself is not what is measured
        assert spent.synchronisations == 0
        assert spent["blocking_copy"] == 0
        monitor.remove()
        assert "full ring" not in monitor.summary()
        assert len(monitor.records()) > 100 * 30 * 4

    def test_no_allocation_once_it_runs(self) -> None:
        model = deep(6).to(NAME)
        monitor = fastcheck.install(model, record="full")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(12):
            loop(model, 1, optimizer=optimizer)
            fake.synchronize()
            monitor.flush()
        before = fake.counters()
        for _ in range(10):
            loop(model, 1, optimizer=optimizer)
            fake.synchronize()
        spent = fake.counters() - before
        assert spent["alloc_below_cache"] == 0
        assert spent["pinned_alloc_below_cache"] == 0

    def test_the_host_is_held_back_at_max_lag_steps(self) -> None:
        model = deep(2).to(NAME)
        monitor = fastcheck.install(model, record="health", max_lag=2)
        loop(model, 1)
        monitor.flush()
        steps: list[int] = []

        def train() -> None:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for step in range(6):
                loop(model, 1, optimizer=optimizer)
                steps.append(step)

        with fake.held():
            thread = threading.Thread(target=train)
            thread.start()
            deadline = time.monotonic() + 60
            while len(steps) < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.3)
            ahead = len(steps)
        thread.join()
        assert ahead == 2  # the third step's end waits for the first's
        assert len(steps) == 6
        assert "the host waited" in monitor.summary()

    def test_without_max_lag_it_never_is(self) -> None:
        model = deep(2).to(NAME)
        monitor = fastcheck.install(model, record="health", max_lag=None)
        loop(model, 1)
        monitor.flush()
        with fake.held():
            loop(model, 6)
        assert "the host waited" not in monitor.summary()
        monitor.flush()
        assert set(monitor.records()["step"]) == set(range(7))


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
        fastcheck.install(model, sync="call", record="health")
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
        monitors = [fastcheck.install(model, record="health") for _ in range(2)]
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
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
        monitor = fastcheck.install(model, max_lag=None, record="health")
        arguments = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        optimizer = kind(model.parameters(), lr=0.01, fused=True, **arguments)
        checkpoints = []
        with pytest.raises(fastcheck.OverflowDetected) as caught:
            for step in range(20):
                with fake.held():  # the host learns of nothing until the update is on its way
                    loop(
                        model,
                        1,
                        optimizer=optimizer,
                        fault=0 if step in (0, 7) else None,
                        damage=nan_gradient,
                    )
                    checkpoints.append([p.detach().clone() for p in model.parameters()])
            monitor.flush()
        assert caught.value.step == 0
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

    def test_true_warns(self) -> None:
        model = deep(2).to(NAME)
        fastcheck.install(model, record="health", protect_weights=True)
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
        results = values(run_ranks(work.on_a_fake_device, sync))
        assert len(set(results)) == 1, results
        step, of_step, rank, culprit, text, is_intact = results[0]
        assert (of_step, rank, is_intact) == (7, 2, True)
        assert culprit == ("1", "output", "output", "origin")
        assert "at step 7 on rank 2" in text
        # max_lag steps behind the device, and one boundary for the ranks.
        assert step == 7 if sync == "step" else 8 <= step <= 7 + 2 + 2


class TestRing:
    def test_a_full_ring_loses_records_but_not_the_first_non_finite(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(DeviceRing.__init__, "__defaults__", (8, 2))
        model = deep(10).to(NAME)
        monitor = fastcheck.install(model, overflow_nums=-1, record="health")
        with fake.held(), torch.no_grad():
            model.tail.function = poison
            model(torch.ones(2, 8, device=NAME))
        monitor.flush()
        assert "found no slot in a full ring" in monitor.summary()
        assert [where(e) for e in monitor.events] == [("tail", "output", "output", "origin")]
        assert len(monitor.records()) == 16 + 1

    def test_memory_may_be_reused_right_after_the_call(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), Apply(torch.tanh)).to(NAME)
        monitor = fastcheck.install(model)
        x = torch.randn(64, 8)
        expected = fastcheck.stats(x).checksum
        with torch.no_grad():
            model(x.to(NAME))  # what the backend keeps on the device is copied there now
            monitor.flush()
            y = x.to(NAME)
            with fake.held():
                model(y)
                del y
                for _ in range(20):
                    torch.full((64, 8), 7.0, device=NAME)
        monitor.flush()
        records = monitor.records()
        inputs = [r for r in records if monitor.sites[int(r["site"])].role == "input"]
        assert [int(r["checksum"]) for r in inputs] == [expected] * 2

    def test_streams_and_devices_at_once(self) -> None:
        """8 threads, 2 devices, 4 streams: each record is that of the tensor it names."""
        kept: dict[int, list[torch.Tensor]] = {}
        errors: list[BaseException] = []
        monitors: list[Any] = []

        def work(number: int) -> None:
            try:
                device = torch.device(NAME, number % 2)
                generator = torch.Generator().manual_seed(number)
                model = nn.Sequential(nn.Linear(1, 1), Apply(lambda x: x.clone())).to(device)
                monitor = fastcheck.install(model, record="full", max_lag=None)
                kept[number] = []
                stream = fake.Stream(device)
                with torch.no_grad(), fake.stream(stream):
                    for _ in range(20):
                        size = int(torch.randint(1, 5000, (), generator=generator))
                        x = torch.randn(size, generator=generator)
                        kept[number].append(x)
                        model[1](x.to(device))
                monitor.flush()
                monitors.append((number, monitor))
            except BaseException as error:  # shown by the main thread
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors
        for number, monitor in monitors:
            records = monitor.records()
            roles = [monitor.sites[int(site)].role for site in records["site"]]
            read = [int(r["checksum"]) for r, role in zip(records, roles) if role == "input"]
            assert read == [fastcheck.stats(x).checksum for x in kept[number]]

    def test_a_deleted_model_takes_the_thread_along(self) -> None:
        model = deep(1).to(NAME)
        monitor = fastcheck.install(model)
        loop(model, 2)
        monitor.flush()
        thread = monitor._session.drain._thread
        session = weakref.ref(monitor._session)
        del monitor, model
        for _ in range(3000):  # the thread may be holding it at this moment
            gc.collect()
            if session() is None:
                break
            time.sleep(0.01)
        assert session() is None
        thread.join(30)
        assert not thread.is_alive()


class TestEnds:
    SCRIPT = """
        import os, signal, sys
        # A shell has what it runs in the background ignore it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.path.insert(0, {tests!r})
        import fake_device
        fake = fake_device.load()
        import fastcheck, torch
        from test_devices import deep, loop, NAME
        torch.set_num_threads(1)
        model = deep(2).to(NAME)
        monitor = fastcheck.install(model, log_dir="log", overflow_nums=-1, record="health")
        loop(model, 5)
        {end}
    """

    @pytest.mark.parametrize(
        ("end", "status"),
        [
            ("pass", 0),
            ("sys.exit(3)", 3),
            ("raise ValueError", 1),
            ("os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
            ("monitor.flush(); os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ],
    )
    def test_what_was_drained_is_on_disk(self, end: str, status: int) -> None:
        script = textwrap.dedent(self.SCRIPT).format(tests=os.path.dirname(__file__), end=end)
        ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert ended.returncode == status, ended.stderr
        from fastcheck._logread import read_log

        records = read_log("log").records
        assert set(records["step"]) == set(range(5))

    def test_what_the_last_step_found_is_said_at_the_end(self) -> None:
        end = "monitor.flush()\nwith fake.held():\n    loop(model, 1, fault=0)"
        script = textwrap.dedent(self.SCRIPT.replace("overflow_nums=-1", "overflow_nums=1"))
        script = script.format(tests=os.path.dirname(__file__), end=end)
        ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert "OverflowDetected" in ended.stderr
        assert "module    tail (Apply)" in ended.stderr


def test_net_is_bit_identical() -> None:
    def run(observed: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Net(dropout=0.1).to(NAME)
        if observed:
            fastcheck.install(model)
        optimizer = torch.optim.AdamW(model.parameters())
        for x in batches(5):
            optimizer.zero_grad()
            model(x.to(NAME)).square().mean().backward()
            optimizer.step()
        return [p.cpu() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True)))
