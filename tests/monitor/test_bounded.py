"""overflow_nums=-1 and weights that are NaN: memory and log stay bounded, drops are counted."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.monitor.session import event_store
from fastcheck.verdict import op_rules
from fastcheck.verdict.findings import Finding

STEPS = 160
LIMIT = 1 << 18


def live_findings() -> int:
    gc.collect()
    return sum(issubclass(type(one), Finding) for one in gc.get_objects())


@pytest.mark.parametrize("level", ["module", "op"])
def test_nan_weights_for_ever(tmp_path: Path, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_store, "_MAX_EVENTS", 200)
    monkeypatch.setattr(op_rules, "_MAX_EARLIER_FINDINGS", 100)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)])
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log = fastcheck.Log(tmp_path, limit=LIMIT)
    monitor = fastcheck.install(model, overflow_nums=-1, level=level, log=log, watch=False)
    counts, before = [], live_findings()
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(4, 4)).sum().backward()
        optimizer.step()
        if step in (STEPS // 2, STEPS - 1):
            counts.append(live_findings() - before)
    assert counts[1] <= counts[0] + 50 and counts[1] < 400
    monitor.remove()
    assert sum(entry.stat().st_size for entry in os.scandir(tmp_path)) <= LIMIT * 9 // 8
    assert len(monitor.events) < 300
    summary = " ".join(monitor.summary().split())
    assert "older events were dropped from memory" in summary
    assert "events are not in the log" in summary
