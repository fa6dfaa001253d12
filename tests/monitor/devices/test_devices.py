"""install() on an accelerator: no waits, no lost records, and unchanged training."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.backends import table
from fastcheck.monitor.session import drain
from fastcheck.ring.device import DeviceRing
from fastcheck.utils.torch import readable
from support.devices.training_on_fake import NAME, fake, loop
from support.paths import TESTS
from support.processes import run_python
from support.programs.training import Apply, Net, batches, deep, poison, where
from support.sampling import IS_WHOLE, sample

pytestmark = [pytest.mark.fake_accelerator, pytest.mark.usefixtures("fake_accelerator")]

#: Of ten steps each, by a model of 30 layers.
ROUNDS = 10 if IS_WHOLE else 3


def test_kernels_are_loaded_by_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the first reading: the load of a kernel's code may wait for the device."""
    asked = []
    monkeypatch.setattr(table, "backend_for", asked.append)
    device = torch.device(NAME, 0)
    fastcheck.install(nn.Sequential(nn.Linear(2, 2).to(device), nn.Linear(2, 2))).remove()
    assert set(asked) == {device, torch.device("cpu")}


@pytest.mark.parametrize("mode", [0, 2])
def test_numbers_are_read_on_the_host_unless_torch_tells_of_waits(
    mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.cuda.set_sync_debug_mode(2) raises an error at each wait."""
    monkeypatch.setattr(readable, "_sync_debug_mode", lambda: mode)
    model = nn.Linear(4, 4).to(NAME)
    x, target = torch.randn(8, 4, device=NAME), torch.ones(8, 4, device=NAME)
    monitor = fastcheck.install(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = fake.counters()
    for _ in range(12):
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(x), target).backward()
        optimizer.step()
    spent = fake.counters() - before
    monitor.remove()
    assert (spent["item"] > 0) is (mode == 0)


@pytest.mark.parametrize("options", [{}, {"record": "range"}, {"level": "op"}])
def test_a_model_on_another_device_than_the_first(
    options: dict[str, Any], op_observer: None
) -> None:
    """Its events are asked by the drain's thread, where no device was chosen, and by this one."""
    device = torch.device(NAME, 1)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with fastcheck.install(model, overflow_nums=-1, **options) as monitor:
        for _ in range(4):
            model(torch.ones(2, 4).to(device)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert fake.current_device() == 0
        while monitor._session.drain.process():  # as its thread does
            pass
        monitor.flush()
        assert set(monitor.records()["step"].tolist()) == set(range(4))
        assert "internal" not in monitor.summary() and not monitor._session.faults.notes


def test_when_the_judging_thread_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once in a healthy step, as that takes the lock of Python from the training thread."""
    model = deep().to(NAME)
    with fastcheck.install(model, sync="never") as monitor:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loop(model, 2, optimizer=optimizer)
        of_monitor, woken = monitor._session.drain, []
        put = of_monitor._wake.put
        counting = SimpleNamespace(put=lambda goes_on: (woken.append(goes_on), put(goes_on)))
        monkeypatch.setattr(of_monitor, "_wake", counting)
        loop(model, 5, optimizer=optimizer)
        assert len(woken) == 5
        monitor.flush()
        assert monitor.table()["step"].max() == 6
        for passes in range(1, 4):  # without gradients: what they have recorded waits for nothing
            while of_monitor.process():
                pass
            with torch.no_grad():
                model(torch.ones(4, 8).to(NAME))
            assert len(woken) == 5 + passes


def test_the_judging_thread_looks_less_often_while_a_copy_takes_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each look takes the lock of Python from the training thread."""
    model = deep().to(NAME)
    with fastcheck.install(model, stop=fastcheck.Stop(max_lag=None)) as monitor:
        loop(model, 2)
        monitor.flush()
        wake = monitor._session.drain._wake
        wake.put(True)
        while not wake.empty():  # its thread is to begin anew
            time.sleep(0.001)
        pauses: list[float] = []
        has_looked = threading.Event()

        def sleep(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 6:
                has_looked.set()
            time.sleep(0.001)

        monkeypatch.setattr(drain, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
        with fake.held():
            loop(model, 1)
            assert has_looked.wait(60)
        monitor.flush()
    assert pauses[:6] == [0.001, 0.002, 0.004, 0.008, 0.008, 0.008]


class TestNothingWaits:
    def test_30_layers_and_many_steps(self) -> None:
        def run(observed: bool) -> tuple[list[float], Any, Any]:
            torch.manual_seed(0)
            model = deep().to(NAME)
            monitor = (
                fastcheck.install(model, record="health", stop=fastcheck.Stop(max_lag=None))
                if observed
                else None
            )
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            losses = loop(model, 10, optimizer=optimizer)
            fake.synchronize()
            if monitor is not None:
                monitor.flush()
            fake.set_delay(20)
            spent = fake.Counts()
            for _ in range(ROUNDS):  # the host may be ten steps ahead, not a hundred
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
        assert len(monitor.records()) > 10 * ROUNDS * 30 * 4

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
        monitor = fastcheck.install(model, record="health", stop=fastcheck.Stop(max_lag=2))
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
        monitor = fastcheck.install(model, record="health", stop=fastcheck.Stop(max_lag=None))
        loop(model, 1)
        monitor.flush()
        with fake.held():
            loop(model, 6)
        assert "the host waited" not in monitor.summary()
        monitor.flush()
        assert set(monitor.records()["step"]) == set(range(7))


class TestRing:
    def test_a_full_ring_loses_records_but_not_the_first_non_finite(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(DeviceRing.__init__, "__defaults__", (8, 2))
        model = deep(10).to(NAME)
        with fastcheck.install(model, record="health"), torch.no_grad():
            model(torch.ones(2, 8, device=NAME))  # the first reading waits for constants
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
                monitor = fastcheck.install(model, record="full", stop=fastcheck.Stop(max_lag=None))
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
        thread.join()


class TestEnds:
    SCRIPT = """
        import os, signal, sys
        # A shell has what it runs in the background ignore it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.path.insert(0, {tests!r})
        from fakes import fake_device
        fake = fake_device.load()
        import fastcheck, torch
        from fastcheck.monitor.session import stop_handler
        from support.devices.training_on_fake import loop, NAME
        from support.programs.training import deep
        torch.set_num_threads(1)
        stop_handler._EXIT_SECONDS = 600.0
        model = deep(2).to(NAME)
        monitor = fastcheck.install(model, log_dir="log", overflow_nums=-1, record="health")
        loop(model, 5)
        {end}
    """

    @pytest.mark.parametrize(
        ("end", "status"),
        sample(
            [
                ("pass", 0),
                ("sys.exit(3)", 3),
                ("raise ValueError", 1),
                ("os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
                ("monitor.flush(); os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
            ],
            3,
        ),
    )
    def test_what_was_drained_is_on_disk(self, end: str, status: int) -> None:
        script = textwrap.dedent(self.SCRIPT).format(tests=str(TESTS), end=end)
        if status in (0, -signal.SIGINT):  # the interpreter's own ends
            ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        else:
            ended = run_python("-c", script)
        assert ended.returncode == status, ended.stderr
        from fastcheck.log.reader import read_log

        records = read_log("log").records
        assert set(records["step"]) == set(range(5))

    def test_what_the_last_step_found_is_said_at_the_end(self) -> None:
        end = "monitor.flush()\nwith fake.held():\n    loop(model, 1, fault=0)"
        script = textwrap.dedent(self.SCRIPT.replace("overflow_nums=-1", "overflow_nums=1"))
        ended = run_python("-c", script.format(tests=str(TESTS), end=end))
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
