"""Tests of the sentence of a stop on an input that is far larger than those before."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fastcheck


@pytest.mark.parametrize(
    ("scale", "last", "is_said"),
    [(1e4, 8, True), (3.0, 8, False), (1e4, 3, False), (1000, 8, False)],
)
def test_a_batch_that_is_far_larger_than_those_before(
    scale: float, last: int, is_said: bool
) -> None:
    """``last``: the step that stops, whose batch is so many times as large. One of them is of
    tokens, which are numbers and no sizes.
    """
    has_tokens = isinstance(scale, int)
    first = nn.Embedding(2001, 4) if has_tokens else nn.Linear(4, 4)
    model = nn.Sequential(first, nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with pytest.raises(fastcheck.OverflowDetected) as stop, fastcheck.install(model):
        for step in range(10):
            x = (torch.arange(32.0).view(8, 4) / 31 + 1) * (scale if step == last else 1)
            loss = model(x.long() if has_tokens else x).mean()
            optimizer.zero_grad()
            (loss / (0 if step == last else 1)).backward()
            optimizer.step()
    text = " ".join(str(stop.value).split())
    said = "input[0] of the model reaches 20,000 in this step; in the 8 steps before it was at most"
    assert (f"{said} 2." in text) is is_said
    assert ("of the model reaches" in text) is is_said


@pytest.mark.parametrize("is_far", [True, False])
def test_a_batch_whose_update_blew_up_the_weights(is_far: bool) -> None:
    """The loss of the batch was finite, and that of the next is not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with pytest.raises(fastcheck.OverflowDetected) as stop, fastcheck.install(model, watch=False):
        for step in range(12):
            x = torch.rand(8, 4) * (1e9 if is_far and step == 8 else 1)
            optimizer.param_groups[0]["lr"] = 1e12 if not is_far and step == 8 else 1e-3
            loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    text = " ".join(str(stop.value).split())
    assert ("input[0] of the model reached 9.99e+08 in step 8; in the 8 steps" in text) is is_far
    tried = "try 1. input[0] of the model was 1.00e+09 times as large in step 8 as in the 8 steps"
    assert (f"{tried} before: look at the data of that step" in text) is is_far
    assert ("input[0] of the model" in text) is is_far
    assert (
        "try 1. An update, or a write by the program, since step 8 took the largest number" in text
    ) is not is_far


@pytest.mark.parametrize(("in_place", "is_said"), [(True, True), (False, False)])
def test_a_data_set_that_each_epoch_changes(in_place: bool, is_said: bool) -> None:
    """It is standardised again in each epoch; the stop is of the learning rate or of a batch."""
    torch.manual_seed(0)
    data = torch.rand(40, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-5)
    with pytest.raises(fastcheck.OverflowDetected) as stop, fastcheck.install(model, watch=False):
        for step in range(2000):
            batch = data[step % 5 * 8 : step % 5 * 8 + 8]
            batch = (batch if in_place else batch.clone()).sub_(0.5).div_(0.3)
            if step == 200:  # one batch alone is no drift
                batch = batch * 1e30
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    text = " ".join(str(stop.value).split())
    assert ("input[0] of the model has grown: it reaches" in text) is is_said
    assert ("try 1. input[0] of the model is" in text) is is_said


def test_numbers_that_grew_with_the_batch_are_not_put_down_to_the_learning_rate() -> None:
    """Of too few steps for a growth: the input is far larger than in those before."""
    torch.manual_seed(0)
    data = torch.rand(8, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    with pytest.raises(fastcheck.OverflowDetected) as stop, fastcheck.install(model, watch=False):
        for _ in range(12):
            data.div_(1e-3)
            loss = (model(data) - data[:, :1]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    text = " ".join(str(stop.value).split())
    assert "try 1. input[0] of the model is 1000 times as large as in the" in text
    assert "look at the data of this step, or at what else makes it, before the learning" in text
