"""Parameters, gradients and buffers are named by their full ``state_dict`` keys."""

from __future__ import annotations

import contextlib
import pathlib
from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.cli.main import main
from support.records import record_builder as build

NAN = float("nan")

pytestmark = pytest.mark.usefixtures("fresh_start")


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def train(model: nn.Module, poison: Any = None, steps: int = 2) -> None:
    """``poison`` is called between backward and the update of the last step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        if poison is not None and step == steps - 1:
            with torch.no_grad():
                poison()
        optimizer.step()


def stop_of(model: nn.Module, poison: Any) -> fastcheck.OverflowDetected:
    with pytest.raises(fastcheck.OverflowDetected) as caught:
        train(model, poison)
    return caught.value


@pytest.mark.parametrize(
    "kind, key, tensor_of",
    [
        ("parameter", "3.weight", lambda model: model[3].weight),
        ("gradient of", "3.weight", lambda model: model[3].weight.grad),
        ("buffer", "1.running_mean", lambda model: model[1].running_mean),
    ],
)
def test_a_stop_names_the_key(kind: str, key: str, tensor_of: Any) -> None:
    model = make_model()
    fastcheck.install(model)
    stop = stop_of(model, lambda: tensor_of(model).flatten()[0].fill_(NAN))
    module = f"{key.split('.')[0]} ({type(model[int(key[0])]).__name__})"
    text = str(stop)
    assert f"1 NaN in {kind} {key} of {module} at step 1" in text.splitlines()[0]
    assert f"{kind} {key}, float32" in text
    assert str(stop.culprit.site) == f"{module} · optimizer · {kind} {key}"


def test_the_advice_names_the_key() -> None:
    model = make_model()
    with torch.no_grad():
        model[3].weight[0, 0] = NAN
    fastcheck.install(model)
    with pytest.raises(fastcheck.OverflowDetected) as caught:
        train(model)
    assert "Parameter 3.weight was non-finite before" in str(caught.value)
    assert any(key in str(caught.value) for key in model.state_dict())


def test_inputs_and_reasons_name_the_key() -> None:
    model = make_model()
    monitor = fastcheck.install(model, overflow_nums=-1)
    train(model, lambda: model[3].weight[0, 0].fill_(NAN), steps=2)
    with contextlib.suppress(fastcheck.OverflowDetected):
        train(model, steps=1)
    assert any("parameter 3.weight" in event.reason for event in monitor.events)
    text = monitor.summary()
    assert "3 (Linear) parameter 3.weight" in text  # where
    assert "parameter 3.weight  " in text  # the last step's table


def test_the_key_of_the_model_itself_has_no_module() -> None:
    site = build.site("", "Linear", role="param", label="weight")
    assert site.tensor_name == "parameter weight"


def test_a_parametrised_weight_goes_by_the_key_of_what_is_stored() -> None:
    model = make_model()
    torch.nn.utils.parametrizations.weight_norm(model[3])
    monitor = fastcheck.install(model, overflow_nums=-1)
    train(model)
    stored = {site.tensor_name for site in monitor.sites if site.role == "param"}
    keys = {name for name, _ in model.named_parameters()}
    assert stored == {f"parameter {key}" for key in keys}
    assert "3.parametrizations.weight.original1" in keys


def test_a_shared_parameter_goes_by_its_first_key() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    fastcheck.install(model)
    stop = stop_of(model, lambda: model[1].weight[0, 0].fill_(NAN))
    assert "parameter 0.weight of 0 (Linear)" in str(stop)


def test_in_a_further_model_the_class_stands_before_the_key() -> None:
    model, criterion = make_model(), nn.Sequential(nn.Linear(2, 2), nn.BCEWithLogitsLoss())
    monitor = fastcheck.install(model, criterion, overflow_nums=-1)
    train(model)
    names = {site.tensor_name for site in monitor.sites}
    assert "parameter Sequential.0.weight" in names and "parameter 0.weight" in names


def test_show_lists_keys(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model()
    fastcheck.install(model, log_dir=str(tmp_path))
    stop = stop_of(model, lambda: model[3].weight[0, 0].fill_(NAN))
    assert stop.log_path is not None
    assert main(["show", stop.log_path, "--site", "3.weight", "--limit", "0"]) == 0
    shown = capsys.readouterr().out
    assert "parameter 3.weight of 3 (Linear)" in shown  # events
    assert "\n          parameter 3.weight " in shown  # records
    assert "gradient of 3.weight" in shown
