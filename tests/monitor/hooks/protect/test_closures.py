"""Updates whose gradients are made by a closure, within the optimizer's step."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
from torch import nn

import fastcheck
from support.programs.guarding import same_bits, state_of
from support.programs.training import Net, batches, stopped

pytestmark = pytest.mark.usefixtures("fresh_start")

NAN, BAD = float("nan"), 2
KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=1),
}
PROTECT: dict[str, Any] = {"overflow_nums": -1, "stop": fastcheck.Stop(protect_weights=True)}


class OwnStep(torch.optim.SGD):
    """Evaluates twice, and fails without gradients, as optimizers that look ahead do."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]  # torch's has overloads
        closure()
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        torch.stack([one.norm() for one in gradients if one is not None])
        return super().step(closure)


def closure_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, bad: Callable[[], bool]
) -> Callable[[], torch.Tensor]:
    x = next(batches(1))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        (loss * NAN if bad() else loss).backward()
        return loss

    return closure


def run(kind: str, bad: tuple[int, ...], options: Any) -> tuple[list[torch.Tensor], Any]:
    """Parameters and state after six steps; without options bad steps are left out."""
    torch.manual_seed(0)
    model = Net()
    optimizer = KINDS[kind](model.parameters())
    monitor = None if options is None else fastcheck.install(model, **options)
    for step in range(6):
        if options is not None or step not in bad:
            optimizer.step(closure_of(model, optimizer, lambda: step in bad))  # noqa: B023  # called within this step
            assert all(p.grad is not None for p in model.parameters())
    if monitor is not None:
        monitor.remove()
    # LBFGS counts evaluations too.
    found = [*model.parameters()] if kind == "LBFGS" else state_of(optimizer)
    return [tensor.detach() for tensor in found], monitor


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_update_leaves_no_bit_behind(kind: str) -> None:
    bad = (0, BAD, 3)
    found, monitor = run(kind, bad, PROTECT)
    assert same_bits(found, run(kind, bad, None)[0])
    assert sorted({event.step for event in monitor.events}) == list(bad)
    assert "not protected" not in monitor.summary()


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_the_same_to_the_bit(kind: str) -> None:
    assert same_bits(run(kind, (), PROTECT)[0], run(kind, (), None)[0])


@pytest.mark.parametrize("kind", ["AdamW", "AdamW fused"])
def test_a_closure_that_makes_no_gradients_has_those_that_are_there_judged(kind: str) -> None:
    """As Lightning's manual optimization does; here with two optimizers."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    optimizers = [KINDS[kind](part.parameters()) for part in model]
    before = [p.detach().clone() for p in model.parameters()]
    with fastcheck.install(model, **PROTECT) as monitor:
        (model(torch.ones(2, 8)).square().mean() * NAN).backward()
        for optimizer in optimizers:
            optimizer.step(lambda: None)
    assert same_bits(before, [p.detach() for p in model.parameters()])
    assert monitor.step_index == 0 and monitor.event_count > 0


def test_what_the_closure_returns_and_takes_is_passed_on() -> None:
    class Passes(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        def step(self, closure: Any = None) -> Any:
            return closure(3, ddp_sync=False), closure.name

    def closure(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    closure.name = "closure"  # type: ignore[attr-defined]  # an attribute of one's own
    model = Net()
    optimizer = Passes(model.parameters())
    fastcheck.install(model)
    for found in (optimizer.step(closure), optimizer.step(closure=closure)):
        assert found == (((3,), {"ddp_sync": False}), "closure")


def test_an_error_in_the_closure_is_the_loops_own() -> None:
    model = Net()
    optimizer = KINDS["SGD"](model.parameters())
    fastcheck.install(model, **PROTECT)

    def fails() -> None:
        raise ZeroDivisionError

    optimizer.step(closure_of(model, optimizer, lambda: True))
    with pytest.raises(ZeroDivisionError):
        optimizer.step(fails)
    optimizer.step(closure_of(model, optimizer, lambda: False))
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_lbfgs_keeps_what_finite_evaluations_have_done() -> None:
    """The third evaluation is bad: what two finite ones have made of the weights stays."""
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=6)
    calls, seen = [0], []

    def bad() -> bool:
        calls[0] += 1
        seen.append([p.detach().clone() for p in model.parameters()])
        return calls[0] == 3

    fastcheck.install(model, **PROTECT)
    optimizer.step(closure_of(model, optimizer, bad))
    assert calls[0] == 3, "a bad evaluation ends the step"
    assert same_bits(seen[-1], [p.detach() for p in model.parameters()])
    assert not same_bits(seen[0], seen[-1])


def test_a_stop_states_that_earlier_evaluations_were_applied() -> None:
    for at, is_intact in ((1, True), (3, False)):
        model = Net()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=6)
        calls = [0]

        def bad(at: int = at, calls: list[int] = calls) -> bool:
            calls[0] += 1
            return calls[0] == at

        with fastcheck.install(model):
            stop = stopped(optimizer.step, closure_of(model, optimizer, bad))
        assert stop.report.weights_intact is is_intact
        assert ("evaluated several times" in " ".join(str(stop).split())) is not is_intact


def test_a_step_of_ones_own_with_a_closure_keeps_its_gradients() -> None:
    model = Net()
    optimizer = OwnStep(model.parameters(), lr=0.1)
    with (
        pytest.warns(UserWarning, match="OwnStep are not protected.*step.. of its own"),
        fastcheck.install(model, **PROTECT) as monitor,
    ):
        optimizer.step(closure_of(model, optimizer, lambda: True))
    assert monitor.event_count and "not protected" in monitor.summary()


def test_gradients_are_read_once_for_each_evaluation() -> None:
    model = Net()
    optimizer = KINDS["SGD"](model.parameters())
    with fastcheck.install(model) as monitor:
        optimizer.step(closure_of(model, optimizer, lambda: False))
    sites = [monitor.sites[row["site"]] for row in monitor.records()]
    gradients = [site.key for site in sites if site.role == "param_grad"]
    assert sorted(gradients) == sorted(name for name, _ in model.named_parameters())


def test_a_closure_is_watched_once() -> None:
    """A subclass passes it on to the step of its base."""

    class Inner(torch.optim.SGD):
        pass

    class Outer(Inner):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]  # torch's has overloads
            return super().step(closure)

    model = Net()
    Inner(model.parameters(), lr=0.1)  # from now on its step runs torch's hooks
    optimizer = Outer(model.parameters(), lr=0.1)
    with fastcheck.install(model) as monitor:
        optimizer.step(closure_of(model, optimizer, lambda: False))
    sites = [monitor.sites[row["site"]] for row in monitor.records()]
    gradients = [site.key for site in sites if site.role == "param_grad"]
    assert len(gradients) == len(set(gradients))
