"""Tests of facts of public reports: programs of the accuracy suite, and what may be healthy."""

from __future__ import annotations

import re
import warnings
from typing import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastcheck
from accuracy.invariants import texts_of
from accuracy.invariants_programs import Fault
from accuracy.invariants_reports import REPORTS


@pytest.mark.parametrize("fault", REPORTS, ids=lambda fault: fault.name)
def test_a_fault_is_told_and_its_fixed_version_is_not(fault: Fault) -> None:
    warned, told = texts_of(fault.program(True))
    assert len([text for text in (*warned, *told) if re.search(fault.text, text)]) == 1
    assert texts_of(fault.program(False)) == ([], [])


def said(model: nn.Module, step: Callable[[int], None], steps: int = 40) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with fastcheck.install(model, overflow_nums=-1) as monitor:
            for number in range(steps):
                step(number)
    own = [str(w.message) for w in caught if issubclass(w.category, fastcheck.FastcheckWarning)]
    return " ".join([*own, *map(str, monitor.watch.events)])


@pytest.mark.parametrize(
    ("weigh", "is_told"),
    [
        (lambda loss, count: loss, True),
        (lambda loss, count: 0.5 * loss, True),
        (lambda loss, count: torch.tensor(0.5) * loss / 2, True),
        (lambda loss, count: loss * count / 40, False),
        (lambda loss, count: torch.tensor(count) / 40 * loss, False),
        (lambda loss, count: loss / (40 / count), False),
        (lambda loss, count: loss + 0.1, False),
    ],
)
def test_means_of_calls_are_told_if_they_are_weighted_alike(
    weigh: Callable[[torch.Tensor, int], torch.Tensor], is_told: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(number: int) -> None:
        optimizer.zero_grad()
        for count in (4, 16):
            x = torch.randn(count, 4)
            weigh(F.cross_entropy(model(x), x[:, :3].argmax(1)), count).backward()
        optimizer.step()

    assert ("averages over 4 to 16 targets" in said(model, step)) is is_told


@pytest.mark.parametrize(
    "counts", [(4,), (4, 3), (4, 6, 5), (2, 9), (1, 2), (4, 6, 4, 4, 6), (4, 4, *[6] * 60)]
)
def test_other_numbers_of_calls_are_no_window_that_is_left_over(counts: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(number: int) -> None:
        optimizer.zero_grad()
        for _ in range(counts[number % len(counts)]):
            model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()

    assert "before one in" not in said(model, step)


def test_a_frozen_weight_that_an_optimizer_is_given_gradients_for_may_move() -> None:
    """As in evolution strategies: the program makes them itself."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        model[0].weight.grad = torch.randn_like(model[0].weight)
        optimizer.step()

    assert "requires_grad=False" not in said(model, step)


class Noisy(nn.Module):
    """Multiplies by another number when it is computed again; its dropout draws the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop = nn.Linear(4, 8), nn.Dropout(0.5)
        self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factors = [1 + 1e-5, 1.0]

        def run(given: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.second(self.drop(self.first(given) * factors.pop()))
            return made

        made: torch.Tensor = self.last(checkpoint(run, x, use_reentrant=False))
        return made


def test_dropout_is_not_accused_of_what_was_computed_before_it() -> None:
    torch.manual_seed(0)
    model = Noisy()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()

    text = said(model, step, 8)
    assert "drop (Dropout) returns something else" in text
    assert "drops other elements" not in text


def test_weights_that_are_loaded_before_the_first_update_may_be_their_own() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(number: int) -> None:
        if not number:
            model.load_state_dict(model.state_dict())
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()

    assert "load_state_dict" not in said(model, step)


def test_a_loss_that_falls_below_a_million_times_the_first_is_told_before_it_overflows() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters(), 0.05)

    def step(number: int) -> None:
        optimizer.zero_grad()
        (-model(torch.full((8, 4), 3.0)).exp().mean()).backward()
        optimizer.step()

    text = said(model, step, 48)
    assert "goes on falling: a term of it has no lower bound" in text


@pytest.mark.parametrize(("scale", "is_said"), [(0.0, True), (0.02, False)])
def test_a_weight_of_zero_before_relu_is_named_with_what_it_made(
    scale: float, is_said: bool
) -> None:
    """The derivative of ReLU at 0 is 0, so that such a weight keeps its gradient of 0."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        model[0].weight.mul_(scale)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(number: int) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(8, 4)), torch.arange(8) % 3).backward()
        optimizer.step()

    text = said(model, step)
    assert ("output of 0 (Linear) was 0 throughout, as its weight is;" in text) is is_said
