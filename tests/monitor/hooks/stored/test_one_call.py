"""What an update uses is read in one call on the host: weights, buffers and gradients."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.monitor.hooks import state_reader
from fastcheck.monitor.session.session import _by_device
from fastcheck.ring.host import HostRing
from support.programs.training import Net, batches

pytestmark = pytest.mark.usefixtures("fresh_start")


def read_lists(monkeypatch: pytest.MonkeyPatch, *, clips: bool = False) -> tuple[list[int], Any]:
    """The lengths of the lists of a second step, with a weight and a gradient that are not finite,
    and its events and records.
    """
    lengths: list[int] = []
    read = HostRing.observe_list

    def counted(self: HostRing, tensors: Any, *args: Any) -> Any:
        lengths.append(len(tensors))
        return read(self, tensors, *args)

    torch.manual_seed(0)
    model = Net()
    model.idle = nn.Linear(2, 2)
    model.register_buffer("count", torch.ones(1))
    monitor = fastcheck.install(model, stop=fastcheck.Stop(action=lambda _: None))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number, x in enumerate(batches(2)):
        model(x).sum().backward()
        if clips:
            nn.utils.clip_grad_value_(model.parameters(), 1.0)
        if number:
            model.idle.weight.data.fill_(math.nan)
            model.head.weight.grad.fill_(math.inf)
            monkeypatch.setattr(HostRing, "observe_list", counted)
        optimizer.step()
        optimizer.zero_grad()
    monkeypatch.undo()
    events = [(str(e.site), e.verdict, e.reason, e.record.tobytes()) for e in monitor.events]
    records = monitor.records().tobytes()
    monitor.remove()
    return lengths, (events, records)


def test_weights_buffers_and_gradients_are_one_list(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = len(list(Net().parameters()))
    lengths, found = read_lists(monkeypatch)
    assert lengths == [trained + 2 + 1 + trained]
    assert len(found[0]) == 2
    monkeypatch.setattr(state_reader, "common_device", lambda _: None)
    lengths, apart = read_lists(monkeypatch)
    assert lengths == [trained + 2 + 1, trained]
    assert apart == found


def test_gradients_that_were_read_before_they_were_clipped_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained = len(list(Net().parameters()))
    assert read_lists(monkeypatch, clips=True)[0] == [trained + 2 + 1, 1]


def test_on_each_device_what_modules_store_is_told_from_gradients() -> None:
    """Of a weight whose data were moved to the host the gradient may still be on a device."""
    tensors = [torch.ones(1, device=device) for device in ("cpu", "cpu", "meta", "cpu")]
    roles = ["param", "param", "param_grad", "param_grad"]
    batch: Any = SimpleNamespace(tensors=tensors, sites=[5, 6, 7, 8], roles=roles, stored_count=2)
    assert [(str(device), *rest) for device, _, *rest in _by_device(batch)] == [
        ("cpu", [5, 6, 8], ["param", "param", "param_grad"], 2),
        ("meta", [7], ["param_grad"], 0),
    ]
