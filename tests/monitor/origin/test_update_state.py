"""The state of an optimizer of one's own, whose update has broken a weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastcheck


class Adam(torch.optim.Optimizer):
    """As in a paper, with two places for a mistake."""

    def __init__(self, parameters: Any, first: int, is_rsqrt: bool, keeps: bool = True) -> None:
        super().__init__(parameters, {"lr": 1e-3})
        self.count, self.is_rsqrt, self.keeps = first, is_rsqrt, keeps

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p] if self.keeps else {}
            if not state:
                state.update(m=torch.zeros_like(p), v=torch.zeros_like(p))
            state["m"].lerp_(p.grad, 0.1)
            state["v"].lerp_(p.grad.square(), 0.001)
            m, v = (state[k] / (1 - torch.tensor(b) ** self.count) for k, b in self.betas)
            if self.is_rsqrt:
                p.sub_(1e-3 * m * (v.rsqrt() + 1e-8))
            else:
                p.sub_(1e-3 * m / (v.sqrt() + 1e-8))
        self.count += 1

    betas = (("m", 0.9), ("v", 0.999))


def stop_of(kind: Any = Adam, **options: Any) -> fastcheck.OverflowDetected:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 3))
    optimizer = kind(model.parameters(), **options)
    ids = torch.arange(16) % 9
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(ids), ids % 3).backward()
            optimizer.step()
    return stop.value


def made_by(**options: Any) -> tuple[fastcheck.OverflowDetected, Any]:
    stop = stop_of(**options)
    assert stop.report.made_by is not None
    return stop, stop.report.made_by


def test_a_moment_of_0_where_the_weight_broke() -> None:
    stop, made = made_by(first=1, is_rsqrt=True)
    assert made.how == (
        "m, v in the state that Adam has of 0.weight are 0 in those 24 of 96 elements that are not "
        "finite in the weight, and in no others."
    )
    assert [(name, int(record["zero_count"])) for name, record in made.inputs] == [
        ("state m", 24),
        ("state v", 24),
    ]
    assert "state m, state v of the optimizer are 0 in the elements that broke" in _tried(stop)
    assert "bias correction" not in _tried(stop)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad])
def test_an_eps_of_0(kind: Any) -> None:
    stop = stop_of(kind, eps=0.0)
    made = stop.report.made_by
    assert made is not None and made.how.endswith("in no others. Its eps is 0.")
    assert "give an optimizer that has one an eps above 0" in _tried(stop)


def test_an_average_of_squares_below_0() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters())
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            optimizer.state[model.weight]["exp_avg_sq"].fill_(-1)
    text = _tried(stop.value)
    assert "state exp_avg_sq of the optimizer goes down to -" in text
    assert "no average of squares is below 0: its root is NaN" in text
    assert "bias correction" not in text


def test_a_weight_that_the_update_before_has_blown_up() -> None:
    """The squares of the next gradient leave the range, and the weight is named with its update."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        momentum = torch.full_like(p, 1e7)
        state = {"step": torch.tensor(1e4), "exp_avg": momentum, "exp_avg_sq": momentum * 0}
        optimizer.state[p] = state
    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as stop:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
    assert stop.value.culprit.site.role == "optimizer_state" and stop.value.step == 1
    text = _tried(stop.value)
    assert "since step 0 took the largest number of 0.weight from 0." in text


def test_a_number_by_which_whole_weights_are_divided() -> None:
    stop, made = made_by(first=0, is_rsqrt=False)
    text = "the state that Adam has of 0.weight is finite, and no element of the weight is."
    assert made.how == text
    assert "1 - beta ** t is 0 at t = 0" in _tried(stop)


def test_without_a_state_the_lines_of_the_step_are_named() -> None:
    stop, made = made_by(first=1, is_rsqrt=True, keeps=False)
    assert made.how == "Adam is an optimizer of the program's own."
    sources = [place.partition(": ")[2] for place in made.written]
    assert len(sources) == 3 and sources[1] == "p.sub_(1e-3 * m * (v.rsqrt() + 1e-8))"
    assert "state" not in _tried(stop)


def _tried(stop: fastcheck.OverflowDetected) -> str:
    return " ".join(str(stop).partition("\ntry ")[2].split())


class Powers(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            squares = p.grad**2
            p.sub_(1e-3 * (squares - 1) ** -0.25)


def test_a_root_that_is_written_as_a_power() -> None:
    (line,) = stop_of(Powers).report.made_by.written
    assert line.endswith(": p.sub_(1e-3 * (squares - 1) ** -0.25)")
