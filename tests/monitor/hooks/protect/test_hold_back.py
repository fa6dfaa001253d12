"""Updates in host memory that are held back for optimizers that can't skip them by themselves."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.backends.table import backend_for
from fastcheck.monitor.hooks.protection import HostGuard
from support.programs.guarding import give_gradients, parameters, same_bits, state_of

NAN = float("nan")
KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True, amsgrad=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}


def a_guard() -> HostGuard:
    return HostGuard(backend_for(torch.device("cpu")).found_nonfinite)


def run(kind: str, guard: Any, bad: tuple[int, ...], steps: int = 6) -> list[torch.Tensor]:
    """Parameters and state at the end; without a guard bad steps are left out."""
    params = parameters()
    optimizer = KINDS[kind](params)
    for step in range(steps):
        give_gradients(params, step, bad=NAN if step in bad else None)
        given = [p.grad for p in params]
        if guard is None:
            if step not in bad:
                optimizer.step()
            continue
        word = guard.before_update(optimizer)
        assert float(word) == float(step in bad)
        optimizer.step()
        guard.after_update(optimizer)
        assert all(p.grad is grad for p, grad in zip(params, given))
    return state_of(optimizer)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [(), (0,), (2, 3)])
def test_a_bad_update_leaves_no_bit_behind(kind: str, bad: tuple[int, ...]) -> None:
    assert same_bits(run(kind, a_guard(), bad), run(kind, None, bad))


def test_a_step_that_raises_has_its_gradients_back() -> None:
    params = parameters()
    optimizer = KINDS["SGD"](params)
    give_gradients(params, 0, bad=NAN)
    given = [p.grad for p in params]
    guard = a_guard()
    guard.before_update(optimizer)
    assert [p.grad for p in params] == [None] * len(params)
    guard.close()
    assert all(p.grad is grad for p, grad in zip(params, given))


def test_two_guards_hold_one_update_back_once() -> None:
    params = parameters()
    optimizer = KINDS["SGD"](params)
    give_gradients(params, 0, bad=NAN)
    given = [p.grad for p in params]
    first, second = a_guard(), a_guard()
    for guard in (first, second):
        guard.before_update(optimizer)
    for guard in (first, second):
        guard.after_update(optimizer)
    assert all(p.grad is grad for p, grad in zip(params, given))


@pytest.mark.parametrize("bad", [False, True])
def test_install_holds_back_what_it_only_records(fresh_start: None, bad: bool) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.1)
    stop = fastcheck.Stop(protect_weights=True)
    monitor = fastcheck.install(model, overflow_nums=-1, stop=stop)
    before = [p.detach().clone() for p in model.parameters()]
    loss = model(torch.ones(3, 4)).sum()
    (loss * NAN if bad else loss).backward()
    optimizer.step()
    same = [bool((a == b).all()) for a, b in zip(before, model.parameters())]
    assert all(same) == bad and monitor.event_count == int(bad)
    assert "not protected" not in monitor.summary()
