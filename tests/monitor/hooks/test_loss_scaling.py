"""Steps and verdicts under loss scaling: torch's GradScaler, subclasses of it, and a scale that the
training loop applies itself.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.types import Flag, Verdict
from support.processes import run_code
from support.programs.training import (
    Apply,
    Net,
    batches,
    nan_gradient,
    steps_of,
    stopped,
    train,
    where,
)

INF = float("inf")

pytestmark = pytest.mark.usefixtures("fresh_start")


class Halves(nn.Module):
    """A float16 network whose gradients overflow at a high loss scale."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return self.b(torch.relu(self.a(x)))


def scaled_loop(
    model: nn.Module, scaler: Any, steps: int, optimizer: Any = None, factor: float = 1.0
) -> int:
    """A mixed-precision loop; how many steps the scaler skipped."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    skipped = 0
    for x in batches(steps):
        optimizer.zero_grad()
        loss = model(x).float().square().mean() * factor
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        skipped += scaler.get_scale() < before
    return skipped


class OwnScaler(torch.amp.GradScaler):
    """Methods of its own in the place of torch's, as torch_npu's has, and one that asks torch's."""

    def scale(self, outputs: Any) -> Any:
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(outputs.device)
        return outputs * self._scale

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self.unscale_(optimizer)
        found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        return None if any(map(bool, found.values())) else optimizer.step(*args, **kwargs)

    def update(self, new_scale: Any = None) -> None:
        super().update(new_scale)


