"""A device that is lost in the middle of a step, on the fake accelerator with the CUDA kernels:
what was not finite before is named by the warning, the stop, and the log.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from fakes import fake_device
from fastcheck.ring.device import SEGMENT_SLOTS
from support.processes import run_code
from support.programs.training import batches, deep, poison, where

pytestmark = pytest.mark.fake_accelerator


fake: Any = fake_device.load()
NAME = fake.name()
ASSERT = "CUDA error: device-side assert triggered"


@pytest.fixture(autouse=True)
def found_again(cuda_on_fake_device: None) -> Iterator[None]:
    yield
    fake.find_again()


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x.to(NAME)).square().mean()
    return loss


def lose_in_step(model: nn.Module, step: int, is_bad: bool = True) -> None:
    """Trains, and loses the device behind the forward of a step, which made a NaN."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for index, x in enumerate(batches(step + 1)):
        optimizer.zero_grad()
        if index == step:
            if is_bad:
                model.get_submodule("tail").function = poison
            loss_of(model, x)
            fake.lose()
            return
        loss_of(model, x).backward()
        optimizer.step()


def test_a_stop_names_the_culprit() -> None:
    model = deep(3).to(NAME)
    monitor = fastcheck.install(model)
    # The drain's thread may be the first that finds it.
    with pytest.warns(fastcheck.FastcheckWarning, match="a device was lost in step 4") as warned:
        lose_in_step(model, 4)
        with pytest.raises(fastcheck.OverflowDetected) as raised:
            monitor.flush()
    assert [str(one.message).count("tail") for one in warned] == [1]
    assert ASSERT in str(warned[0].message)
    stop = raised.value
    assert where(stop.culprit) == ("tail", "output", "output", "origin")
    assert stop.culprit.step == 4
    assert stop.culprit.record["nan_count"] == 1


def test_a_device_that_is_lost_with_healthy_numbers(tmp_path: Path) -> None:
    model = deep(2).to(NAME)
    monitor = fastcheck.install(model, log_dir=tmp_path)
    with pytest.warns(fastcheck.FastcheckWarning, match="no tensor that was read before it"):
        lose_in_step(model, 2, is_bad=False)
        monitor.flush()
    assert not monitor.events
    # The steps before were copied in time.
    assert set(monitor.records()["step"]) >= {0, 1}


class Overflow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1e30 * 1e30


class Long(nn.Module):
    """Calls a layer so often that a forward has six segments of records."""

    def __init__(self) -> None:
        super().__init__()
        self.start = Overflow()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        for _ in range(6 * SEGMENT_SLOTS):
            x = self.layer(x)
        return x


def test_a_step_of_many_records() -> None:
    """What was not finite first is named: no later segment takes its place in the box."""
    model = Long().to(NAME)
    monitor = fastcheck.install(model, overflow_nums=-1)
    model(torch.ones(2, 8, device=NAME))
    fake.lose()
    with pytest.warns(fastcheck.FastcheckWarning, match="was not finite: start"):
        monitor.flush()
    first = monitor.events[0]
    assert where(first)[:3] == ("start", "output", "output")
    bad = monitor.records()
    bad = bad[(bad["nan_count"] > 0) | (bad["posinf_count"] > 0)]
    assert len(set(bad["seq"] // SEGMENT_SLOTS)) > 5


PROGRAM = """
import torch, fastcheck
from fakes import cuda_on_fake
cuda_on_fake.use()
from monitor.devices import test_lost_device as here
model = here.deep(3).to(here.NAME)
fastcheck.install(model, log_dir={log!r})
here.lose_in_step(model, 3)
torch.ones(3, device=here.NAME).sum().item()
"""


def test_at_exit_and_in_the_log(tmp_path: Path) -> None:
    """The program dies of torch's error: no hook has run since."""
    done = run_code(PROGRAM.format(log=str(tmp_path)), env={"FASTCHECK_FAKE_DEVICE": "1"})
    assert done.returncode == 1
    assert ASSERT in done.stderr
    assert "fastcheck.OverflowDetected" in done.stderr
    assert "the first tensor before it that was not finite: tail" in done.stderr
    shown = run_code(f"from fastcheck.cli.main import main; main(['show', {str(tmp_path)!r}])")
    assert f"the device was lost in step 3: {ASSERT}" in shown.stdout
    assert "tail" in shown.stdout
