"""The operator that made the numbers of a stop, on an accelerator with ``sync="call"``."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.record.statistics import statistics_of
from support.devices.training_on_fake import NAME
from support.programs.training import Apply

pytestmark = [
    pytest.mark.fake_accelerator,
    pytest.mark.usefixtures("fake_accelerator", "op_observer"),
]


def test_in_the_graph_of_the_loss() -> None:
    model = nn.Linear(4, 4).to(NAME)
    with (
        fastcheck.install(model, sync="call"),
        pytest.raises(fastcheck.OverflowDetected) as stop,
    ):
        (model(torch.ones(2, 4).to(NAME)) * 0).log().mean().backward()
    made = stop.value.report.made_by
    assert made is not None and made.operator == "LogBackward0"
    assert statistics_of(made.inputs[0][1]).zero_count == 8


def test_in_the_call() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), Apply(lambda x: (-x.abs() - 1).sqrt()))
    model.to(NAME)
    with (
        fastcheck.install(model, sync="call"),
        pytest.raises(fastcheck.OverflowDetected) as stop,
    ):
        model(torch.ones(2, 4).to(NAME))
    made = stop.value.report.made_by
    assert made is not None and made.operator == "aten.sqrt"
    assert made.line.endswith("in <lambda>")
