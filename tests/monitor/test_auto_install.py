"""AutoInstall: invalid options, a second model at op level, and monitors whose remove() fails."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.monitor.auto_install import AutoInstall

pytestmark = pytest.mark.usefixtures("op_observer")


def test_wrong_options_are_an_error_where_the_first_optimizer_is_made() -> None:
    model = nn.Linear(2, 2)
    with AutoInstall(record="all"), pytest.raises(fastcheck.ConfigError, match="record"):
        torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_second_model_at_op_level_is_a_warning() -> None:
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    with AutoInstall(level="op") as auto:
        torch.optim.SGD(one.parameters(), lr=0.1)
        with pytest.warns(fastcheck.FastcheckWarning, match="not observed: ConfigError"):
            torch.optim.SGD(two.parameters(), lr=0.1)
        assert len(auto.monitors) == 1


def test_every_monitor_is_removed_though_one_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    auto = AutoInstall()
    with pytest.raises(ZeroDivisionError, match="the first"), auto:
        for model in (one, two):
            torch.optim.SGD(model.parameters(), lr=0.1)

        def fail() -> None:
            raise ZeroDivisionError("the first")

        monkeypatch.setattr(auto.monitors[0], "remove", fail)
    assert "removed" in repr(auto.monitors[1])
