"""Steps of optimizers are told of once, from the outside."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch

from fastcheck.utils.torch.optimizer_steps import around_steps


class Inner(torch.optim.SGD):
    """Steps another optimizer, and raises, where these are given."""

    other: Any = None
    fails = False

    def step(self, closure: Any = None) -> Any:
        made = super().step(closure)
        if self.other is not None:
            self.other.step()
        if self.fails:
            raise ZeroDivisionError
        return made


def make(kind: Any = Inner) -> Any:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    return kind([weight], lr=0.1)


def test_a_step_is_told_of_once_and_again_after_an_error() -> None:
    make(torch.optim.SGD)  # from now on torch calls hooks in its step
    told: list[str] = []
    optimizer, other = make(), make()
    names = {id(optimizer): "one", id(other): "other"}
    with ExitStack() as at_end:
        around_steps(
            at_end,
            lambda optimizer, *_: told.append(f"before {names[id(optimizer)]}"),
            lambda optimizer, *_: told.append(f"after {names[id(optimizer)]}"),
        )
        optimizer.step()
        assert told == ["before one", "after one"]
        told.clear()
        for fails in (optimizer, other):
            fails.fails = True
            with pytest.raises(ZeroDivisionError):
                fails.step()
            fails.fails = False
        optimizer.other = other
        assert told == ["before one", "before other"]
        told.clear()
        optimizer.step()
    assert told == ["before one", "before other", "after other", "after one"]
    optimizer.step()
    assert len(told) == 4
