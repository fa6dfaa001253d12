"""Tests of explosions: of activations, gradients and weights, and what has no past."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

import fastcheck
from fastcheck.record.format import RECORD_DTYPE, Flag
from fastcheck.record.site import Site
from fastcheck.watch.event import WatchEvent
from support.watched import SCALED, Run, tensor

INPUT, FIRST, SECOND, GRADIENT, FIRST_WEIGHT, SECOND_WEIGHT = 0, 1, 2, 3, 4, 5
ZERO = {"rms": 0.0, "zero_count": 1024}


def explosions(run: Run, changed: dict[int, Any], **row: Any) -> list[WatchEvent]:
    return [one for one in run.step(changed, **row) if one.kind == "explosion"]


@pytest.mark.parametrize(
    ("place", "name", "cause"),
    [
        (GRADIENT, "second (Linear) · backward", "gradient"),
        (FIRST_WEIGHT, "first (Linear) · optimizer · parameter first.weight", "optimizer"),
        (SECOND, "second (Linear) · forward", "layer"),
    ],
)
@pytest.mark.parametrize("fields", [{"max": 1e6}, 1e6])
def test_what_has_a_past_explodes(place: int, name: str, cause: str, fields: Any) -> None:
    run = Run()
    assert run.steps(30) == []
    (event,) = explosions(run, {place: fields})
    assert name in event.text and event.is_warning and event.cause == cause


@pytest.mark.parametrize("reaches", [False, True])
def test_a_gradient_that_explodes_before_a_0_warns_of_nothing(reaches: bool) -> None:
    """That of a division by an eps where all is 0, whose own gradient is 0 there."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Hardsigmoid())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with warnings.catch_warnings(), fastcheck.install(model) as monitor:
        warnings.simplefilter("ignore")
        for step in range(40):
            given = model(torch.randn(8, 4) * 8)
            is_at_bound = (given == 0) | (given == 1)
            if step == 30:
                factor = torch.where(is_at_bound, 1e5, 1e5 if reaches else 0.0)
                given = given + (given - given.detach()) * factor
            optimizer.zero_grad()
            given.sub(0.4).square().mean().backward()
            optimizer.step()
    found = [one for one in monitor.watch.events if one.kind == "explosion" and one.step == 30]
    assert found and {event.is_warning for event in found} == {reaches}


@pytest.mark.parametrize("given", [1e6, 100.0])
def test_a_batch_that_is_as_much_larger_is_named(given: float) -> None:
    run = Run()
    run.steps(30)
    (event,) = explosions(run, {INPUT: given, FIRST: 1e6})
    why = "; the batch is at least a thousand times as large as before, too: Linear · forward"
    assert (why in event.text) == (event.cause == "data") == (given == 1e6)


def test_one_of_a_run_that_goes_on_to_explode_warns() -> None:
    run = Run()
    run.steps(30)
    found = [*explosions(run, {FIRST: 1e6}), *explosions(run, {SECOND: 1e6})]
    assert [event.is_warning for event in found] == [True, False]


@pytest.mark.parametrize("place", [FIRST, GRADIENT])
@pytest.mark.parametrize(("tried", "used"), [(1e6, 1.0), (1.0, 1e6)])
def test_a_point_that_a_line_search_has_left_is_none(place: int, tried: float, used: float) -> None:
    run = Run()
    run.steps(30)
    loss = np.zeros(1, RECORD_DTYPE)
    loss["site"] = run.sites.intern(Site("", "", "forward", "loss", 0, "loss"))
    loss["flags"] = int(Flag.ANEW)
    found = run.take([run.healthy({place: tried}), loss, run.healthy({place: used})])
    assert [event.kind for event in found] == ["explosion"] * (used == 1e6)


