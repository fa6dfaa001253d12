"""Tests of facts of public reports: programs of the accuracy suite, and what may be healthy."""

from __future__ import annotations

import re
import warnings
from typing import Any, Callable

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


@pytest.mark.parametrize("kind", ["times", "made", "relu", "loop"])
def test_a_layer_that_a_list_holds_several_times(kind: str) -> None:
    """``relu``: it has no weights; ``loop``: it is called several times, and held once."""
    torch.manual_seed(0)
    layer: nn.Module = nn.ReLU() if kind == "relu" else nn.Linear(4, 4)
    layers = [layer] * (1 if kind == "loop" else 3)
    if kind == "made":
        layers = [nn.Linear(4, 4) for _ in range(3)]
    model = nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"layers": nn.ModuleList(layers)}))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(number: int) -> None:
        optimizer.zero_grad()
        x = model[0](torch.randn(8, 4))
        for of in layers * (3 if kind == "loop" else 1):
            x = of(x).tanh()
        x.square().mean().backward()
        optimizer.step()

    text = said(model, step, 12)
    assert ("holds one" in text) is (kind == "times")
    assert kind != "times" or "1.layers (ModuleList) holds one Linear 3 times" in text


@pytest.mark.parametrize("kind", ["scheduler", "both", "neither", "late", "samples"])
def test_a_scheduler_that_continues_without_its_optimizer(kind: str) -> None:
    """``late``: fastcheck was installed in the middle; ``samples``: it is given their number."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)

    def make() -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.StepLR]:
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 20)

    def train(optimizer: torch.optim.Optimizer, scheduler: Any, number: int = 0) -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scheduler.step(64 * (number + 1)) if kind == "samples" else scheduler.step()

    optimizer, scheduler = before = make()
    for _ in range(30):
        train(*before)
    state, rates = optimizer.state_dict(), scheduler.state_dict()
    if kind != "late":
        optimizer, scheduler = make()
    if kind in ("scheduler", "both"):
        scheduler.load_state_dict(rates)
    if kind == "both":
        optimizer.load_state_dict(state)
    text = said(model, lambda number: train(optimizer, scheduler, number), 12)
    told = "StepLR of AdamW continues at step 31, and that optimizer began at update 0"
    assert (told in text) is (kind == "scheduler")
    assert "continues at" not in text or kind == "scheduler"


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("is_last", [False, True])
def test_the_last_output_of_two_directions(kind: type[nn.Module], is_last: bool) -> None:
    torch.manual_seed(0)
    layer = kind(4, 3, batch_first=True, bidirectional=True)
    optimizer = torch.optim.SGD(layer.parameters(), 0.01)

    def step(number: int) -> None:
        optimizer.zero_grad()
        made = layer(torch.randn(8, 5, 4))[0]
        (made[:, -1] if is_last else made.mean(1)).square().mean().backward()
        optimizer.step()

    text = said(layer, step, 12)
    assert ("of weight_hh_l0_reverse, in 10 updates" in text) is is_last
    assert ("its backward direction has taken one step there" in text) is is_last


@pytest.mark.parametrize("is_undone", [False, True])
def test_a_discriminator_that_stays_frozen(is_undone: bool) -> None:
    """It is frozen for the generator's loss in each step; for its own nothing is detached."""
    torch.manual_seed(0)
    made, judge = nn.Linear(4, 8), nn.Linear(8, 1)
    optimizers = [torch.optim.SGD(part.parameters(), 0.01) for part in (judge, made)]

    def step(number: int) -> None:
        for optimizer, sign in zip(optimizers, (1, -1)):
            if is_undone or sign < 0:
                judge.requires_grad_(sign > 0)
            optimizer.zero_grad()
            (sign * judge(made(torch.randn(8, 4))).square().mean()).backward()
            optimizer.step()

    text = said(nn.ModuleList([made, judge]), step, 45)
    assert ("none of its parameters requires a gradient (SGD, 2 parameters)" in text) is (
        not is_undone
    )
