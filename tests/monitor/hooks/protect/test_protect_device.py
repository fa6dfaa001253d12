"""UpdateGuard on the fake accelerator: it never waits, and what is saved is finite."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastcheck
from fakes import fake_device
from fastcheck.backends.table import backend_for
from fastcheck.monitor.hooks import found_inf as protect
from fastcheck.monitor.hooks.found_inf import UpdateGuard
from support.programs.guarding import (
    FUSED,
    all_finite,
    fused,
    give_gradients,
    guarding,
    parameters,
    same_bits,
    state_of,
    why_unguarded,
)

fake: Any = fake_device.load()
NAME = fake.name()
NAN = float("nan")


def a_guard() -> UpdateGuard:
    return UpdateGuard(backend_for(torch.device(NAME)).found_nonfinite)


pytestmark = [pytest.mark.fake_hooks, pytest.mark.usefixtures("fake_accelerator")]


def gradients(params: Sequence[nn.Parameter], steps: int, bad: Sequence[int]) -> list[list[Tensor]]:
    """Of every step, made beforehand: giving them takes no copy."""
    made = []
    for step in range(steps):
        give_gradients(params, step, bad=NAN if step in bad else None)
        made.append([p.grad for p in params if p.grad is not None])
    return made


def take(params: Sequence[nn.Parameter], given: Sequence[Tensor]) -> None:
    for parameter, gradient in zip(params, given):
        parameter.grad = gradient


@pytest.mark.parametrize("name", FUSED)
def test_100_steps_with_bad_gradients_without_a_wait_and_every_checkpoint_is_finite(
    name: str,
) -> None:
    params = parameters(device=NAME)
    optimizer = fused(name, params)
    bad = [0, 1, *random.Random(1).sample(range(2, 100), 20)]
    given = gradients(params, 100, bad)
    waits = 0
    with guarding(a_guard()):
        for step, of_step in enumerate(given):
            take(params, of_step)
            fake.set_sync_debug_mode("error")
            before = fake.counters()
            optimizer.step()
            used = fake.counters() - before
            fake.set_sync_debug_mode("default")
            waits += used.synchronisations
            if step > 5:
                assert used["alloc_below_cache"] == 0
            checkpoint = state_of(optimizer)
            assert all_finite(checkpoint), step
    assert waits == 0
    steps = [s["step"].item() for s in optimizer.state.values() if "step" in s]
    assert set(steps) <= {float(100 - len(bad))}


@pytest.mark.parametrize("name", FUSED)
def test_a_step_is_enqueued_while_the_device_stands_still(name: str) -> None:
    params = parameters(device=NAME)
    optimizer = fused(name, params)
    given = gradients(params, 4, [0, 2])
    with guarding(a_guard()), fake.held():
        for of_step in given:
            take(params, of_step)
            optimizer.step()
    assert all_finite(state_of(optimizer))


@pytest.mark.parametrize("name", FUSED)
def test_a_healthy_run_keeps_the_bits_of_the_cpu(name: str) -> None:
    on_cpu, on_device = parameters(), parameters(device=NAME)
    plain, guarded = fused(name, on_cpu), fused(name, on_device)
    for step in range(20):
        give_gradients(on_cpu, step)
        plain.step()
    with guarding(a_guard()):
        for step in range(20):
            give_gradients(on_device, step)
            guarded.step()
    assert same_bits(state_of(plain), state_of(guarded))


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("name", FUSED)
def test_two_devices_take_one_decision(name: str, where: int) -> None:
    by_device = [parameters(device=f"{NAME}:{index}") for index in range(2)]
    params = [*by_device[0], *by_device[1]]
    optimizer = fused(name, params)
    give_gradients(params, 0)
    healthy = [p.grad for p in params if p.grad is not None]
    give_gradients(by_device[where], 1, bad=NAN)
    before = [p.detach().cpu() for p in params]
    with guarding(a_guard()):
        counted = fake.counters()
        optimizer.step()
        assert (fake.counters() - counted).synchronisations == 0
        assert same_bits(before, [p.detach().cpu() for p in params])
        take(params, healthy)
        optimizer.step()
    after = [p.detach().cpu() for p in params]
    assert not any(torch.equal(one, other) for one, other in zip(before, after))
    assert all_finite(state_of(optimizer))


@pytest.mark.parametrize("is_guarded", [False, True])
def test_grad_scaler_over_two_devices(is_guarded: bool) -> None:
    """It adds up 1 and 1, which the kernels take for a go-ahead."""
    params = [*parameters(device=f"{NAME}:0"), *parameters(device=f"{NAME}:1")]
    optimizer = fused("adamw", params)
    scaler = torch.amp.GradScaler(NAME, init_scale=4.0)
    with guarding(*([a_guard()] if is_guarded else [])):
        scaler.scale(torch.ones((), device=NAME))
        give_gradients(params, 0)
        for parameter in params:
            assert parameter.grad is not None
            parameter.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0
    assert all_finite(state_of(optimizer)) == is_guarded


@pytest.mark.parametrize("name", ["adam", "adamw", "adagrad", "sgd-momentum"])
def test_grad_scaler_backs_off_and_nothing_waits(name: str) -> None:
    params = parameters(device=NAME)
    optimizer = fused(name, params)
    scaler = torch.amp.GradScaler(NAME, init_scale=16.0, growth_interval=2)
    given = gradients(params, 6, [0, 3])
    scales = []
    with guarding(a_guard()):
        for of_step in given:
            scaler.scale(torch.ones((), device=NAME))
            take(params, of_step)
            before = fake.counters()
            scaler.step(optimizer)
            scaler.update()
            assert (fake.counters() - before).synchronisations == 0
            scales.append(scaler.get_scale())
            assert all_finite(state_of(optimizer))
    assert scales == [8.0, 8.0, 16.0, 8.0, 8.0, 16.0]


def test_the_cpu_and_an_accelerator_in_one_optimizer_are_unguarded() -> None:
    params = [*parameters(device=NAME), *parameters()]
    optimizer = fused("adamw", params)
    reason = why_unguarded(optimizer)
    assert reason is not None and "an optimizer of its own" in reason
    give_gradients(params, 0)
    guard = a_guard()
    assert guard.before_update(optimizer) is None
    assert guard.why_unguarded == reason


def test_an_unknown_device_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastcheck.monitor.hooks.found_inf._tried", {})
    optimizers = [fused(name, parameters(device=NAME)) for name in FUSED]
    assert {why_unguarded(optimizer) for optimizer in optimizers} == {None}
    before = fake.counters()
    assert {why_unguarded(optimizer) for optimizer in optimizers} == {None}
    assert (fake.counters() - before).synchronisations == 0


def test_what_was_learnt_beforehand_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastcheck.monitor.hooks.found_inf._tried", {})
    optimizers = [fused(name, parameters(device=NAME)) for name in FUSED]
    UpdateGuard.learn([torch.device("cpu"), torch.device(NAME, 1), torch.device(NAME, 0)])
    assert {device for _, device in protect._tried} == {NAME}  # of the CPU it is known
    before = fake.counters()
    assert {why_unguarded(optimizer) for optimizer in optimizers} == {None}
    assert (fake.counters() - before).synchronisations == 0


def test_a_kernel_that_ignores_found_inf_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastcheck.monitor.hooks.found_inf._tried", {})
    kernel = torch._fused_adamw_
    monkeypatch.setattr(
        torch, "_fused_adamw_", lambda *args, **kw: kernel(*args, **{**kw, "found_inf": None})
    )
    optimizer = fused("adamw", parameters(device=NAME))
    reason = why_unguarded(optimizer)
    assert reason is not None and f"{NAME} does not look at found_inf" in reason
    give_gradients(optimizer.param_groups[0]["params"], 0)
    guard = a_guard()
    assert guard.before_update(optimizer) is None and guard.why_unguarded == reason
    assert why_unguarded(fused("adam", parameters(device=NAME))) is None


def test_what_it_costs_in_launches() -> None:
    """On top of found_nonfinite: nothing but, on a first step of SGD, one per new buffer."""
    params = parameters(device=NAME)
    word = torch.zeros((), device=NAME)
    guard = UpdateGuard(lambda tensors: word)
    optimizer = fused("sgd-momentum", params)
    give_gradients(params, 0)
    with guarding(guard):
        with fake.recorded_launches() as first:
            optimizer.step()
        with fake.recorded_launches() as second:
            optimizer.step()
    assert sum("masked_fill" in name for name in first) == len(params)
    assert len(second) == 1 and "_fused_sgd_" in second[0]


def test_a_closure_is_guarded_at_its_end() -> None:
    """Two bad steps of six leave no bit behind, without a wait."""

    def run(bad: tuple[int, ...], is_observed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).to(NAME)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        x, factors = torch.ones(4, 8).to(NAME), [torch.ones(()).to(NAME) for _ in range(6)]
        for step in bad:
            factors[step].fill_(NAN)
        monitor = None
        if is_observed:
            stop = fastcheck.Stop(protect_weights=True, max_lag=None)
            monitor = fastcheck.install(model, overflow_nums=-1, record="health", stop=stop)

        def closure(step: int) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(x).square().mean()
            (loss * factors[step]).backward()
            return loss

        for step in range(6):
            before = fake.counters()
            if is_observed or step not in bad:
                optimizer.step(lambda: closure(step))  # noqa: B023  # called within this step
            used = fake.counters() - before
            assert step == 0 or used.synchronisations == 0
        if monitor is not None:
            monitor.remove()
            assert sorted({event.step for event in monitor.events}) == list(bad)
        return state_of(optimizer)

    assert same_bits(run((1, 3), True), run((1, 3), False))
