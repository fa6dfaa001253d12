"""UpdateGuard together with a GradScaler, which sets found_inf too; updates that neither skips."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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


# ---- GradScaler ----------------------------------------------------------------------------------


def scaled_run(name: str, guard: UpdateGuard | None, *, unscale: bool = False) -> list[Any]:
    """Scale, growth tracker and all state after each of some steps with overflows among them."""
    params = parameters()
    optimizer = fused(name, params)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    trace: list[Any] = []
    with guarding(*([guard] if guard else [])):
        for step in range(12):
            scale = scaler.scale(torch.ones(())).item()
            # Not step 0: torch alone would leave SGD's momentum uninitialised.
            give_gradients(params, step, bad=INF if step in (4, 5, 9) else None, factor=scale)
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            assert not attributes(optimizer)
            scaler.update()
            trace.append((scaler.get_scale(), scaler._get_growth_tracker(), state_of(optimizer)))
    return trace


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("name", FUSED)
def test_grad_scaler_works_as_without_the_guard(name: str, unscale: bool) -> None:
    alone = scaled_run(name, None, unscale=unscale)
    guarded = scaled_run(name, a_guard(), unscale=unscale)
    assert [entry[:2] for entry in alone] == [entry[:2] for entry in guarded]
    assert min(entry[0] for entry in guarded) < 1024  # it did back off
    assert all(same_bits(one[2], other[2]) for one, other in zip(alone, guarded))


def test_a_gradient_that_only_the_guard_sees_is_skipped_and_the_scale_stays() -> None:
    """Made after unscale_(), by clipping, say: GradScaler has looked before."""
    params = parameters()
    optimizer = fused("sgd-momentum", params)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with guarding(a_guard()):
        scaler.scale(torch.ones(()))
        give_gradients(params, 0)
        before = [p.detach().clone() for p in params]
        scaler.unscale_(optimizer)
        params[0].grad[0, 0] = NAN
        scaler.step(optimizer)
        scaler.update()
    assert same_bits(before, [p.detach() for p in params])
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (8.0, 1)


def test_a_scaler_that_counts_two_devices_still_skips() -> None:
    """GradScaler adds up found_inf per device, and no kernel compares with 2."""
    for guard in (None, a_guard()):
        params = parameters()
        optimizer: Any = fused("adam", params)
        before = [p.detach().clone() for p in params]
        optimizer.found_inf = torch.full((), 2.0)
        with guarding(*([guard] if guard else [])):
            give_gradients(params, 0)
            optimizer.step()
        assert same_bits(before, [p.detach() for p in params]) == (guard is not None)


def test_a_step_that_raises_within_the_scaler() -> None:
    params = parameters()
    optimizer: Any = fused("adam", params)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with guarding(a_guard()):
        scaler.scale(torch.ones(()))
        give_gradients(params, 0, bad=INF)
        handle = optimizer.register_step_pre_hook(lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            scaler.step(optimizer)
        handle.remove()
        scaler.update()
        assert scaler.get_scale() == 1.0
        del optimizer.grad_scale  # torch's own leftover, which it would multiply with the next
        give_gradients(params, 1)
        before = [p.detach().clone() for p in params]
        scaler.step(optimizer)
        scaler.update()
    assert not attributes(optimizer)
    assert not same_bits(before, [p.detach() for p in params])


# ---- What the guard does not prevent -------------------------------------------------------------


def test_finite_gradients_whose_square_overflows_pass() -> None:
    """Adam's second moment, as the guide states."""
    params = parameters()
    optimizer = fused("adam", params)
    with guarding(a_guard()):
        give_gradients(params, 0, bad=2e19)
        optimizer.step()
        assert all_finite(state_of(optimizer))
        give_gradients(params, 0, bad=1e24)
        optimizer.step()
    assert not all_finite(state_of(optimizer))
    assert all_finite([p.detach() for p in params])


def test_finite_scaled_gradients_that_overflow_when_unscaled_pass() -> None:
    """Of torch, with a loss scale below 1: the kernel divides by it after all checks."""
    params = parameters()
    optimizer: Any = fused("sgd", params)
    optimizer.grad_scale = torch.tensor(0.5)
    with guarding(a_guard()):
        give_gradients(params, 0, bad=3e38)
        optimizer.step()
    assert not all_finite([p.detach() for p in params])
