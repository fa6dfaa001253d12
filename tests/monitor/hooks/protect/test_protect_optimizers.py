"""Which optimizers and steps UpdateGuard protects, the reasons that it gives for others, and
sharded gradients.
"""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.programs.guarding import (
    FUSED,
    a_guard,
    attributes,
    fused,
    give_gradients,
    guarding,
    parameters,
    same_bits,
    state_of,
    why_unguarded,
)

NAN, INF = float("nan"), float("inf")


# ---- Which optimizers ----------------------------------------------------------------------------


class Same(torch.optim.AdamW):
    pass


class OwnStep(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Declared(OwnStep):
    _step_supports_amp_scaling = True

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Foreign(torch.optim.Optimizer):
    def __init__(self, params: Any, declares: bool = False) -> None:
        super().__init__(params, {})
        self._step_supports_amp_scaling = declares

    def step(self, closure: Any = None) -> None:
        found: Any = getattr(self, "found_inf", torch.zeros(()))
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.copy_(torch.where(found == 1, parameter, parameter - parameter.grad))


class TakesScaler(Foreign):
    def step(self, closure: Any = None, grad_scaler: Any = None) -> None:
        pass


@pytest.mark.parametrize("name", FUSED)
def test_fused_optimizers_are_supported(name: str) -> None:
    assert why_unguarded(fused(name, parameters())) is None


def test_subclasses_and_foreign_optimizers_that_honour_it_are_supported() -> None:
    # Now the inherited step() has hooks of its own: Declared's step is announced twice.
    torch.optim.Adam(parameters())
    torch.optim.AdamW(parameters())
    for optimizer in (
        Same(parameters(), fused=True),
        Declared(parameters(), fused=True),
        Foreign(parameters(), declares=True),
    ):
        params = optimizer.param_groups[0]["params"]
        assert why_unguarded(optimizer) is None
        before = [p.detach().clone() for p in params]
        with guarding(a_guard()):
            give_gradients(params, 0, bad=NAN)
            optimizer.step()
            assert same_bits(before, [p.detach() for p in params])
            give_gradients(params, 1)
            optimizer.step()
            assert not same_bits(before, [p.detach() for p in params])
        assert not attributes(optimizer)


def test_learning_rate_schedulers_and_loaded_states_change_nothing() -> None:
    params = parameters()
    optimizer = fused("adam", params)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps optimizer.step
    assert why_unguarded(optimizer) is None
    assert why_unguarded(pickle.loads(pickle.dumps(optimizer))) is None
    optimizer.load_state_dict(torch.optim.Adam(parameters()).state_dict())  # and its fused=None
    assert "fused=True" in (why_unguarded(optimizer) or "")


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda p: torch.optim.Adam(p), ["Adam", "fused=True", 'sync="step"']),
        (lambda p: torch.optim.SGD(p, foreach=True), ["foreach", "fused=True", 'sync="step"']),
        (lambda p: torch.optim.Adagrad(p, fused=False), ["Adagrad", "fused=True"]),
        (lambda p: torch.optim.RMSprop(p), ["RMSprop", "no fused", 'sync="step"']),
        (lambda p: torch.optim.NAdam(p), ["NAdam", "no fused", 'sync="step"']),
        (lambda p: torch.optim.Adafactor(p), ["Adafactor", "no fused"]),
        (lambda p: torch.optim.LBFGS(p), ["LBFGS", "no fused", 'sync="step"']),
        (lambda p: OwnStep(p, fused=True), ["OwnStep", "step() of its own"]),
        (lambda p: Foreign(p), ["Foreign", "_step_supports_amp_scaling = True"]),
        (lambda p: TakesScaler(p, declares=True), ["grad_scaler", 'sync="step"']),
    ],
)
def test_others_are_unguarded_with_the_reason(make: Any, words: list[str]) -> None:
    params = parameters()
    optimizer = make(params)
    reason = why_unguarded(optimizer)
    assert reason is not None and all(word in reason for word in words), reason
    give_gradients(params, 0, bad=NAN)
    guard = a_guard()
    assert guard.before_update(optimizer) is None
    assert guard.why_unguarded == reason
    guard.after_update(optimizer)
    assert not attributes(optimizer)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_groups_are_all_fused_or_none_is_guarded(kind: Any) -> None:
    params = parameters()
    groups = [{"params": params[:1], "fused": True}, {"params": params[1:]}]
    optimizer = kind(groups, lr=0.1)
    assert "group 1" in (why_unguarded(optimizer) or "")
    with guarding(a_guard()):
        give_gradients(params, 0)
        optimizer.step()  # torch raises where the other group is handed a found_inf
    optimizer = kind([{"params": params, "fused": True}], lr=0.1)
    before = [p.detach().clone() for p in params]
    with guarding(a_guard()):
        give_gradients(params, 1, bad=NAN)
        optimizer.step()
    assert same_bits(before, [p.detach() for p in params])


