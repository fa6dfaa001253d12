"""Sinks of a model on an accelerator: the scalars are written after the drain, without waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fastcheck
from support.devices.training_on_fake import NAME, fake, loop
from support.programs.training import deep
from support.trackers import Kept

pytestmark = [pytest.mark.fake_accelerator, pytest.mark.usefixtures("fake_accelerator")]


def test_nothing_waits_and_each_step_is_written_once() -> None:
    def run(**options: Any) -> Any:
        torch.manual_seed(0)
        model = deep(3).to(NAME)
        monitor = fastcheck.install(model, stop=fastcheck.Stop(max_lag=None), **options)
        loop(model, 2)
        fake.synchronize()
        before = fake.counters()
        loop(model, 6)
        spent = fake.counters() - before
        fake.synchronize()
        monitor.remove()
        return spent

    sink = Kept()
    spent, with_sink = run(), run(sinks=sink)
    assert with_sink.synchronisations == spent.synchronisations == 0
    assert [step for step, _ in sink.rows] == list(range(8))
    lags = sink.column("lag_steps")
    assert all(lag is not None and lag >= 0 for lag in lags) and max(lags) > 0
    assert sink.column("tensors_lost") == [0.0] * 8 and sink.threads == {"fastcheck-sinks"}
