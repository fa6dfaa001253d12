"""A monitor's warnings point at the line of user code that they are about."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pytest
import torch

import fastcheck
from support.programs.op_level import model_with
from support.programs.stalled import Frozen
from support.programs.training import Net


def line(offset: int) -> tuple[str, int]:
    return __file__, sys._getframe(1).f_lineno + offset


def place(caught: list[warnings.WarningMessage], text: str) -> tuple[str, int]:
    found = [one for one in caught if text in str(one.message)]
    assert len(found) == 1 and found[0].category is fastcheck.FastcheckWarning
    return found[0].filename, found[0].lineno


def test_an_event_in_forward() -> None:
    model = model_with(lambda x: x / 0)
    with fastcheck.install(model, stop=fastcheck.Stop(action="warn")):
        with pytest.warns(fastcheck.FastcheckWarning) as caught:
            model(torch.ones(4, 8))
        assert place(list(caught), "at step 0") == line(-1)


def test_a_weight_that_does_not_move() -> None:
    model = Net()
    optimizer = Frozen(model.parameters(), out=[model.head.weight], lr=0.01)
    with fastcheck.install(model), pytest.warns(fastcheck.FastcheckWarning) as caught:
        for _ in range(12):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
    assert place(list(caught), "head.weight") == line(-1)


def test_a_step_after_remove() -> None:
    monitor = fastcheck.install(Net())
    monitor.remove()
    with pytest.warns(fastcheck.FastcheckWarning) as caught:
        monitor.step()
    assert place(list(caught), "after remove()") == line(-1)


def test_an_optimizer_that_cannot_protect() -> None:
    class OwnStep(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]  # torch's has overloads
            return super().step(closure)

    model = Net()
    optimizer = OwnStep(model.parameters())
    with fastcheck.install(model, stop=fastcheck.Stop(protect_weights=True)):
        model(torch.ones(4, 8)).sum().backward()
        with pytest.warns(fastcheck.FastcheckWarning) as caught:
            optimizer.step(lambda: 0.0)
    assert place(list(caught), "are not protected")[0] == __file__
