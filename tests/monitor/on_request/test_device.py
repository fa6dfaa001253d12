"""Op level on request, of a model on an accelerator that the host does not wait for."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import fastcheck
from fakes import fake_device
from fastcheck.log.reader import read_log
from support.programs.training import Net, batches

pytestmark = [
    pytest.mark.fake_accelerator,
    pytest.mark.usefixtures("op_observer"),
    pytest.mark.filterwarnings("ignore:on request"),
]
fake: Any = fake_device.load()
NAME = fake.name()


def train(place: Path, level: str, *at: int) -> tuple[list[float], str]:
    torch.manual_seed(0)
    model = Net().to(NAME)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    request = fastcheck.OnRequest(signal="SIGUSR1", steps=2, dir=place, level=level)
    losses = []
    with fastcheck.install(model, on_request=request) as monitor:
        for step, x in enumerate(batches(7)):
            optimizer.zero_grad()
            loss = model(x.to(NAME)).square().mean()
            loss.backward()
            if step in at:
                signal.raise_signal(signal.SIGUSR1)
            optimizer.step()
            losses.append(float(loss.detach()))
        monitor.flush()
        return losses, " ".join(monitor.summary().split())


@pytest.mark.parametrize("level", ["op", "dump"])
def test_of_the_next_steps(tmp_path: Path, level: str) -> None:
    losses, summary = train(tmp_path / "more", level, 2)
    assert losses == train(tmp_path / "none", level)[0]
    assert not (tmp_path / "none").exists()
    assert "steps 3 to 4 were observed" in summary
    if level == "op":
        view = read_log(tmp_path / "more" / "step3-op")
        assert sorted(set(view.records["step"].tolist())) == [3, 4]
        assert {site.op for site in view.sites.values()} >= {"aten.addmm"}
    else:
        assert (tmp_path / "more/step3-dump/step4/rank0/index.json").exists()
