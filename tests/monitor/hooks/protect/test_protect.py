"""UpdateGuard: a non-finite gradient never reaches weights or optimizer state, and a healthy run
keeps its bits.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fastcheck.monitor.hooks.found_inf import UpdateGuard
from support.programs.guarding import (
    FUSED,
    a_guard,
    all_finite,
    attributes,
    fused,
    give_gradients,
    guarding,
    parameters,
    same_bits,
    state_of,
)

NAN, INF = float("nan"), float("inf")
MOMENTUM = sorted(name for name in FUSED if "momentum" in FUSED[name][1])


@pytest.fixture
def _dirty_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What empty_like gives is not zero by luck."""
    empty_like = torch.empty_like

    def dirty(*args: Any, **kwargs: Any) -> Tensor:
        return empty_like(*args, **kwargs).fill_(NAN)

    monkeypatch.setattr(torch, "empty_like", dirty)


def run(
    name: str, steps: int, *, guard: UpdateGuard | None, bad: Sequence[int] = ()
) -> list[list[Tensor]]:
    """The state after each step."""
    params = parameters()
    optimizer = fused(name, params)
    states = []
    with guarding(*([guard] if guard else [])):
        for step in range(steps):
            give_gradients(params, step, bad=NAN if step in bad else None)
            optimizer.step()
            assert not attributes(optimizer)
            states.append(state_of(optimizer))
    return states


# ---- Healthy and bad steps -----------------------------------------------------------------------


@pytest.mark.parametrize("name", FUSED)
def test_a_healthy_run_keeps_its_bits(name: str) -> None:
    plain = run(name, 20, guard=None)
    guarded = run(name, 20, guard=a_guard())
    assert all(same_bits(one, other) for one, other in zip(plain, guarded))


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("name", FUSED)
def test_a_bad_step_changes_nothing_at_all(name: str, value: float) -> None:
    params = parameters()
    optimizer = fused(name, params)
    with guarding(a_guard()):
        give_gradients(params, 0)
        optimizer.step()
        before = state_of(optimizer)
        give_gradients(params, 1, bad=value)
        optimizer.step()
        # Step counts included: they go forward and back.
        assert same_bits(before, state_of(optimizer))
        give_gradients(params, 2)
        optimizer.step()
        assert not same_bits(before, state_of(optimizer))


@pytest.mark.parametrize("name", FUSED)
def test_without_the_guard_it_is_gone(name: str) -> None:
    assert not all_finite(run(name, 3, guard=None, bad=[1])[-1])


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.usefixtures("_dirty_memory")
def test_bad_steps_at_random_never_leave_anything_nonfinite(name: str) -> None:
    bad = random.Random(0).sample(range(100), 20)
    for states in (
        run(name, 100, guard=a_guard(), bad=bad),
        run(name, 4, guard=a_guard(), bad=[0, 1]),
    ):
        assert all(all_finite(state) for state in states)


@pytest.mark.parametrize("name", FUSED)
def test_a_skipped_step_is_as_if_it_had_not_been(name: str) -> None:
    params = parameters()
    optimizer = fused(name, params)
    for step in (0, 2, 3):
        give_gradients(params, step)
        optimizer.step()
    assert same_bits(run(name, 4, guard=a_guard(), bad=[1])[-1], state_of(optimizer))


# ---- Fused SGD's momentum buffers ----------------------------------------------------------------


@pytest.mark.parametrize("name", MOMENTUM)
@pytest.mark.usefixtures("_dirty_memory")
def test_torch_alone_leaves_a_skipped_first_momentum_uninitialised(name: str) -> None:
    """The reason for all of this; when it fails, torch has changed."""
    params = parameters()
    optimizer: Any = fused(name, params)
    give_gradients(params, 0)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert optimizer.state[params[0]]["momentum_buffer"].isnan().all()


@pytest.mark.parametrize("name", MOMENTUM)
@pytest.mark.usefixtures("_dirty_memory")
def test_momentum_starts_from_zero_after_skipped_first_steps(name: str) -> None:
    guarded = run(name, 20, guard=a_guard(), bad=[0, 1])
    for state in guarded[:2]:
        assert all(not buffer.any() for buffer in state[1::2])
    params = parameters()
    optimizer = fused(name, params)
    for parameter in params:
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    for step in range(2, 20):
        give_gradients(params, step)
        optimizer.step()
        assert same_bits(guarded[step], state_of(optimizer))


def test_what_a_skipped_first_step_changes_is_the_dampening_of_the_first_gradient() -> None:
    for dampening in (0.0, 0.25):
        params = parameters()
        optimizer = fused("sgd-momentum", params, dampening=dampening)
        with guarding(a_guard()):
            for step, bad in ((0, NAN), (1, None)):
                give_gradients(params, step, bad=bad)
                optimizer.step()
        for parameter in params:
            expected = parameter.grad * (1 - dampening)
            assert torch.equal(optimizer.state[parameter]["momentum_buffer"], expected)


@pytest.mark.usefixtures("_dirty_memory")
def test_a_group_that_starts_later_starts_from_zero_too() -> None:
    params = parameters(4)
    optimizer = fused("sgd-momentum", [{"params": params[:2]}, {"params": params[2:]}])
    with guarding(a_guard()):
        give_gradients(params[:2], 0)
        optimizer.step()
        kept = optimizer.state[params[0]]["momentum_buffer"].clone()
        give_gradients(params, 1, bad=NAN)
        optimizer.step()
    assert torch.equal(optimizer.state[params[0]]["momentum_buffer"], kept)
    assert not optimizer.state[params[3]]["momentum_buffer"].any()


@pytest.mark.usefixtures("_dirty_memory")
def test_a_first_step_that_grad_scaler_skips_starts_from_zero_too() -> None:
    params = parameters()
    optimizer = fused("sgd-momentum", params)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with guarding(a_guard()):
        scaler.scale(torch.ones(()))
        give_gradients(params, 0, bad=INF)
        scaler.step(optimizer)
    assert not optimizer.state[params[0]]["momentum_buffer"].any()
