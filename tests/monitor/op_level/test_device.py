"""level="op" on an accelerator: with sync="call" each tensor is copied to the host to be read; and
with the CUDA kernels, which C++ launches.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from pathlib import Path
from types import FrameType
from typing import Any, Callable

import numpy as np
import pytest
import torch
from torch import nn

import fastcheck
from fakes import cuda_on_fake, fake_device
from fastcheck.backends import table
from fastcheck.monitor.op_level.level import Launcher
from fastcheck.record.format import DeviceMode
from fastcheck.ring.device import DeviceRing
from support.processes import run_python
from support.programs.op_level import culprit, loop, model_with
from support.programs.training import Apply, Net, batches, stopped

pytestmark = [pytest.mark.fake_accelerator, pytest.mark.usefixtures("op_observer")]
fake: Any = fake_device.load()
NAME = fake.name()
INVALID_CONFIGURATION = 9  # of cudaError_t


def broken(function: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), Apply(function), nn.Linear(8, 4)).to(NAME)


def test_a_forward_culprit() -> None:
    model = broken(lambda x: torch.sqrt(-x.abs() - 1))
    fastcheck.install(model, level="op", sync="call", record="stats")
    stop = stopped(model, torch.randn(2, 8).to(NAME))
    assert culprit(stop) == ("1", "aten.sqrt", "forward", "origin")
    assert stop.culprit.line is not None and "test_device.py" in stop.culprit.line


def test_a_backward_culprit() -> None:
    """On the thread of autograd that serves the device."""
    model = broken(lambda x: torch.sqrt(x * 0))
    fastcheck.install(model, level="op", sync="call", record="stats")
    stop = stopped(lambda x: model(x).sum().backward(), torch.randn(2, 8).to(NAME))
    assert culprit(stop) == ("1", "aten.sqrt", "backward", "origin")


def train(model: nn.Module, device: str) -> np.ndarray:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fastcheck.install(model, level="op", sync="call") as monitor:
        for x in batches(2):
            optimizer.zero_grad()
            model(x.to(device)).square().mean().backward()
            optimizer.step()
        return monitor.records()


def test_records_are_the_cpus() -> None:
    here = Net()
    there = copy.deepcopy(here).to(NAME)
    records = {device: train(model, device) for device, model in (("cpu", here), (NAME, there))}
    mode = records[NAME]["device_mode"]
    assert set(mode.tolist()) == {int(DeviceMode.IEEE), int(DeviceMode.UNKNOWN)}  # the batch, too
    # The batch's copies and the device's own order of ops aside, every checksum is there.
    found = set(records[NAME]["checksum"].tolist())
    assert set(records["cpu"]["checksum"].tolist()) <= found


@pytest.mark.parametrize("make", [lambda x: x.t(), lambda x: x[:, 1:], lambda x: x.expand(4, 8)])
def test_odd_strides_are_read_in_the_same_order(make: Any) -> None:
    base = torch.randn(1, 8) if make(torch.ones(1, 8)).shape == (4, 8) else torch.randn(6, 8)
    tensor = make(base.to(NAME))
    monitor = fastcheck.install(Net().to(NAME), level="op", sync="call")
    _ = tensor * 3  # read here, as its input
    held = monitor.records()
    expected = fastcheck.stats(make(base), record="full").record
    same = held[held["checksum"] == expected["checksum"]]
    assert len(same) and same["order"][0] == expected["order"]
    assert same["sum"][0] == expected["sum"]


def test_a_module_levels_stop_is_run_again() -> None:
    model = broken(lambda x: torch.log(x * 0) * 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = fastcheck.install(model, sync="step", stop=fastcheck.Stop(replay=True))

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    stop = stopped(monitor.run, step, torch.randn(2, 8).to(NAME))
    assert stop.culprit.site.module == "1"
    replay = stop.report.replay
    assert replay is not None and replay.stop is not None
    assert culprit(replay.stop)[1] == "aten.log"


def test_a_stop_is_dumped(tmp_path: Path) -> None:
    """The script runs anywhere: here on the CPU, which the other process has alone."""
    torch.manual_seed(0)
    model = broken(lambda x: x.sub_(9).sqrt())
    fastcheck.install(model, level="op", sync="call", stop=fastcheck.Stop(dump=tmp_path))
    stop = stopped(model, torch.randn(2, 8).to(NAME))
    assert stop.report.dump is not None and stop.report.dump.script is not None
    script = tmp_path / "step0" / "rank0" / stop.report.dump.script
    told = run_python(script, "--device", "cpu", is_fresh=True)
    assert told.stdout.startswith("output: 16 NaN, 0 +Inf, 0 -Inf; in the run: 16 NaN")


def python_calls(function: Callable[[], object]) -> list[str]:
    """The functions of fastcheck that Python calls meanwhile, on this thread."""
    calls: list[str] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and str(frame.f_globals.get("__name__")).startswith("fastcheck"):
            calls.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.usefixtures("cuda_on_fake_device")
class TestLaunchedByC:
    def test_no_python_runs_between_an_operator_and_its_record(self) -> None:
        x = torch.ones(4, 8, device=NAME)
        with fastcheck.install(nn.Linear(8, 8).to(NAME), level="op") as monitor:

            def work() -> None:
                for _ in range(100):
                    x.mul(2)

            x.mul(2)  # the first of its stream and segment
            before = monitor._session.next_seq
            assert python_calls(work) == []
            assert monitor._session.next_seq == before + 100
            monitor.flush()
            assert (monitor.records()["numel"] == 32).sum() >= 101

    @pytest.mark.parametrize("segments", [(1024, 64), (7, 64)])
    def test_records_and_lines_are_those_of_launches_by_python(
        self, segments: tuple[int, int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """On two streams, with segments that are filled within a step, and views of all orders."""
        monkeypatch.setattr(DeviceRing.__init__, "__defaults__", segments)
        by_c = cuda_on_fake.entry()
        by_python = dataclasses.replace(by_c, direct_observe=None)
        calls: list[int] = []
        call = Launcher.__call__

        def counted(self: Launcher, launches: Any) -> None:
            calls.append(len(launches))
            call(self, launches)

        monkeypatch.setattr(Launcher, "__call__", counted)

        def odd(x: torch.Tensor) -> torch.Tensor:
            side = fake.Stream(device=NAME)
            side.wait_stream(fake.current_stream(NAME))
            with fake.stream(side):
                y = (x.t() * 2)[:, ::2].half() + torch.exp(x.t()[:, ::2].abs() * 1e9)
            fake.current_stream(NAME).wait_stream(side)
            y.record_stream(fake.current_stream(NAME))
            return x + y.detach().sum().nan_to_num(0, 0, 0) + torch.complex(x, x).conj().real

        def run(backend: Any) -> tuple[list[Any], bytes, int]:
            monkeypatch.setattr(table, "_of_type", lambda kind, index: backend)
            torch.manual_seed(0)
            model = model_with(odd).to(NAME)
            data = [x.to(NAME) for x in batches(3)]
            calls.clear()
            with fastcheck.install(model, level="op", overflow_nums=-1) as monitor:
                loop(model, data)
                monitor.flush()
                records = monitor.records()
                events = [(str(e.site), e.verdict, e.line) for e in monitor.events]
            return events, records[np.argsort(records["seq"])].tobytes(), sum(calls)

        (events, records, direct), (wanted_events, wanted, all_of_them) = run(by_c), run(by_python)
        assert records == wanted and len(records) > 100 * 192
        assert events == wanted_events and any("in odd" in line for _, _, line in events)
        assert all_of_them > 2 * direct > 0

    def test_what_fails_is_reported_by_python(self) -> None:
        """Which tries it again, leaves the site out, and then reads all others."""
        x = torch.ones(4, 8, device=NAME)
        monitor = fastcheck.install(nn.Linear(8, 8).to(NAME), level="op")
        x.mul(2)
        assert python_calls(lambda: x.mul(2)) == []
        shim = cuda_on_fake.shim()
        shim.cuda_on_cpu_set_error(INVALID_CONFIGURATION, 1)
        try:
            with pytest.warns(fastcheck.FastcheckWarning, match="a launch failed"):
                y = x.mul(2)
        finally:
            shim.cuda_on_cpu_set_error(0, 1)
        assert "ring_for" in python_calls(lambda: x.add(2)) + python_calls(lambda: x.add(2))
        monitor.flush()
        assert len(monitor.records()) == 5 and torch.equal(y.cpu(), torch.full((4, 8), 2.0))
        monitor.remove()
