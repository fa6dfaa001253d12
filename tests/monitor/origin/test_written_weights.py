"""Weights that the program itself has written: what a stop names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fastcheck


def test_weights_that_the_loop_itself_breaks() -> None:
    """Its own update ends a step."""
    model = nn.Linear(4, 1)
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        for x in (torch.ones(2, 4), torch.zeros(2, 4), torch.ones(2, 4)):
            model.zero_grad()
            model(x).square().mean().backward()
            with torch.no_grad():
                model.weight -= 0.1 * model.weight.grad / model.weight.grad.norm()
    text = " ".join(str(stop.value).split())
    assert "it was finite just before the update of step 1, and no longer is" in text
    assert "0/0" in text and "If the program wrote it after the update, look there" in text
    assert "first read" not in text and "check the checkpoint" not in text


def test_what_the_loop_has_written_to_a_weight() -> None:
    model = nn.Linear(4, 1)
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        for x in (torch.ones(2, 4), torch.zeros(2, 4)):
            model.zero_grad()
            model(x).square().mean().backward()
            with torch.no_grad():
                ways = [p.grad / p.grad.norm() for p in model.parameters()]
                torch._foreach_add_(list(model.parameters()), ways)
                model(x)
    made = stop.value.report.made_by
    assert stop.value.culprit.site.key == "weight" and made is not None
    assert "the weight may have been written from it" in made.how
    assert made.variable.startswith(f"ways[0]; ways is assigned at {__file__}:")


def test_another_name_of_a_weight_is_not_what_it_was_written_from() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state = model.state_dict()
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                model.weight.mul_(float("nan"))
    assert stop.value.culprit.site.key == "weight" and state["weight"].isnan().all()
    assert stop.value.report.made_by is None


def test_a_gradient_is_not_what_its_weight_was_written_from() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    weights = list(model.parameters())
    optimizer = torch.optim.SGD(weights, 0.1)
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        for step in range(2):
            loss = model(torch.ones(2, 4)).square().mean()
            if step == 1:
                weights[1].data.mul_(float("nan"))
            grads = torch.autograd.grad(loss, weights)
            for weight, grad in zip(weights, grads):
                weight.grad = grad
            optimizer.step()
    assert stop.value.culprit.site.key == "1.weight" and grads[0].isnan().all()
    assert stop.value.report.made_by is None


def test_weights_that_the_loop_broke_before_op_level_stopped() -> None:
    """A consequence counts when the model returns it: the program has written a weight by then."""
    model = nn.Linear(4, 1)
    with (
        fastcheck.install(model, level="op") as _,
        pytest.raises(fastcheck.OverflowDetected) as stop,
    ):
        for _ in range(2):
            model.zero_grad()
            model(torch.zeros(2, 4)).square().mean().backward()
            with torch.no_grad():
                model.weight -= 0.1 * model.weight.grad / model.weight.grad.norm()
    text = " ".join(str(stop.value).split())
    assert "aten.div.Tensor" in text and "weight holds NaN or Inf now" in text


@pytest.mark.parametrize("level", ["module", "op"])
def test_an_average_of_weights_that_is_pushed_away_was_not_updated_by_the_optimizer(
    level: str,
) -> None:
    model, average = nn.Linear(4, 2), nn.Linear(4, 2).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with (
        fastcheck.install(model, average, watch=False, level=level),
        pytest.raises(fastcheck.OverflowDetected) as stop,
    ):
        for _ in range(100):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                for mine, p in zip(average.parameters(), model.parameters()):
                    mine += 5 * (mine - p)
                average(torch.full((2, 4), 1e6))
    assert stop.value.report.not_updated == ("Linear.weight", "Linear.bias")
    text = " ".join(str(stop.value).split())
    if level == "module":
        assert "which no optimizer holds: its largest number went from" in text
    else:
        assert "No optimizer holds Linear.weight and Linear.bias" in text
    assert "learning rate" not in text
