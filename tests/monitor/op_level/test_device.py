"""level="op" on an accelerator: with sync="call" each tensor is copied to the host to be read."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fastcheck
from fakes import fake_device
from fastcheck.record.format import DeviceMode
from support.programs.op_level import culprit
from support.programs.training import Apply, Net, batches, stopped

pytestmark = pytest.mark.usefixtures("op_observer")
fake: Any = fake_device.load()
NAME = fake.name()


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
    expected = fastcheck.stats(make(base), depth="full").record
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


def test_a_scaler_that_skips(tmp_path: Any) -> None:
    model = nn.Linear(8, 1).to(NAME)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(NAME, init_scale=2.0**127)
    with fastcheck.install(model, level="op", sync="call", overflow_nums=-1) as monitor:
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 8).to(NAME) * 100).sum() * 100).backward()
            scaler.step(optimizer)
            scaler.update()
    assert monitor.event_count == 0 and monitor.events


def test_a_stop_is_dumped(tmp_path: Path) -> None:
    """The script runs anywhere: here on the CPU, which the other process has alone."""
    torch.manual_seed(0)
    model = broken(lambda x: x.sub_(9).sqrt())
    fastcheck.install(model, level="op", sync="call", stop=fastcheck.Stop(dump=tmp_path))
    stop = stopped(model, torch.randn(2, 8).to(NAME))
    assert stop.report.dump is not None and stop.report.dump.script is not None
    script = tmp_path / "step0" / "rank0" / stop.report.dump.script
    told = subprocess.run(
        [sys.executable, str(script), "--device", "cpu"], capture_output=True, text=True, check=True
    )
    assert told.stdout.startswith("output: 16 NaN, 0 +Inf, 0 -Inf; in the run: 16 NaN")
