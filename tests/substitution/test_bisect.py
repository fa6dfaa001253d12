"""bisect() finds the operators that cause a difference, and no others."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fastcheck
from fastcheck.record.site import OUTSIDE
from fastcheck.substitution.bisect import _minimal


@pytest.fixture(scope="module", autouse=True)
def _library() -> Iterator[None]:
    """``bisectlab::total`` sums in its input's dtype and cuts off, instead of rounding, what does
    not fit: each sum is off by less than one spacing of float16, and always to the same side.
    """
    library = torch.library.Library("bisectlab", "DEF")
    library.define("total(Tensor x) -> Tensor")
    library.define("twice(Tensor x) -> Tensor")

    def total(x: torch.Tensor) -> torch.Tensor:
        exact = x.double().sum()
        if x.dtype is not torch.float16:
            return exact.to(x.dtype)
        rounded = exact.half()
        bits = rounded.view(torch.int16)
        return (bits - (rounded.double() > exact).to(torch.int16)).view(torch.float16)

    library.impl("total", total, "CPU")
    library.impl("twice", lambda x: x * (2.0 if x.dtype is torch.float32 else 2.1), "CPU")
    yield
    library._destroy()


class Leaky(nn.Module):
    """Each step adds up a little; in the end the balance should be that of exact arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(16, 16, bias=False)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.softmax(self.norm(self.scale(x)), -1)
        return torch.ops.bisectlab.total(y.abs().exp())


STEPS = 60


def drift(override: Any) -> float:
    """How far the sum over all steps is from that of float64."""
    torch.manual_seed(0)
    model = Leaky()
    exact = Leaky().double()
    exact.load_state_dict({k: v.half().double() for k, v in model.state_dict().items()})
    model.half()
    balance = error = 0.0
    with torch.no_grad():
        for _ in range(STEPS):
            x = torch.randn(4, 16).half()
            with override:
                made = model(x)
            balance += float(made)
            error += float(exact(x.double()))
    return abs(balance - error)


def test_an_error_that_only_shows_in_accumulation() -> None:
    found = fastcheck.bisect(drift, float, dtype=torch.float32)
    assert found.culprits == ("bisectlab.total",), str(found)
    assert found.value <= found.threshold < found.before
    assert len(found.runs) < 20
    assert str(found).startswith("bisectlab.total: ")
    # Below the threshold between a faulty operator and rounding.
    x = torch.linspace(0.1, 1.0, 64).half()
    wanted = x.double().sum()
    assert abs(torch.ops.bisectlab.total(x).double() - wanted) / wanted < 1e-3


def test_by_module_and_by_call() -> None:
    model = nn.Sequential(*(nn.Identity() for _ in range(6)))
    model[4].forward = torch.ops.bisectlab.twice
    model[1].forward = lambda x: x + 1

    def run(override: Any) -> float:
        with override:
            return float(torch.ops.bisectlab.twice(model(torch.ones(1).half())))

    def metric(value: float) -> float:
        return abs(value - 8.0)

    options: Any = {"dtype": torch.float32, "threshold": 0.25}
    assert fastcheck.bisect(run, metric, **options).culprits == ("bisectlab.twice",)
    found = fastcheck.bisect(run, metric, by="call", **options)
    assert found.culprits == ("bisectlab.twice #0", "bisectlab.twice #1")
    found = fastcheck.bisect(run, metric, by="module", **options)
    assert set(found.culprits) == {"4", OUTSIDE}


def test_a_metric_of_true_and_false_and_nan() -> None:
    def run(override: Any) -> torch.Tensor:
        x = torch.full((4,), 300.0).half()
        with override:
            y = torch.cumsum(x, 0) + 1
            return torch.ops.bisectlab.twice(y)

    def is_wrong(y: torch.Tensor) -> bool:
        return not torch.equal(y[:1], torch.tensor([602.0]).half())

    assert fastcheck.bisect(run, is_wrong, dtype=torch.float32).culprits == ("bisectlab.twice",)
    found = fastcheck.bisect(run, lambda y: math.nan if is_wrong(y) else 0.0, dtype=torch.float32)
    assert found.culprits == ("bisectlab.twice",)
    assert found.before == math.inf


def test_where_nothing_explains_it() -> None:
    def run(override: Any) -> float:
        with override:
            return float(torch.ones(4).half().sum())

    found = fastcheck.bisect(run, lambda value: value - 1.0, dtype=torch.float32)
    assert found.culprits == ()
    assert str(found).startswith("no operator explains it: 3 as it is, 3 with everything")
    assert len(found.runs) == 2
    found = fastcheck.bisect(run, lambda value: value - 1.0, dtype=torch.float32, threshold=100.0)
    assert found.culprits == ()  # it is good as it is


def test_among_those_that_are_named() -> None:
    def run(override: Any) -> float:
        with override:
            return float(torch.ops.bisectlab.twice(torch.ones(1).half()) + 1)

    found = fastcheck.bisect(run, lambda v: abs(v - 3), ops=["aten.add"], dtype=torch.float32)
    assert found.culprits == ()
    assert {name for names, _ in found.runs for name in names} == {"aten.add.Tensor"}
    with pytest.raises(fastcheck.ConfigError, match=r"has the name 'aten\.mm'"):
        fastcheck.bisect(run, float, ops=["aten.mm", "aten.add"], dtype=torch.float32)


def test_options() -> None:
    with pytest.raises(fastcheck.ConfigError, match="did you mean 'module'"):
        fastcheck.bisect(drift, float, dtype=torch.float32, by="modul")
    with pytest.raises(fastcheck.ConfigError, match="changes nothing"):
        fastcheck.bisect(drift, float)
    with pytest.raises(fastcheck.ConfigError, match="found no operator"):
        fastcheck.bisect(lambda override: 1.0, float, dtype=torch.float32)
    for result in (None, torch.ones(2), "high"):
        with pytest.raises(fastcheck.ConfigError, match="is a number"):
            fastcheck.bisect(drift, lambda drifted: result, dtype=torch.float32)  # noqa: B023  # it is called before the loop goes on
    with pytest.raises(ZeroDivisionError):
        fastcheck.bisect(lambda override: 1 / 0, float, dtype=torch.float32)


@given(st.integers(1, 60), st.data())
def test_the_search_finds_exactly_what_is_needed(count: int, data: Any) -> None:
    names = [str(number) for number in range(count)]
    needed = data.draw(st.sets(st.sampled_from(names), min_size=1, max_size=5))
    asked: list[frozenset[str]] = []

    def is_good(some: Any) -> bool:
        asked.append(frozenset(some))
        return needed <= set(some)

    assert set(_minimal(names, is_good)) == needed
    if len(needed) == 1:
        assert len(asked) <= 2 * math.ceil(math.log2(count + 1))