class TestGradScaler:
    def test_methods_of_its_own(self) -> None:
        torch.manual_seed(0)
        before = dict(vars(OwnScaler))
        model = Halves()
        monitor = fastcheck.install(model)
        scaler = OwnScaler("cpu", init_scale=2.0**20, growth_interval=4)
        assert scaled_loop(model, scaler, 60) > 5
        assert monitor.event_count == 0
        assert {e.verdict for e in monitor.events} == {Verdict.SCALED}
        assert monitor.step_index == 59
        monitor.remove()
        assert dict(vars(OwnScaler)) == before

    def test_200_healthy_steps_with_skips_never_stop(self) -> None:
        torch.manual_seed(0)
        model = Halves()
        monitor = fastcheck.install(model)
        # Grows every 4 steps, so it runs into the end of float16 again and again.
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=4)
        skipped = scaled_loop(model, scaler, 200)
        assert skipped > 20
        assert monitor.event_count == 0
        assert {e.verdict for e in monitor.events} == {Verdict.SCALED}
        assert monitor.step_index == 199

    def test_a_skipped_step_is_a_step(self) -> None:
        model = Halves()
        monitor = fastcheck.install(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
        assert scaled_loop(model, scaler, 3) == 3
        assert steps_of(monitor) == [0, 1, 2]
        assert {bool(e.record["flags"] & Flag.SCALED) for e in monitor.events} == {True}

    def test_too_many_skips_in_a_row_are_one_event(self) -> None:
        model = Halves()
        monitor = fastcheck.install(model, stop=fastcheck.Stop(max_skipped=5), overflow_nums=-1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, backoff_factor=0.99)
        scaled_loop(model, scaler, 9)
        counted = [e for e in monitor.events if e.counted]
        assert [e.step for e in counted] == [4]
        assert "5 steps in a row were skipped by loss scaling" in counted[0].reason
        assert "and a gradient is still Inf" in counted[0].reason

    def test_skips_end_the_run_by_default_after_20(self) -> None:
        model = Halves()
        fastcheck.install(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, backoff_factor=0.99)
        assert stopped(scaled_loop, model, scaler, 30).step == 19

    def test_a_forward_overflow_under_a_scaler_stops_at_once(self) -> None:
        model = Halves()
        fastcheck.install(model)
        with torch.no_grad():
            model.a.bias.fill_(1e30)
        scaler = torch.amp.GradScaler("cpu")
        stop = stopped(scaled_loop, model, scaler, 3)
        assert where(stop.culprit) == ("a", "output", "output", "origin")

    def test_the_scale_is_in_the_report(self) -> None:
        model = Halves()
        fastcheck.install(model, stop=fastcheck.Stop(max_skipped=1))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
        assert stopped(scaled_loop, model, scaler, 3).report.scale == 2.0**40

    @pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
    def test_fused_optimizers_that_skip_by_themselves(self, kind: Any) -> None:
        model = Halves()
        monitor = fastcheck.install(model)
        optimizer = kind(model.parameters(), lr=0.01, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
        assert scaled_loop(model, scaler, 4, optimizer) > 0
        assert monitor.event_count == 0
        assert steps_of(monitor) == [0, 1, 2, 3]

    def test_a_parameter_gradient_alone_is_scaled_too(self) -> None:
        model = nn.Linear(8, 8)
        monitor = fastcheck.install(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(torch.ones(2, 8)).sum()).backward()
        model.weight.grad[0, 0] = INF
        scaler.step(optimizer)
        scaler.update()
        assert [where(e) for e in monitor.events] == [("", "param_grad", "weight", "scaled")]

    def test_accumulation_under_a_scaler_is_one_step(self) -> None:
        model = Halves()
        monitor = fastcheck.install(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for number, x in enumerate(batches(6)):
            scaler.scale(model(x).float().mean()).backward()
            if number % 2:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
        assert steps_of(monitor) == [0, 1, 2]
        assert monitor.event_count == 0

    def test_only_update_ends_a_step(self) -> None:
        generator, critic = Net(), nn.Linear(4, 1)
        monitor = fastcheck.install(generator, critic)
        for_critic = torch.optim.SGD(critic.parameters(), lr=0.01)
        for_generator = torch.optim.SGD(generator.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        for x in batches(3):
            scaler.scale(critic(generator(x).detach()).mean()).backward()
            scaler.step(for_critic)
            scaler.scale(critic(generator(x)).mean()).backward()
            scaler.step(for_generator)
            scaler.update()
        assert steps_of(monitor) == [0, 1, 2]

    def test_a_scaled_gradient_that_the_optimizer_uses_counts(self) -> None:
        model = Apply(nan_gradient)
        model.inner = nn.Linear(8, 8)
        model.function = lambda x: nan_gradient(model.inner(x))
        fastcheck.install(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(torch.ones(2, 8)).sum()).backward()
        before = copy.deepcopy(model.inner.state_dict())
        stop = stopped(optimizer.step)  # not through the scaler: not skipped
        assert stop.culprit.site.direction == "backward"
        assert all(torch.equal(before[k], v) for k, v in model.inner.state_dict().items())

    def test_a_disabled_scaler_is_no_scaler(self) -> None:
        model = Net()
        monitor = fastcheck.install(model)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for x in batches(3):
            scaler.scale(model(x).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert steps_of(monitor) == [0, 1, 2]
        assert not (monitor.records()["flags"] & Flag.SCALED).any()

    def test_another_scaler_than_the_given_one_is_not_followed(self) -> None:
        model = Halves()
        monitor = fastcheck.install(
            model, training=fastcheck.Training(scaler=torch.amp.GradScaler("cpu"))
        )
        scaled_loop(model, torch.amp.GradScaler("cpu", init_scale=8.0), 2)
        assert not (monitor.records()["flags"] & Flag.SCALED).any()

    def test_the_class_is_put_back(self) -> None:
        done = run_code(
            "import fastcheck, torch\n"
            "scaler = torch.amp.GradScaler\n"
            "names = ('scale', 'step', 'update')\n"
            "before = [vars(scaler)[name] for name in names]\n"
            "models = [torch.nn.Linear(1, 1) for _ in range(2)]\n"
            "one, two = map(fastcheck.install, models)\n"
            "one.remove()\n"
            "assert vars(scaler)['step'] is not before[1]\n"
            "two.remove()\n"
            "assert [vars(scaler)[name] for name in names] == before\n"
        )
        assert done.returncode == 0, done.stderr


class TestOtherLossScaling:
    @pytest.fixture(params=[1024.0, lambda: 1024.0], ids=["number", "callable"])
    def scaler(self, request: pytest.FixtureRequest) -> Iterator[Any]:
        return request.param

    def test_a_skipped_update_counts_nothing(self, scaler: Any) -> None:
        model = nn.Sequential(nn.Linear(8, 8), Apply(), nn.Linear(8, 1))
        monitor = fastcheck.install(model, training=fastcheck.Training(scaler=scaler))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for number, x in enumerate(batches(4)):
            optimizer.zero_grad()
            model[1].function = nan_gradient if number == 1 else (lambda x: x)
            (model(x).sum() * 1024.0).backward()
            finite = all(p.grad.isfinite().all() for p in model.parameters())
            if finite:
                optimizer.step()
            monitor.step()
        assert monitor.event_count == 0
        assert Verdict.SCALED in {e.verdict for e in monitor.events}

    def test_an_update_that_is_not_skipped_counts(self, scaler: Any) -> None:
        model = nn.Sequential(nn.Linear(8, 8), Apply(nan_gradient), nn.Linear(8, 1))
        fastcheck.install(model, training=fastcheck.Training(scaler=scaler))
        stop = stopped(train, model)
        assert where(stop.culprit) == ("1", "grad_input", "input[0]", "origin")


@pytest.mark.parametrize("level", ["module", "op"])
@pytest.mark.parametrize("kind", ["scaled", "log", "plain"])
def test_a_penalty_of_gradients_that_carry_the_scale(level: str, kind: str) -> None:
    """As torch's examples of automatic mixed precision have it: where the scale is too large, the
    loss is NaN, and the scaler skips the update. ``log``: it is NaN for another reason; ``plain``:
    the gradients carry no scale.
    """
    model = Halves()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)

    def loop() -> None:
        for x in batches(4):
            optimizer.zero_grad()
            y = model(x.requires_grad_()).float().sum()
            asked = y * 1e30 if kind == "plain" else scaler.scale(y)
            found, *_ = torch.autograd.grad(asked, x, create_graph=True)
            loss = y.square() + (found / scaler.get_scale()).norm()
            if kind == "log":
                loss = (-loss - 1).log()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    if kind == "scaled":
        with fastcheck.install(model, level=level):
            loop()
        assert scaler.get_scale() < 2**18
    else:
        with fastcheck.install(model, level=level), pytest.raises(fastcheck.OverflowDetected):
            loop()
