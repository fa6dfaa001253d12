"""rerun(): what differs between two runs of a step, and that training goes on as if there were
none.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fastcheck
from support.programs.training_state import same, state_of


class Counting(nn.Module):
    """Adds noise of Python and NumPy, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x * (1 + 0.1 * self.count + 0.01 * random.random() + 0.01 * float(np.random.rand()))


class Loop:
    """A model with dropout, batch norm and a counter; its gradients add up over two steps."""

    def __init__(self, scaled: bool = False) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.model = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), Counting(), nn.Linear(16, 4)
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=1, enabled=scaled)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(1.5)
        loss = self.model(x).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.model[3].count % 2:
            self.optimizer.zero_grad()
        self.schedule.step()
        return loss.detach()

    def rerun(self, x: torch.Tensor, **options: Any) -> Any:
        return fastcheck.rerun(
            self.step, x, model=self.model, optimizer=self.optimizer, scaler=self.scaler,
            also=[self.schedule], **options,
        )  # fmt: skip

    def state(self) -> dict[str, Any]:
        return state_of(
            self.model,
            self.optimizer,
            self.scaler,
            schedule=self.schedule.state_dict(),
            count=(self.model[3].count, [m.training for m in self.model.modules()]),
        )

    @property
    def parameters(self) -> list[torch.Tensor]:
        return list(self.model.parameters())


@contextmanager
def fault(name: str, at: Any, what: Any = None) -> Iterator[None]:
    """The function of F flips a bit in the result of its ``at``-th calls, counted from 1."""
    plain, count = getattr(F, name), [0]

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        found = plain(*args, **kwargs)
        count[0] += 1
        if count[0] in at:
            with torch.no_grad():
                bits = found.view(torch.int32).view(-1)
                bits[5] ^= 1 << (what or 3)
                bits[6] ^= count[0]
        return found

    setattr(F, name, wrapped)
    try:
        yield
    finally:
        setattr(F, name, plain)


