"""Tests of what is told of gradients that carry a loss scale, and of a scale that is left out."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
from torch import nn

import fastcheck
from support.told import loss, texts


def test_a_loss_that_is_not_the_scaled_one() -> None:
    scaler = torch.amp.GradScaler("cpu")

    def program(model: nn.Module, optimizer: Any, is_faulty: bool = True) -> None:
        optimizer.zero_grad()
        value = loss(model)
        scaled = scaler.scale(value)
        (value if is_faulty else scaled).backward()
        scaler.step(optimizer)
        scaler.update()

    found = texts(program)
    assert len(found) == 1 and "divided by a loss scale" in found[0]
    assert not texts(lambda model, optimizer: program(model, optimizer, False))


def scaled_loop(order: str, scale: float = 4.0) -> Callable[[nn.Module, Any], None]:
    """A step that calls these in turn: "b"ackward of a scaled loss, "p"lain backward, "u"nscale,
    "d"ivision by hand, "D" through .data, "c"lipping, "g"rad(), "s"tep of the scaler and its
    update, "U"pdate of the scaler, "o"wn step.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)

    def step(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        for call in order:
            if call in "bp":
                (scaler.scale(loss(model)) if call == "b" else loss(model)).backward()
            elif call == "u":
                scaler.unscale_(optimizer)
            elif call == "c":
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            elif call == "g":
                torch.autograd.grad(loss(model), list(model.parameters()))
            elif call in "dD":
                for parameter in model.parameters():
                    gradient = parameter.grad.data if call == "D" else parameter.grad
                    gradient.div_(scaler.get_scale())
            elif call == "U":
                scaler.update()
            elif call == "s":
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()

    return step


@pytest.mark.parametrize("level", ["module", "op"])
@pytest.mark.parametrize(
    ("order", "said"),
    [
        (
            "bo",
            "gradients of a loss that was multiplied by the loss scale, and",
        ),
        (
            "bpo",
            "gradients of a loss that was multiplied by the loss scale, and",
        ),
        (
            "bco",
            "gradients of a loss that was multiplied by the loss scale, and",
        ),
        (
            "bubs",
            "gradients to which backward() of a loss that was multiplied by the loss",
        ),
        *((order, "") for order in ("bs", "bbs", "bus", "bbus", "buoU", "buUo", "bdo", "po")),
        *((order, "") for order in ("bdco", "bDo", "bDco", "bucoU", "budgs")),
    ],
)
def test_a_scale_that_gradients_still_carry_at_the_update(
    order: str, said: str, level: str
) -> None:
    found = texts(scaled_loop(order), level=level)
    assert len(found) == bool(said)
    assert not said or found[0].startswith(f"step 1: SGD has stepped with {said}")


@pytest.mark.parametrize("order", ["bcs", "bucs", "bdcs", "bDcs"])
def test_gradients_that_are_clipped_with_the_scale(order: str) -> None:
    """Those that the program has divided itself carry it no more."""
    said = texts(scaled_loop(order, 65536.0), kinds=("settings",))
    assert ["while they were still multiplied" in text for text in said] == [True] * (
        order == "bcs"
    )


@pytest.mark.parametrize("is_after", [False, True])
def test_a_hook_may_divide_gradients_by_the_scale(is_after: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def divide(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            parameter.grad /= 1024.0

    def step(model: nn.Module, optimizer: Any) -> None:
        for parameter in model.parameters():
            if is_after and not parameter._post_accumulate_grad_hooks:
                parameter.register_post_accumulate_grad_hook(divide)
            elif not is_after and not parameter._backward_hooks:
                parameter.register_hook(lambda gradient: gradient / 1024.0)
        optimizer.zero_grad()
        scaler.scale(loss(model)).backward()
        optimizer.step()

    assert not texts(step)


def test_a_step_of_what_is_no_optimizer_is_torchs_error() -> None:
    """What comes after it is still observed."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def step(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        scaler.scale(loss(model)).backward()
        with pytest.raises(AttributeError):
            scaler.step(None)  # type: ignore[arg-type]  # the wrong call
        optimizer.step()

    (found,) = texts(step)
    assert "that nothing is known to have divided" in found


def test_a_scale_of_one_multiplies_nothing() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)

    def step(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        scaler.scale(loss(model)).backward()
        optimizer.step()

    assert not texts(step)


class Wrapper(torch.optim.Optimizer):
    """An optimizer that steps another, as Lookahead does."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.param_groups, self.state = base, base.param_groups, base.state

    def step(self, closure: Any = None) -> None:
        self.base.step()


def test_a_wrapper_of_an_optimizer_may_be_unscaled() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def step(model: nn.Module, optimizer: Any) -> None:
        wrapper = Wrapper(optimizer)
        optimizer.zero_grad()
        scaler.scale(loss(model)).backward()
        scaler.unscale_(wrapper)
        scaler.step(wrapper)
        scaler.update()

    assert not texts(step)


def test_a_scaled_backward_of_others_does_not_change_what_was_unscaled() -> None:
    """Nor does a change by hand before it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    other = nn.Linear(8, 4)
    second = torch.optim.SGD(other.parameters(), 0.01)

    def step(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        second.zero_grad()
        scaler.scale(loss(model)).backward()
        scaler.unscale_(optimizer)
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)
        scaler.scale(loss(other)).backward()
        scaler.step(optimizer)
        scaler.step(second)
        scaler.update()

    assert not texts(step)


def test_another_optimizer_may_use_a_loss_that_is_not_scaled() -> None:
    """Its step comes between the scaled backward() and the scaler's step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    other = nn.Linear(8, 4)
    plain = torch.optim.SGD(other.parameters(), 0.01)

    def step(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        plain.zero_grad()
        other(torch.randn(8, 8)).square().mean().backward()
        scaler.scale(loss(model)).backward()
        plain.step()
        scaler.step(optimizer)
        scaler.update()

    assert not texts(step, 30)


def test_a_stop_says_first_that_gradients_carry_the_scale() -> None:
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    warns = pytest.warns(fastcheck.WatchWarning, match="that nothing is known to have divided")
    stops = pytest.raises(fastcheck.OverflowDetected)
    with warns, fastcheck.install(model), stops as stop:
        for _ in range(30):
            optimizer.zero_grad()
            scaler.scale(loss(model)).backward()
            optimizer.step()
    assert "try 1. SGD has stepped with gradients of a loss that was multi" in " ".join(
        str(stop.value).split()
    )
