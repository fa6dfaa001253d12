"""allow_nonfinite() at op level: an input, a site, a region; what gets out is an event."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.types import Verdict
from fastcheck.verdict import allowed
from support.programs.op_level import culprit
from support.programs.training import Apply, chain, stopped

NAN, INF = float("nan"), float("inf")

pytestmark = pytest.mark.usefixtures("op_observer")


@pytest.fixture(autouse=True)
def no_allowances() -> Iterator[None]:
    yield
    allowed._allowances.clear()


def watch(model: nn.Module, **options: Any) -> fastcheck.Monitor:
    return fastcheck.install(model, level="op", record="stats", **options)


def batch() -> torch.Tensor:
    x = torch.randn(6, 3)
    x[2, 1] = NAN
    return x


def chain_of(**functions: Any) -> nn.Module:
    model = chain(**{name: Apply(function) for name, function in functions.items()})
    model.register_parameter("weight", nn.Parameter(torch.ones(1)))
    return model


def test_a_model_that_returns_gaps_of_its_batch() -> None:
    model = chain_of(scale=lambda x: x * 2, shift=lambda x: x + 1)
    with watch(model):
        assert culprit(stopped(model, batch()))[3] == "arrived"
    fastcheck.allow_nonfinite("", "input[0]", reason="sensors fail")
    fastcheck.allow_nonfinite("scale", reason="gaps stay")
    with watch(model):
        stop = stopped(model, batch())
        assert culprit(stop) == ("shift", "aten.add.Tensor", "forward", "origin")
        assert "values that allow_nonfinite() allows in scale (Apply)" in stop.culprit.reason
    fastcheck.allow_nonfinite("shift", "output", reason="gaps stay")
    with watch(model) as monitor:
        model(batch())
    assert monitor.event_count == 0
    assert {e.verdict for e in monitor.events} <= {Verdict.INTENDED, Verdict.ABSORBED}
    assert any("gaps stay" in e.reason for e in monitor.events)


def test_an_infinity_is_allowed_like_a_nan() -> None:
    model = chain_of(log=lambda x: torch.exp(x.abs() * 1e5), shift=lambda x: x + 1)
    fastcheck.allow_nonfinite("log", reason="weights of 0")
    with watch(model):
        assert culprit(stopped(model, torch.ones(3)))[0] == "shift"


def test_a_gradient_or_an_update_is_an_event_in_any_case() -> None:
    model = chain(fc=nn.Linear(3, 2), root=Apply(lambda x: torch.where(x > 1e9, (x * 0).sqrt(), x)))
    fastcheck.allow_nonfinite("*", reason="all")
    watch(model)
    stop = stopped(lambda: model(torch.ones(4, 3)).sum().backward())
    assert culprit(stop)[1:3] == ("aten.sqrt", "backward")
    assert "allowed by allow_nonfinite(): all; it reached the gradient" in stop.culprit.reason


def test_a_loss_is_an_event_in_any_case() -> None:
    model = chain(fc=nn.Linear(3, 2))
    fastcheck.allow_nonfinite("", reason="all")
    watch(model)
    stop = stopped(lambda: torch.log(model(torch.ones(4, 3)) * 0).sum().backward())
    assert culprit(stop)[1] == "aten.log"


def metric(x: torch.Tensor) -> float:
    return float((x * 0).sum() / (x * 0).sum())


def test_a_region() -> None:
    model = chain(fc=nn.Linear(3, 2))
    monitor = watch(model)
    y = model(torch.ones(4, 3)).detach()
    with fastcheck.allow_nonfinite(reason="classes without samples"):
        assert metric(y) != metric(y)
    y = model(torch.ones(4, 3)).detach()
    assert monitor.event_count == 0
    stopped(lambda: (metric(y), monitor.step()))
    assert monitor.event_count == 1


def test_what_was_made_before_a_region_is_no_part_of_it() -> None:
    model = chain(fc=nn.Linear(3, 2))
    monitor = watch(model)
    y = model(torch.ones(4, 3)).detach()
    bad = (y * 0) / (y * 0)
    with fastcheck.allow_nonfinite(reason="classes without samples"):
        good = (y * 0) / (y * 0)
    float(good.sum().isnan())
    stop = stopped(lambda: (float(bad.sum()), monitor.step()))
    assert str(test_what_was_made_before_a_region_is_no_part_of_it.__code__.co_firstlineno + 4) in (
        stop.culprit.line
    )


def test_a_stored_tensor() -> None:
    model = chain(fc=nn.Linear(3, 2))
    model.register_buffer("gaps", torch.full((3,), NAN))
    model.fc.register_forward_pre_hook(lambda module, args: (args[0] * 1,))
    fastcheck.allow_nonfinite("", "gaps", reason="filled later")
    with watch(model) as monitor:
        model(torch.ones(4, 3))
    assert monitor.event_count == 0