def batch() -> torch.Tensor:
    return torch.randn(32, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("scaled", [False, True])
def test_two_runs_of_a_healthy_step_are_equal_and_all_is_put_back(scaled: bool) -> None:
    plain = Loop(scaled)
    wanted = [(plain.step(batch()), plain.state()) for _ in range(4)]
    loop = Loop(scaled)
    for loss, state in wanted:
        x, before = batch(), loop.state()
        report = loop.rerun(x)
        assert report.identical and report.cause == "" and report.first is None
        assert report.runs == 2 and report.tensors > 40
        assert same(loop.state(), before) and torch.equal(x, batch())
        assert torch.equal(loop.step(x), loss) and same(loop.state(), state)
    assert "all with the same bits" in str(report)


@pytest.mark.parametrize(("call", "odd"), [(2, 1), (4, 2), (6, 3)])
def test_a_bit_that_flips_once_is_found(call: int, odd: int) -> None:
    loop = Loop()
    loop.step(batch())
    before = loop.state()
    with fault("linear", [call]):  # two calls in each run
        report = loop.rerun(batch(), runs=3)
    assert not report.identical and report.cause == "hardware"
    assert report.odd_runs == (odd,) and not report.is_each_time and report.runs == 3
    first = report.first
    assert (first.site.module, first.site.role, first.phase) == ("4", "output", "forward")
    assert f"It came in run {odd}; the other 2 are equal" in str(report)
    assert "in the forward pass: 4 (Linear)" in str(report)
    assert same(loop.state(), before)


def test_a_third_run_is_made_where_two_differ() -> None:
    with fault("linear", [3]):
        report = Loop().rerun(batch())
    assert report.runs == 3 and report.odd_runs == (2,)
    assert report.first.site.module == "0"
    assert len(report.differences) > 5 and report.differences[0] == report.first


def test_at_op_level_the_operator_is_named() -> None:
    loop = Loop()
    plain, count = torch.sigmoid, [0]

    def sigmoid(x: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        y = plain(x)
        return torch.mul(y, 1.0 + 2.0**-20) if count[0] == 2 else torch.mul(y, 1.0)

    loop.model[3].forward = sigmoid  # type: ignore[method-assign]  # a fault
    report = loop.rerun(batch(), level="op")
    assert report.odd_runs == (2,)
    assert (report.first.site.op, report.first.site.module) == ("aten.mul.Tensor", "3")


def test_a_difference_in_the_update_alone() -> None:
    loop, count = Loop(), [0]

    def flip(*args: Any) -> None:
        count[0] += 1
        if count[0] == 2:
            with torch.no_grad():
                loop.model[4].weight.view(torch.int32)[1, 1] ^= 1

    loop.optimizer.register_step_post_hook(flip)
    report = loop.rerun(batch())
    assert (report.first.phase, report.first.site.label) == ("after", "4.weight")
    assert len(report.differences) == 1 and "after the step" in str(report)


def test_what_differs_each_time_is_not_called_a_fault_of_the_machine() -> None:
    with fault("linear", range(100)):
        report = Loop().rerun(batch())
    assert report.is_each_time and report.odd_runs == ()
    assert report.cause == "unknown" and "also=" in str(report)


def test_kernels_that_depend_on_timing_are_named_as_the_cause() -> None:
    loop, count = Loop(), [0]

    def forward(x: torch.Tensor) -> torch.Tensor:
        count[0] += 0 if torch.are_deterministic_algorithms_enabled() else 1
        return x + 1e-6 * count[0]

    loop.model[3].forward = forward  # type: ignore[method-assign]  # such a kernel
    report = loop.rerun(batch())
    assert report.cause == "program" and "use_deterministic_algorithms" in str(report)
    assert not torch.are_deterministic_algorithms_enabled()
    assert loop.rerun(batch(), deterministic=True).identical
    assert not torch.are_deterministic_algorithms_enabled()


def test_data_that_the_step_draws_by_itself() -> None:
    loop, samples = Loop(), iter(torch.randn(9, 32, 8))
    report = fastcheck.rerun(lambda: loop.step(next(samples)), model=loop.model)
    assert report.cause == "input" and report.first.is_input


def test_a_generator_of_the_users_own() -> None:
    loop, own = Loop(), torch.Generator().manual_seed(3)
    loop.model[3].forward = lambda x: x + torch.rand(16, generator=own)  # type: ignore[method-assign]  # a forward of its own, as users set one
    assert loop.rerun(batch()).cause == "unknown"
    step = loop.step
    state = own.get_state()
    assert fastcheck.rerun(step, batch(), model=loop.model, also=[own, loop.schedule]).identical
    assert torch.equal(own.get_state(), state)


def test_a_call_that_only_one_run_makes() -> None:
    loop, count = Loop(), [0]

    def step(x: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        if count[0] == 2:
            loop.model[0](x)
        return loop.step(x)

    report = fastcheck.rerun(step, batch(), model=loop.model, also=[loop.schedule])
    assert not report.identical and "only run 2 has it" in str(report)
    assert report.odd_runs == (2,)


class TestExceptions:
    def test_of_the_first_run_leave_with_all_put_back(self) -> None:
        loop = Loop()
        loop.step(batch())
        before = loop.state()

        def step(x: torch.Tensor) -> None:
            loop.model.eval()
            loop.step(x)
            raise KeyError("no such sample")

        with pytest.raises(KeyError, match="no such sample"):
            fastcheck.rerun(step, batch(), model=loop.model, also=[loop.schedule])
        assert same(loop.state(), before)
        assert not any(m._forward_hooks for m in loop.model.modules())

    def test_of_another_run_are_part_of_the_report(self) -> None:
        loop, count = Loop(), [0]

        def step(x: torch.Tensor) -> torch.Tensor:
            count[0] += 1
            if count[0] == 2:
                raise RuntimeError("out of memory")
            return loop.step(x)

        report = fastcheck.rerun(step, batch(), model=loop.model, also=[loop.schedule])
        assert report.errors == ((2, "RuntimeError: out of memory"),)
        assert report.odd_runs == (2,) and "Run 2 raised RuntimeError" in str(report)


def test_a_monitor_of_the_model_sees_nothing_of_it() -> None:
    found = []
    for is_rerun in (True, False):
        loop = Loop()
        with fastcheck.install(loop.model, record="full", watch=True) as monitor:
            for number in range(3):
                if is_rerun and number:
                    assert loop.rerun(batch()).identical
                loop.step(batch())
            found.append((monitor.records(), monitor.step_table(), monitor.summary()))
    (records, rows, summary), (others, other_rows, other_summary) = found
    assert rows == other_rows and summary == other_summary
    assert records["checksum"].tolist() == others["checksum"].tolist()


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"model": 3}, "model"),
        ({"model": None}, "model"),
        ({"model": []}, "model"),
        ({"optimizer": "Adam"}, "optimizer"),
        ({"also": [3]}, "also"),
        ({"also": 3}, "also"),
        ({"runs": 1}, "runs"),
        ({"scaler": 2.0}, "scaler"),
        ({"level": "tensor"}, "level"),
        ({"step": 3}, "step"),
    ],
)
def test_what_cannot_be_used_is_refused(options: dict[str, Any], what: str) -> None:
    loop = Loop()
    given = {"step": loop.step, "model": loop.model, **options}
    step = given.pop("step")
    with pytest.raises(fastcheck.ConfigError, match=what):
        fastcheck.rerun(step, batch(), **given)
