"""AutoInstall: invalid options, models that can't be observed, devices that install() tries, and
monitors whose remove() fails.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.monitor.auto_install import AutoInstall
from fastcheck.monitor.hooks import found_inf

pytestmark = pytest.mark.usefixtures("op_observer")


def test_wrong_options_are_an_error_where_the_first_optimizer_is_made() -> None:
    model = nn.Linear(2, 2)
    with AutoInstall(record="all"), pytest.raises(fastcheck.ConfigError, match="record"):
        torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_log_that_cannot_be_written_is_raised_where_the_optimizer_is_made(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    (tmp_path / "file").touch()
    with AutoInstall(log_dir=tmp_path / "file"), pytest.raises(fastcheck.LogError):
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


def test_what_cannot_be_observed_is_called_all_the_same() -> None:
    class Unhashable(nn.Linear):
        def __eq__(self, other: object) -> bool:
            return self is other

    x = torch.ones(1, 2)
    for model in (Unhashable(2, 2), torch.jit.script(nn.Linear(2, 2))):
        with AutoInstall(at_calls=True) as auto:
            with pytest.warns(fastcheck.FastcheckWarning, match="a model is not observed"):
                y = model(x)
            assert y.shape == (1, 2) and not auto.monitors


def test_a_module_without_parameters_is_not_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many programs make one in each call, and a search goes through all objects of the process."""
    with AutoInstall(at_calls=True):
        monkeypatch.setattr("fastcheck.monitor.auto_install.gc", None)
        assert nn.ReLU()(torch.ones(2)).sum() == 2


def test_an_optimizer_that_install_makes_to_try_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for no lock of the model's own."""
    monkeypatch.setattr(found_inf, "_tried", {})
    model = nn.Linear(2, 2, device="meta")
    with AutoInstall() as auto:
        torch.optim.SGD(model.parameters(), lr=0.1)
        assert len(auto.monitors) == 1 and found_inf._tried
