"""Warnings of gradients that are 0 or None name where they became it, as far as was read; there is
one of those that are next to 0.
"""

from __future__ import annotations

import warnings
from typing import Any, Callable

import pytest
import torch
from torch import nn

import fastcheck
from support.warned import warned

pytestmark = pytest.mark.usefixtures("fresh_start")


class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def warning_of(
    model: nn.Module, loss: Callable[[torch.Tensor], torch.Tensor], **options: Any
) -> str:
    """The only warning of a training on ``loss``, a function of a batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(0)
    with pytest.warns(fastcheck.FastcheckWarning) as caught, fastcheck.install(model, **options):
        for _ in range(12):
            optimizer.zero_grad()
            loss(torch.randn(4, 8)).backward()
            optimizer.step()
    (text,) = [str(warning.message) for warning in caught]
    return text


@pytest.mark.parametrize("level", ["module", "op"])
def test_a_module_that_returns_0(level: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Times(0.0), nn.Linear(8, 4))
    text = warning_of(model, lambda x: model(x).square().mean(), level=level)
    assert text.startswith("gradients that are all 0: of 0.weight, 0.bias, 2.weight, in 10 updates")
    what = "output of" if level == "module" else "result of aten.mul.Tensor in"
    assert f"In the last of these steps the {what} 1 (Times) was 0 throughout" in text
    between = "the gradient of output of 0 (Linear) was 0 throughout, and the gradient of output of"
    named = f"{between} 1 (Times), which was read before it, was not."
    assert (named in text) is (level == "module")


@pytest.mark.parametrize("level", ["module", "op"])
def test_an_operator_whose_derivative_is_0(level: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    text = warning_of(model, lambda x: model[1](model[0](x).sign()).square().mean(), level=level)
    assert "of 0.weight, 0.bias, in 10 updates" in text
    where = "output of 0 (Linear) was 0 throughout, and the gradient of input[0] of 1 (Linear),"
    if level == "op":
        where = "aten.sign in outside the model was 0 throughout, and what was read before it was"
    assert f"the gradient of {where}" in text
    assert "each way to them leads through sign, whose derivative is 0: pass the gradient" in text
    assert "Possible causes" not in text


@pytest.mark.parametrize("is_first_zero", [False, True])
def test_branches_of_a_model(is_first_zero: bool) -> None:
    """The gradient of one part is read after that of the other, and does not come from it.
    ``is_first_zero``: that of the other became 0 in an earlier step, and was told of then.
    """
    model = nn.ModuleDict(
        {
            "actor": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)),
            "critic": nn.Sequential(nn.Linear(8, 8), Times(1.0), nn.Linear(8, 1)),
        }
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with warned() as texts, fastcheck.install(model):
        for step in range(24):
            optimizer.zero_grad()
            x = torch.randn(4, 8)
            model["critic"][1].factor = 0.0 if is_first_zero else 1.0
            (model["actor"](x) * (step < 12)).sum().add(model["critic"](x).sum()).backward()
            optimizer.step()
    text = texts[-1]
    assert text.startswith("gradients that are all 0: of actor.0.weight")
    assert "In the last of these steps " in text
    assert "the gradient of output of actor.1 (Linear) was 0 throughout." in text


@pytest.mark.parametrize("is_all", [True, False])
@pytest.mark.parametrize(
    "clamp", [torch.clamp, torch.clamp_min, lambda y, low: -(-y).clamp(low - 99, -low)]
)
def test_what_is_beyond_the_limits_of_clamp(clamp: Any, is_all: bool) -> None:
    """Where some of it is not, the loss is multiplied by 0."""
    model = nn.Linear(8, 1)

    def loss(x: torch.Tensor) -> torch.Tensor:
        y = model(x) + torch.tensor([[0.0 if is_all else 5.0], [0.0], [0.0], [0.0]])
        return clamp(y, 4.0 if is_all else 1.0).square().mean() * float(is_all) + 1.0

    text = warning_of(model, loss)
    said = "leads through clamp, of which all that it was given is beyond the limits, whose deriva"
    assert (said in text) is is_all and ("Possible causes" in text) is not is_all


def test_a_difference_of_a_tensor_and_itself() -> None:
    """The ratio of a policy to itself, where the old one has to be detached."""
    model = nn.Linear(8, 4)

    def loss(x: torch.Tensor) -> torch.Tensor:
        new = model(x).log_softmax(-1)[:, 0]
        return ((new - new).exp() * x[:, 0]).mean()

    text = warning_of(model, loss)
    assert "leads through the difference of a tensor and itself, whose derivative is 0" in text


def test_a_gradient_that_another_way_could_have_reached() -> None:
    """Of the second way the weight of the loss is 0."""
    model = nn.Linear(8, 4)
    text = warning_of(model, lambda x: (model(x).round() + 0 * model(x)).square().mean())
    assert "Possible causes" in text and "leads through" not in text


@pytest.mark.parametrize("is_called", [False, True])
def test_a_training_without_backward(is_called: bool) -> None:
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(fastcheck.FastcheckWarning) as caught, fastcheck.install(model):
        for _ in range(12):
            loss = model(torch.randn(4, 8)).square().mean()
            if is_called:
                loss.detach().requires_grad_().backward()
            optimizer.step()
    (text,) = [str(warning.message) for warning in caught]
    assert ("backward() was not called" in text) is not is_called


def test_a_weight_of_a_loss_that_is_0() -> None:
    """The gradients of the two come from one loss, and nothing was read between."""
    model = nn.ModuleDict({"one": nn.Linear(8, 4), "other": nn.Linear(8, 4)})
    text = warning_of(model, lambda x: model["one"](x).sum() * 0 + model["other"](x).mean() * 0 + 1)
    assert "of other (Linear) was 0 already where it came from the loss." in text


@pytest.mark.parametrize(
    "made", [lambda y: y.argmax(1).float(), lambda y: torch.tensor(y.tolist())]
)
def test_a_loss_without_a_graph(made: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = nn.Linear(8, 4)
    text = warning_of(model, lambda x: made(model(x)).requires_grad_().mean())
    assert text.startswith("no gradient: weight, bias had grad=None in 10 updates of an optimizer")
    assert "argmax" in text and "made anew" in text


def test_a_branch_without_a_graph_is_no_loss_without_one() -> None:
    model = nn.ModuleDict({"one": nn.Linear(8, 4), "other": nn.Linear(8, 4)})
    text = warning_of(model, lambda x: (model["one"](x) + model["other"](x).detach()).mean())
    assert "no gradient: other.weight, other.bias" in text and "made anew" not in text


@pytest.mark.parametrize(
    ("factors", "is_told"),
    [([1e-16] * 50, True), ([1.0] + [1e-16] * 49, False), ([1e-12] * 50, False)],
    ids=["faint", "strong at first", "small"],
)
def test_gradients_that_vanish(factors: list[float], is_told: bool) -> None:
    model = nn.ModuleDict({"one": nn.Linear(8, 4), "other": nn.Linear(8, 4)})
    optimizer = torch.optim.Adam(model.parameters(), 0.01, eps=1e-30)
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught, fastcheck.install(model, watch=False):
        warnings.simplefilter("always")
        for factor in factors:
            x = torch.randn(4, 8)
            optimizer.zero_grad()
            (
                model["one"](x).square().mean() + factor * model["other"](x).square().mean()
            ).backward()
            optimizer.step()
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == is_told
    assert all(t.startswith("gradients that vanish: those of other.weight were") for t in texts)
