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
