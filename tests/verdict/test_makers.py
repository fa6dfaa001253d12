"""A -Inf from which a module or an operator made a NaN: the report names that one first."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fastcheck
from support.programs.training import Apply, chain, stopped, where

INF = float("inf")

pytestmark = pytest.mark.usefixtures("op_observer")


class Head(nn.Module):
    """Attention over what it is given, by torch's own function."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(self.q(x), x, x)


def some(x: torch.Tensor) -> torch.Tensor:
    return torch.log(x.relu())


def whole(x: torch.Tensor) -> torch.Tensor:
    return torch.log(x * 0)


def masked(x: torch.Tensor) -> torch.Tensor:
    return x.masked_fill(torch.ones_like(x, dtype=torch.bool), -INF)


def stop_of(level: Any, make: Callable[..., Any], reader: nn.Module) -> fastcheck.OverflowDetected:
    torch.manual_seed(0)
    model = chain(first=nn.Linear(8, 8), maker=Apply(make), reader=reader, last=nn.Linear(8, 2))
    fastcheck.install(model, level=level, record="stats")
    return stopped(lambda: model(torch.randn(2, 4, 8)).sum().backward())


READERS = {
    "LayerNorm": lambda: nn.LayerNorm(8),
    "GroupNorm": lambda: nn.GroupNorm(2, 4),
    "BatchNorm1d": lambda: nn.BatchNorm1d(4),
    "scaled_dot_product_attention": Head,
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
}


@pytest.mark.parametrize("level", ["module", "op"])
@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_the_maker_leads(level: str, reader: Any) -> None:
    stop = stop_of(level, some, reader())
    assert where(stop.culprit) == ("maker", "output", "output", "origin")
    assert "NaN of it" in stop.culprit.reason or "did harm: reader" in stop.culprit.reason
    assert "reader" in str(stop) or "made a NaN of it" in str(stop)


@pytest.mark.parametrize("make", [whole, masked])
def test_a_softmax_of_a_whole_row(make: Any) -> None:
    """At module level a mask looks like a log of zero."""
    stop = stop_of("module", make, nn.Softmax(-1))
    assert where(stop.culprit) == ("reader", "output", "output", "origin")
    assert "masked entirely" in stop.culprit.reason
    assert "the -Inf of maker (Apply) · forward · output" in stop.culprit.reason


@pytest.mark.parametrize("reader", [lambda: nn.Softmax(-1), lambda: nn.LayerNorm(8)])
def test_an_infinity_on_purpose_is_named_beside_the_op_that_made_a_nan_of_it(reader: Any) -> None:
    stop = stop_of("op", masked, reader())
    assert where(stop.culprit)[0] == "reader"
    assert "written on purpose in maker (Apply) · aten.masked_fill" in stop.culprit.reason
    assert f"test_makers.py:{masked.__code__.co_firstlineno + 1}" in stop.culprit.reason


def test_running_statistics_that_overflow_by_themselves_are_blamed() -> None:
    model = chain(first=nn.Linear(8, 8), reader=nn.BatchNorm1d(8))
    fastcheck.install(model, level="op", record="stats")
    stop = stopped(lambda: model(torch.randn(4, 8) * 1e30).sum().backward())
    assert where(stop.culprit)[0] == "reader"


class Masked(nn.Module):
    """A sublayer is added to its input and normalised, under a mask as attention has."""

    def __init__(self) -> None:
        super().__init__()
        self.sublayer, self.norm, self.value = Apply(), nn.LayerNorm(8), 0.0
        self.sublayer.function = lambda x: torch.where(torch.arange(8) == 3, self.value, x)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = torch.softmax(x @ x.transpose(-2, -1) + mask, -1)
        return self.norm(x + self.sublayer(scores @ x))


def test_an_infinity_beside_a_mask_is_named_where_it_was_made() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Masked()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), -INF)
            return self.layer(x, mask)

    model = Model()
    fastcheck.install(model)

    def train() -> None:
        for step in range(3):
            model.layer.value = -INF if step == 2 else 0.0
            model(torch.randn(2, 4, 8)).sum().backward()
            torch.optim.SGD(model.parameters(), lr=0.01).step()

    stop = stopped(train)
    assert stop.step == 2
    assert where(stop.culprit) == ("layer.sublayer", "output", "output", "origin")
    assert "masked" not in stop.culprit.reason