def test_a_group_that_is_fused_and_foreach_runs_foreach() -> None:
    params = parameters()
    optimizer = torch.optim.SGD([{"params": params, "fused": True, "foreach": True}], lr=0.1)
    assert "its foreach implementation" in (why_unguarded(optimizer) or "")
    with guarding(a_guard()):
        give_gradients(params, 0)
        optimizer.step()  # torch raises where foreach is handed a found_inf


def test_a_step_that_is_being_compiled_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    params = parameters()
    optimizer = fused("adam", params)
    give_gradients(params, 0, bad=NAN)
    guard = a_guard()
    monkeypatch.setattr("fastcheck.monitor.hooks.found_inf.is_compiling", lambda: True)
    assert guard.before_update(optimizer) is None
    assert "compiled" in (guard.why_unguarded or "")


def test_a_compiled_step_runs_as_ever() -> None:
    """Dynamo traces through the hooks, or runs them between its graphs: either is harmless."""
    params = parameters()
    optimizer = fused("sgd-momentum", params)
    stepped = torch.compile(optimizer.step, backend="eager")
    twins = parameters()
    twin = fused("sgd-momentum", twins)
    with guarding(a_guard()):
        for step in range(3):
            give_gradients(params, step)
            give_gradients(twins, step)
            stepped()
            twin.step()
    assert same_bits(state_of(optimizer), state_of(twin))
    assert not attributes(optimizer)


# ---- Sharded gradients and ranks -----------------------------------------------------------------


def test_combine_decides_for_this_rank_too() -> None:
    """Another rank's NaN, which this one does not see."""
    params = parameters()
    optimizer = fused("adam", params)
    seen: list[float] = []

    def combine(word: Tensor, of: torch.optim.Optimizer) -> None:
        assert of is optimizer
        seen.append(word.item())
        word.fill_(1.0)

    before = [p.detach().clone() for p in params]
    with guarding(a_guard(combine=combine)):
        for bad in (None, NAN):
            give_gradients(params, 0, bad=bad)
            optimizer.step()
    assert seen == [0.0, 1.0]
    assert same_bits(before, [p.detach() for p in params])


def test_combine_sees_what_the_scaler_found() -> None:
    params = parameters()
    optimizer: Any = fused("adam", params)
    optimizer.found_inf = torch.ones(())
    seen: list[float] = []
    give_gradients(params, 0)
    guard = a_guard(combine=lambda word, optimizer: seen.append(word.item()))
    guard.before_update(optimizer)
    assert seen == [1.0]


def test_a_rank_without_gradients_takes_part() -> None:
    optimizer = fused("adam", parameters())
    seen: list[float] = []
    guard = a_guard(combine=lambda word, optimizer: seen.append(word.item()))
    with guarding(guard):
        optimizer.step()
    assert seen == [0.0]
    assert not attributes(optimizer)


def test_sharded_gradients_are_read_by_their_local_part() -> None:
    distributed = pytest.importorskip("torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))

        def sharded(tensor: Tensor) -> DTensor:
            return DTensor.from_local(tensor, mesh, [Shard(0)])

        parameter = nn.Parameter(sharded(torch.ones(4, 3)))
        optimizer = torch.optim.AdamW([parameter], fused=True)
        combined: list[float] = []
        with guarding(a_guard(combine=lambda word, optimizer: combined.append(word.item()))):
            for bad in (1.0, NAN):
                local = torch.ones(4, 3)
                local[0, 0] = bad
                parameter.grad = sharded(local)
                before = parameter.to_local().detach().clone()
                optimizer.step()
                assert torch.equal(before, parameter.to_local()) == (bad != 1.0)
        assert combined == [0.0, 1.0]
        assert optimizer.state[parameter]["step"].item() == 1
    finally:
        distributed.destroy_process_group()
