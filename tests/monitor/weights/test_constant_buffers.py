"""Warnings about buffers that had been constant and changed, and buffers without a warning."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from support.programs.stalled import Masked, said

pytestmark = pytest.mark.usefixtures("fresh_start")


@pytest.mark.parametrize("has_mean", [True, False])
def test_a_constant_buffer_that_moves(has_mean: bool) -> None:
    (text,) = said(Masked(first=14, has_mean=has_mean))
    assert "a buffer that had been constant has changed: mask, after" in text


def test_a_buffer_that_moves_now_and_then() -> None:
    class Sometimes(nn.Linear):
        count = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            if self.count % 6 == 0:
                self.mask += 1.0
            return super().forward(x)

    model = Sometimes(8, 4)
    model.register_buffer("mask", torch.zeros(4))
    assert said(model, steps=50) == []


@pytest.mark.parametrize("has_mean", [True, False])
def test_what_is_known_of_buffers_when_there_is_one_more(has_mean: bool) -> None:
    model = Masked(first=14, has_mean=has_mean)

    def add(step: int) -> None:
        if step == 7:
            model.linear.register_buffer("late", torch.zeros(2))

    (text,) = said(model, before_update=add)
    assert "changed: mask, after" in text


@pytest.mark.parametrize("has_mean", [True, False])
def test_a_buffer_of_a_module_that_rests(has_mean: bool) -> None:
    """What is not called has no occasion to change."""
    model = Masked(first=1000, has_mean=has_mean)
    model.add_module("rests", Masked(first=0, has_mean=has_mean).requires_grad_(False))
    x = torch.ones(2, 8)

    def wake(step: int) -> None:
        if step == 15:
            model.get_submodule("rests")(x)

    assert said(model, before_update=wake) == []


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_buffer_that_the_program_sets(is_replaced: bool) -> None:
    """As a mask for pruning is, or the switches of fake quantization."""
    model = Masked(first=1000)

    def change(step: int) -> None:
        if step != 14:
            return
        mask = model.get_buffer("mask")
        model.mask = mask + 1.0 if is_replaced else mask.add_(1.0)

    assert said(model, before_update=change) == []


def test_a_buffer_that_the_model_replaces() -> None:
    class Resampled(Masked):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.count == 14:
                self.mask = torch.full((4,), 2.0)
            return super().forward(x)  # type: ignore[no-any-return]  # a module's result is Any

    assert said(Resampled(first=1000)) == []


def test_buffers_that_move_from_the_start() -> None:
    assert said(Masked(first=0)) == []


def test_a_buffer_that_is_written_to_with_what_it_holds() -> None:
    """As a running maximum is, of an observer for quantization."""

    class Observed(nn.Linear):
        count = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            self.most.copy_(torch.maximum(self.most, torch.tensor(self.count // 14 + 1.0)))
            return super().forward(x)

    model = Observed(8, 4)
    model.register_buffer("most", torch.zeros(()))
    assert said(model, steps=50) == []


class Statistics(nn.Linear):
    """Of its own making, which only training changes."""

    def __init__(self) -> None:
        super().__init__(8, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.training:
            self.mean.lerp_(y.detach().mean(0), 0.1)
        return y


@pytest.mark.parametrize("late", ["norm", "linear"])
def test_statistics_that_begin_late(late: str) -> None:
    model = Masked(first=1000, has_mean=False)
    model.linear = Statistics()
    model.get_submodule(late).eval()

    def begin(step: int) -> None:
        model.get_submodule(late).train(step > 13)

    assert said(model, before_update=begin) == []
