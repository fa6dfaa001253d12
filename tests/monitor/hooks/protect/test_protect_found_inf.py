"""The found_inf attribute that UpdateGuard sets for a step: its value, and that the earlier value
returns after the step, also when a step raises and when several guards share a step.
"""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastcheck
from fastcheck.monitor.hooks.found_inf import UpdateGuard, gradients_by_device
from support.programs.guarding import (
    a_guard,
    attributes,
    fused,
    give_gradients,
    guarding,
    parameters,
    same_bits,
    state_of,
)

NAN = float("nan")


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
def test_scaler_found_inf_is_what_the_attribute_would_be_without_guards(there: Any) -> None:
    """The second of two monitors must not take the first one's word for a GradScaler's."""
    params = parameters()
    optimizer: Any = fused("adam", params)
    if there is not None:
        optimizer.found_inf = there
    give_gradients(params, 0)
    guard = a_guard()
    assert UpdateGuard.scaler_found_inf(optimizer) is there
    guard.before_update(optimizer)
    assert UpdateGuard.scaler_found_inf(optimizer) is there
    optimizer.found_inf = other = torch.zeros(())
    assert UpdateGuard.scaler_found_inf(optimizer) is other
    guard.after_update(optimizer)
    assert UpdateGuard.scaler_found_inf(optimizer) is other


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


@pytest.mark.parametrize("kind", ["ordinary", "sparse", "of two devices"])
def test_gradients_by_device_are_those_of_each_parameter(kind: str) -> None:
    parameters = [nn.Parameter(torch.ones(2, 2)) for _ in range(4)]
    for parameter in parameters[:3]:  # the last has none
        parameter.grad = torch.rand(2, 2)
    if kind == "sparse":
        parameters[1].grad = torch.eye(2).to_sparse()
    elif kind == "of two devices":
        parameters[1] = nn.Parameter(torch.ones(2, 2, device="meta"))
        parameters[1].grad = torch.ones(2, 2, device="meta")
    optimizer = torch.optim.SGD([{"params": parameters[:2]}, {"params": parameters[2:]}])
    expected: dict[torch.device, list[Tensor]] = {}
    for gradient in (parameter.grad for parameter in parameters[:3]):
        assert gradient is not None
        values = gradient._values() if gradient.is_sparse else gradient
        expected.setdefault(values.device, []).append(values)
    found = gradients_by_device(optimizer)
    assert list(found) == list(expected)
    for device, gradients in expected.items():
        assert len(found[device]) == len(gradients)
        for gradient, values in zip(found[device], gradients):
            assert gradient is values or (kind == "sparse" and torch.equal(gradient, values))
