"""What the report of two runs says of the first difference: a factor, and what one side lacks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.comparison.row import factor_of, factor_text
from fastcheck.record.statistics import statistics_of
from support.programs.compare_runs import log_run


def text_of(actual: str, reference: str) -> str:
    return " ".join(str(fastcheck.compare(actual, reference)).split())


def run(
    directory: Path,
    model: Callable[[], nn.Module],
    loss: Callable[[torch.Tensor], torch.Tensor] = lambda y: y.square().mean(),
    steps: int = 3,
) -> str:
    """The directory of the log of a few steps; ``loss`` of what the model returns."""
    torch.manual_seed(0)
    net, data = model(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with fastcheck.install(net, log=fastcheck.Log(directory)):
        for _ in range(steps):
            optimizer.zero_grad()
            loss(net(torch.randn(6, 8, generator=data))).backward()
            optimizer.step()
    return str(directory)


class Residual(nn.Module):
    """A residual of a layer and its dropout. ``is_cut``: without the layer's gradient."""

    def __init__(self, rate: float = 0.0, is_cut: bool = False) -> None:
        super().__init__()
        self.first, self.drop = nn.Linear(8, 8), nn.Dropout(rate)
        self.layer = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.last = nn.Linear(8, 4)
        self.is_cut = is_cut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        made = self.drop(self.layer(x))
        made: torch.Tensor = self.last(x + (made.detach() if self.is_cut else made))
        return made


def side_of(x: torch.Tensor) -> dict[str, Any]:
    statistics = statistics_of(np.asarray(fastcheck.stats(x).record))
    named = ("min", "max", "mean", "l2_norm", "nan_count", "posinf_count", "neginf_count")
    side = {name: getattr(statistics, name) for name in named}
    return {**side, "numel": x.numel(), "dtype": str(x.dtype).removeprefix("torch.")}


@pytest.mark.parametrize(
    ("factor", "text"),
    [
        (2, "2"),
        (0.125, "1/8"),
        (math.sqrt(32), "5.657"),
        (-1, "-1"),
        (-3, "-3"),
    ],
)
def test_a_factor_of_all_elements_is_found(factor: float, text: str) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    found = factor_of(side_of(x * factor), side_of(x))
    assert found == pytest.approx(factor, rel=1e-5)
    assert factor_text(found) == text


@pytest.mark.parametrize(
    "changed",
    [
        lambda x: x,
        lambda x: x + 1,
        lambda x: x * 1.00001,
        lambda x: torch.cat([x[:1] * 2, x[1:]]),
        lambda x: x * torch.tensor([1.0, 2.0]).repeat(500),
        lambda x: x[:500] * 2,
        lambda x: x * 0,
        lambda x: torch.cat([x[:1] * math.inf, x[1:] * 2]),
        lambda x: -2 * x.abs(),
    ],
)
def test_other_changes_are_no_factor(changed: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert factor_of(side_of(changed(x)), side_of(x)) == factor_of(None, side_of(x)) == 1


def test_one_element_has_a_whole_factor_alone() -> None:
    x = torch.tensor([4.1886])
    assert factor_of(side_of(x * 4), side_of(x)) == 4
    assert factor_of(side_of(x / -4), side_of(x)) == -0.25
    assert factor_of(side_of(-x), side_of(x)) == -1
    assert factor_of(side_of(x * 1.3), side_of(x)) == 1
    assert factor_of(side_of(x * 1.000001), side_of(x)) == 1
    assert factor_of(side_of((x * 4).bfloat16()), side_of(x.bfloat16())) == 1


def test_a_sum_in_place_of_a_mean(tmp_path: Path) -> None:
    mean = run(tmp_path / "mean", Residual)
    total = run(tmp_path / "sum", Residual, lambda y: y.square().sum())
    text = text_of(total, mean)
    assert "its statistics are 24 times those of reference" in text
    assert "a whole factor, 24: for example a mean on one side and a sum on the other" in text
    assert "a whole factor, 1/24: " in text_of(mean, total)
    assert "factor" not in text_of(
        run(tmp_path / "other", Residual, lambda y: y.exp().mean()), mean
    )


def test_dropout_of_one_side_is_named(tmp_path: Path) -> None:
    plain, dropped = (
        run(tmp_path / "plain", Residual),
        run(tmp_path / "drop", lambda: Residual(0.5)),
    )
    alone = "alone: drop · forward · output[0]. On the other side its module is not called, or"
    assert f"Before it, in actual {alone}" in text_of(dropped, plain)
    first = fastcheck.compare(dropped, plain).to_dict()["first"]
    assert first["alone"] == {"actual": ["drop · forward · output[0]"], "reference": []}
    assert f"Before it, in reference {alone}" in text_of(plain, dropped)


def test_gradients_that_one_side_lacks_are_named(tmp_path: Path) -> None:
    plain = run(tmp_path / "plain", Residual)
    text = text_of(run(tmp_path / "cut", lambda: Residual(is_cut=True)), plain)
    assert "Before it, in reference alone: layer.0 · backward · gradient of output[0]" in text
    assert "no gradient comes there (detach(), no_grad(), frozen weights), or it is not" in text


def test_steps_are_those_of_the_runs_where_a_module_has_another_name(tmp_path: Path) -> None:
    def with_layer(name: str) -> Callable[[], nn.Module]:
        def make() -> nn.Module:
            net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
            net.add_module(name, nn.Identity())
            net.add_module("softmax" if name == "old" else "normal", nn.Softmax(-1))
            return net

        return make

    def change(step: int, model: nn.Module) -> None:
        if step == 2:
            next(model.parameters()).data.mul_(1.5)

    reference = log_run(tmp_path / "reference", model=with_layer("old"))
    actual = log_run(tmp_path / "actual", model=with_layer("new"), before_forward=change)
    comparison = fastcheck.compare(actual, reference)
    assert [step.step for step in comparison.growth] == [0, 1, 2, 3]
    assert comparison.first is not None and comparison.first.row.step == 1