@pytest.mark.parametrize("place", [FIRST, GRADIENT, FIRST_WEIGHT])
@pytest.mark.parametrize("steps", [15, 16])
def test_sixteen_steps_are_a_past(place: int, steps: int) -> None:
    run = Run()
    run.steps(steps)
    assert len(explosions(run, {place: 1e6})) == (steps == 16)


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"max": 900.0, "min": 0.0, "sum": 40_000.0}, 0),  # a cumsum of a mask, of 1,024 elements
        ({"max": 900.5, "min": 0.0, "sum": 40_000.0}, 1),
        ({"max": 2000.0, "min": 0.0, "sum": 40_000.0}, 1),
        ({"max": 1.0, "min": 0.0, "sum": 40.5}, 0),  # a probability
    ],
)
def test_what_is_bounded_does_not_explode(fields: dict[str, float], count: int) -> None:
    run, few = Run(), {"max": 0.0009, "min": 0.0, "sum": 0.5}
    run.steps(30, {FIRST: few})
    assert len(explosions(run, {FIRST: fields})) == count


def test_less_than_a_thousand_times_its_highest_is_none() -> None:
    run = Run()
    run.steps(30)
    run.steps(1, {GRADIENT: 100.0})
    assert explosions(run, {GRADIENT: 9e4}) == []
    assert len(explosions(run, {GRADIENT: 3e8})) == 1


@pytest.mark.parametrize("place", [FIRST, GRADIENT, FIRST_WEIGHT])
def test_the_first_use_of_what_was_zero_is_none(place: int) -> None:
    run = Run()
    run.steps(100, {place: ZERO})
    assert explosions(run, {place: 1.0}) == []


@pytest.mark.parametrize("place", [FIRST, GRADIENT, FIRST_WEIGHT])
def test_what_was_used_in_a_few_steps_has_no_past(place: int) -> None:
    run = Run()
    for step in range(100):
        run.step({place: 1e-6 if step % 20 == 0 else ZERO})
    assert explosions(run, {place: 1.0}) == []


def test_growth_from_nothing_is_none() -> None:
    run, found = Run(), []
    for step in range(200):
        size = 1e-12 * 2.0 ** min(step, 40)
        found += explosions(run, {GRADIENT: size, FIRST_WEIGHT: size})
    assert found == []


@pytest.mark.parametrize(("usual", "count"), [(1e-8, 0), (1e-5, 1)])
def test_gradients_that_are_the_rounding_of_zero_have_no_past(usual: float, count: int) -> None:
    """Beside another one, of about 1."""
    run = Run()
    site = run.sites.intern(Site("third", "Linear", "backward", "grad_output", 0, "grad_output"))

    def step(rms: float) -> list[str]:
        records = run.healthy()
        one = records[:1].copy()
        for name, value in {**tensor(rms=rms), "site": site}.items():
            one[0][name] = value
        return [event.kind for event in run.take([records, one])]

    for _ in range(60):
        step(usual)
    assert step(1e4 * usual).count("explosion") == count


def test_a_step_that_loss_scaling_skips_is_none() -> None:
    run, scaled = Run(), {"flags": SCALED, "rms": 1024.0}
    run.steps(100, {GRADIENT: scaled}, scale=1024.0)
    large = {GRADIENT: {**scaled, "rms": 1e8}}
    assert explosions(run, large, scale=1024.0, overflow=True) == []


@pytest.mark.parametrize(("loss", "is_warning"), [(2.0, True), (1e6, False)])
def test_gradients_of_a_loss_that_spikes_do_not_warn_as_well(loss: float, is_warning: bool) -> None:
    run = Run()
    run.steps(100)
    (event,) = explosions(run, {GRADIENT: 1e6}, loss=loss)
    assert event.is_warning is is_warning


def test_the_event_names_the_first_in_the_order_of_a_step() -> None:
    run = Run()
    run.steps(30)
    (event,) = explosions(run, {GRADIENT: 1e6, SECOND: 1e6, SECOND_WEIGHT: 1e6})
    assert event.site is not None and event.site.role == "param"
    # What follows of it in the next steps is none of its own.
    assert explosions(run, {GRADIENT: 1e12, SECOND: 1e12, SECOND_WEIGHT: 1e12}) == []
