"""UpdateGuard: a non-finite gradient never reaches weights or optimizer state, and a healthy run
keeps its bits.
"""

from __future__ import annotations

import copy
import gc
import pickle
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastcheck
from fastcheck._protect import UpdateGuard
from guarding import (
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


# ---- The word and the attribute ------------------------------------------------------------------


def test_the_word_is_a_float32_on_the_device_and_goes_again() -> None:
    params = parameters()
    optimizer: Any = fused("adam", params)
    guard = a_guard()
    for bad, expected in ((None, 0.0), (NAN, 1.0)):
        give_gradients(params, 0, bad=bad)
        word = guard.before_update(optimizer)
        assert word is not None and optimizer.found_inf is word
        assert (word.shape, word.dtype, word.item()) == ((), torch.float32, expected)
        guard.after_update(optimizer)
        assert not attributes(optimizer)


@pytest.mark.parametrize("name", ["adam", "sgd-momentum", "adagrad"])
def test_one_list_call_for_all_gradients(name: str) -> None:
    calls = []

    def counted(tensors: Sequence[Tensor]) -> Tensor:
        calls.append(len(tensors))
        return fastcheck.found_nonfinite(tensors)

    params = parameters(5)
    optimizer = fused(name, params)
    give_gradients(params, 0)
    params[1].grad = None
    optimizer.add_param_group({"params": []})
    with guarding(UpdateGuard(counted)):
        optimizer.step()
    assert calls == [4]


def test_no_gradients_no_word() -> None:
    optimizer = fused("adam", parameters())
    guard = a_guard()
    assert guard.before_update(optimizer) is None
    assert guard.why_unguarded is None
    assert not attributes(optimizer)


@pytest.mark.parametrize("theirs", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_what_was_there_counts_and_comes_back(theirs: float, shape: tuple[int, ...]) -> None:
    params = parameters()
    optimizer: Any = fused("adam", params)
    guard = a_guard()
    optimizer.found_inf = there = torch.full(shape, theirs)
    give_gradients(params, 0)
    word = guard.before_update(optimizer)
    assert word is not None and word.item() == (theirs > 0)
    assert optimizer.found_inf is word
    guard.after_update(optimizer)
    assert optimizer.found_inf is there
    assert there.shape == shape and there.item() == theirs


@pytest.mark.parametrize("theirs", [0, 1, None])
def test_what_was_there_may_be_a_number(theirs: Any) -> None:
    """GradScaler sums up an empty list where nothing has a gradient."""
    params = parameters()
    optimizer: Any = fused("adam", params)
    guard = a_guard()
    optimizer.found_inf = theirs
    give_gradients(params, 0)
    word = guard.before_update(optimizer)
    assert word is not None and word.item() == (1.0 if theirs else 0.0)
    guard.after_update(optimizer)
    assert optimizer.found_inf is theirs


def test_someone_elses_attribute_is_left_alone() -> None:
    params = parameters()
    optimizer: Any = fused("adam", params)
    guard = a_guard()
    give_gradients(params, 0)
    guard.before_update(optimizer)
    optimizer.found_inf = other = torch.zeros(())
    guard.after_update(optimizer)
    assert optimizer.found_inf is other
    guard.before_update(optimizer)
    del optimizer.found_inf
    guard.after_update(optimizer)
    assert not attributes(optimizer)


def test_copies_and_pickles_made_within_a_step_do_not_carry_it() -> None:
    params = parameters()
    optimizer = fused("sgd-momentum", params)
    copies: list[Any] = []

    def copy_it(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        assert attributes(optimizer)
        copies.append(copy.deepcopy(optimizer))
        copies.append(pickle.loads(pickle.dumps(optimizer)))
        assert "found_inf" not in str(optimizer.state_dict())

    optimizer.register_step_pre_hook(copy_it)
    with guarding(a_guard()):
        give_gradients(params, 0, bad=NAN)
        optimizer.step()
    assert [attributes(other) for other in copies] == [set(), set()]


def test_nothing_is_recorded_for_a_backward_pass() -> None:
    def recording(tensors: Sequence[Tensor]) -> Tensor:
        return sum((t * 0.0).sum() for t in tensors).isnan() + 0.0 * tensors[0].sum().nan_to_num()

    params = parameters()
    optimizer = fused("sgd-momentum", params)
    give_gradients(params, 0)
    for parameter in params:
        parameter.grad.requires_grad_()  # as backward(create_graph=True) leaves them
    guard = UpdateGuard(recording)
    word = guard.before_update(optimizer)
    assert word is not None and not word.requires_grad
    guard.after_update(optimizer)


def test_a_step_in_inference_mode() -> None:
    params = parameters()
    optimizer = fused("adam", params)
    before = state_of(optimizer)
    with guarding(a_guard()), torch.inference_mode():
        give_gradients(params, 0, bad=NAN)
        optimizer.step()
    assert same_bits(before, [p.detach() for p in params])


# ---- Steps that raise ----------------------------------------------------------------------------


def raising_step(optimizer: torch.optim.Optimizer) -> None:
    def fail(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        raise KeyError("in the step")

    handle = optimizer.register_step_pre_hook(fail)
    with pytest.raises(KeyError):
        optimizer.step()
    handle.remove()


@pytest.mark.parametrize("count", [1, 2])
def test_the_step_after_one_that_raised_is_judged_by_its_own_gradients(count: int) -> None:
    params = parameters()
    optimizer: Any = fused("adam", params)
    before = state_of(optimizer)
    with guarding(*(a_guard() for _ in range(count))):
        give_gradients(params, 0, bad=NAN)
        raising_step(optimizer)
        give_gradients(params, 1)
        optimizer.step()
        assert not attributes(optimizer)
        assert not same_bits(before, state_of(optimizer)[::4])
        assert optimizer.state[params[0]]["step"].item() == 1


@pytest.mark.parametrize("how", ["close", "forget"])
def test_nothing_is_left_behind_when_the_guard_goes(how: str) -> None:
    params = parameters()
    optimizer = fused("adam", params)
    guard = a_guard()
    give_gradients(params, 0, bad=NAN)
    guard.before_update(optimizer)
    assert attributes(optimizer)
    if how == "close":
        guard.close()
        guard.close()
    del guard
    gc.collect()
    assert not attributes(optimizer)


def test_sparse_gradients_are_read_and_torch_says_what_it_does_not_do() -> None:
    embedding = nn.Embedding(4, 3, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1, fused=True)
    embedding(torch.tensor([1, 1])).sum().backward()
    guard = a_guard()
    word = guard.before_update(optimizer)
    assert word is not None and word.item() == 0
    guard.after_update(optimizer)
    embedding.weight.grad._values()[0, 0] = NAN
    with guarding(guard):
        with pytest.raises(RuntimeError, match="sparse"):
            optimizer.step()
        assert attributes(optimizer)
        embedding.weight.grad = torch.ones(4, 3)
        before = embedding.weight.detach().clone()
        optimizer.step()
    assert not torch.equal(embedding.weight, before)
    assert not attributes(optimizer)


def test_an_error_in_reading_leaves_the_optimizer_as_it_was() -> None:
    def fails(tensors: Sequence[Tensor]) -> Tensor:
        raise ZeroDivisionError

    params = parameters()
    optimizer = fused("adam", params)
    give_gradients(params, 0)
    for guard in (UpdateGuard(fails), a_guard(combine=lambda word, optimizer: 1 / 0)):
        with pytest.raises(ZeroDivisionError):
            guard.before_update(optimizer)
        guard.after_update(optimizer)
        assert not attributes(optimizer)
    # A guard that works takes part undisturbed.
    with guarding(a_guard()):
        optimizer.step()
    assert not attributes(optimizer)


def test_gradients_that_nothing_can_read_leave_the_step_unguarded() -> None:
    def unreadable(tensors: Sequence[Tensor]) -> Tensor:
        raise fastcheck.UnsupportedTensorError("of another world")

    params = parameters()
    optimizer = fused("adam", params)
    give_gradients(params, 0)
    guard = UpdateGuard(unreadable)
    assert guard.before_update(optimizer) is None
    assert "of another world" in (guard.why_unguarded or "")


# ---- Several guards ------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [1, -1])
def test_guards_share_a_step_in_whatever_order_their_hooks_run(order: int) -> None:
    params = parameters()
    optimizer = fused("sgd-momentum", params)
    one, two = a_guard(), a_guard()
    for bad in (None, NAN, None):
        give_gradients(params, 0, bad=bad)
        words = [guard.before_update(optimizer) for guard in (one, two)]
        assert words[0] is words[1]
        for guard in (one, two)[::order]:
            assert attributes(optimizer)
            guard.after_update(optimizer)
        assert not attributes(optimizer)


def test_each_guard_of_a_shared_step_combines() -> None:
    params = parameters()
    optimizer = fused("adam", params)
    called: list[str] = []
    guards = [a_guard(combine=lambda w, o, name=name: called.append(name)) for name in "ab"]
    give_gradients(params, 0)
    with guarding(*guards):
        optimizer.step()
    assert called == ["a", "b"]


@pytest.mark.parametrize("there", [None, torch.ones(())])
def test_theirs_is_what_the_attribute_would_be_without_guards(there: Any) -> None:
    """The second of two monitors must not take the first one's word for a GradScaler's."""
    params = parameters()
    optimizer: Any = fused("adam", params)
    if there is not None:
        optimizer.found_inf = there
    give_gradients(params, 0)
    guard = a_guard()
    assert UpdateGuard.theirs(optimizer) is there
    guard.before_update(optimizer)
    assert UpdateGuard.theirs(optimizer) is there
    optimizer.found_inf = other = torch.zeros(())
    assert UpdateGuard.theirs(optimizer) is other
    guard.after_update(optimizer)
    assert UpdateGuard.theirs(optimizer) is other


def test_a_guard_that_goes_within_a_step_leaves_the_other_its_word() -> None:
    params = parameters()
    optimizer = fused("adam", params)
    before = state_of(optimizer)
    one, two = a_guard(), a_guard()
    give_gradients(params, 0, bad=NAN)
    optimizer.register_step_pre_hook(lambda *args: one.close())
    with guarding(one, two):
        optimizer.step()
    assert same_bits(before, [p.detach() for p in params])
    assert not attributes(optimizer)
