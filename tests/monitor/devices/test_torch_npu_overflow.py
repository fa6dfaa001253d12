"""Overflow modes and the status word through torch_npu's own wheel, over the fake ACL runtime. One
chip in a process: FAKE_ACL_SOC names it, `make test-npu-lab` runs this for each.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from typing import Any, Optional

import pytest
import torch
from torch import nn

import fastcheck
from fakes import fake_acl
from fastcheck.backends import npu
from fastcheck.backends.table import backend_for
from fastcheck.cli.main import main
from fastcheck.types import DeviceMode, Verdict
from support.programs.training import Apply, batches, poison, stopped, where

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch_npu's own, of a machine without CANN
    torch_npu: Any = fake_acl.load()
    for index in range(torch_npu.device_count()):
        torch.zeros(1, device="cpu").to(f"npu:{index}")

pytestmark = pytest.mark.filterwarnings("ignore:Cannot create tensor with internal format")

CHIP = os.environ.get("FAKE_ACL_SOC", "Ascend910B1")
IS_OFF = os.environ.get("INF_NAN_MODE_FORCE_DISABLE") == "1"
FIRST_GENERATION = CHIP == "Ascend910A"
SATURATES = FIRST_GENERATION or (IS_OFF and not CHIP.startswith("Ascend950"))
only_saturating = pytest.mark.skipif(not SATURATES, reason=f"{CHIP} gives Inf and NaN")
LARGEST = 65504.0


@pytest.fixture(autouse=True)
def _fresh(one_thread: None) -> Iterator[None]:
    yield
    torch_npu.utils.clear_npu_overflow_flag() if SATURATES else None
    torch_npu.synchronize()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.hole = Apply()
        self.last = nn.Linear(8, 8)
        self.to(torch.float16).to("npu")  # the runtime has no random numbers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.hole(self.first(x)))


def loop(model: Net, steps: int, fault: Optional[int] = None, damage: Any = None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, x in enumerate(batches(steps)):
        model.hole.function = damage if step == fault else Apply().function
        optimizer.zero_grad()
        (model(x.to(torch.float16).to("npu")).float() * 1e-2).square().mean().backward()
        optimizer.step()


def hidden(x: torch.Tensor) -> torch.Tensor:
    """Overflows on the way, and returns ordinary numbers."""
    with torch.no_grad():
        (torch.full_like(x, LARGEST) * 4).mul_(0)
    return x.clone()


def test_the_chip_is_the_one_that_was_asked_for() -> None:
    assert torch_npu.get_device_name() == CHIP


def test_mode_of_each_device() -> None:
    wanted = DeviceMode.SATURATING if SATURATES else DeviceMode.IEEE
    device = torch.device("npu", 0)
    assert npu.overflow_mode(device) is wanted
    backend = backend_for(device)
    assert backend.device_mode is wanted
    assert (backend.overflow_status is not None) == SATURATES
    # torch_npu has set the first one; this is as the chip comes.
    other = DeviceMode.SATURATING if FIRST_GENERATION else DeviceMode.IEEE
    assert npu.overflow_mode(torch.device("npu", 1)) is other
    assert torch_npu.current_device() == 0


def test_arithmetic_is_as_the_mode_says() -> None:
    x = torch.full((3,), LARGEST, dtype=torch.float16).to("npu")
    assert (x * 2).cpu().tolist() == [LARGEST if SATURATES else float("inf")] * 3
    record = fastcheck.stats(x * 2)
    assert record.nonfinite_count == (0 if SATURATES else 3)
    assert record.saturated_count == (3 if SATURATES else 0)


@pytest.mark.filterwarnings("ignore:You can set the device capability")  # torch_npu's
def test_doctor_passes(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--device", "npu", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["device"]["name"] == CHIP
    assert {check["status"] for check in found["checks"]} == {"passed"}, found["checks"]


@pytest.mark.parametrize("sync", ["never", "step", "call"])
def test_an_overflow_stops_the_run(sync: Any) -> None:
    model = Net()
    monitor = fastcheck.install(model, sync=sync)
    stop = stopped(loop, model, 20, 3, lambda x: poison(x, LARGEST) * 2)
    assert where(stop.culprit) == ("hole", "output", "output", "origin")
    assert stop.step == 3
    assert stop.culprit.record["saturated_count"] == (1 if SATURATES else 0)
    mode = DeviceMode.SATURATING if SATURATES else DeviceMode.IEEE
    on_device = [r for r in monitor.records() if monitor.sites[r["site"]].label != "lr"]
    assert {r["device_mode"] for r in on_device} == {int(mode)}


@only_saturating
class TestStatus:
    def read(self) -> float:
        backend = backend_for(torch.device("npu", 0))
        assert backend.overflow_status is not None
        return float(backend.overflow_status.read(torch.device("npu", 0)).item())

    def test_a_hit_that_no_value_shows(self) -> None:
        model = Net()
        monitor = fastcheck.install(model)
        loop(model, 5, 2, hidden)
        monitor.flush()
        (event,) = monitor.events
        assert (event.verdict, event.step, event.counted) == (Verdict.ABSORBED, 2, False)
        assert event.reason.startswith("process overflow on npu:0 between the boundaries of step 1")
        assert self.read() != 0  # no reset was requested

    def test_it_is_cleared_on_request_alone(self) -> None:
        fake_acl.set_overflow()
        model = Net()
        monitor = fastcheck.install(model, training=fastcheck.Training(reset_overflow_status=True))
        loop(model, 4, 1, hidden)
        monitor.flush()
        assert [event.step for event in monitor.events] == [1]
        assert self.read() == 0

    def test_nothing_waits(self) -> None:
        model = Net()
        monitor = fastcheck.install(model, stop=fastcheck.Stop(max_lag=None), record="health")
        data = [x.to(torch.float16).to("npu") for x in batches(3)]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def train() -> None:
            for x in data:
                optimizer.zero_grad()
                (model(x).float() * 1e-2).square().mean().backward()
                optimizer.step()

        train()
        train()
        monitor.flush()
        torch_npu.synchronize()
        before = fake_acl.counters()["synchronisations"]
        train()
        assert fake_acl.counters()["synchronisations"] == before
        monitor.flush()
        assert "overflow_status" in {site.role for site in monitor.sites}

    def test_what_was_read_says_so(self) -> None:
        model = Net()
        monitor = fastcheck.install(model)
        loop(model, 3)
        monitor.flush()
        summary = " ".join(monitor.summary().split())
        assert "newly been set at 0 of 3 step boundaries" in summary
