"""Ctrl-C at any point of a step, which the caller catches: nothing is left in another state, and
the steps that follow are observed as before.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.log.step_table import StepTable
from fastcheck.monitor.op_level import hooks
from fastcheck.monitor.session.event_store import EventStore
from fastcheck.utils.torch.own_operators import is_unobserved, no_grad, unobserved
from support.interrupts import Points
from support.sampling import IS_WHOLE, sample

pytestmark = [
    pytest.mark.usefixtures("fresh_start"),
    # Of an interrupt in __del__, as Python has it: nobody gets it, and the step goes on.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

# All points take minutes for each case: a run before a release tries them.
_TRIED = None if IS_WHOLE else 4

# Steps differ: what is done for several of them at once is done in one of so many.
_STEPS = 16

_KINDS = ("plain", "scaled")
_OPTIONS: list[dict[str, Any]] = [
    *({}, {"level": "op"}, {"sync": "call"}, {"record": "range"}, {"watch": True})
]
_CASES = [
    (kind, options)
    for number, options in enumerate(_OPTIONS)
    for kind in (_KINDS if IS_WHOLE else [_KINDS[number % 2]])
]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


class Training:
    """One model and its monitor; ``kind``: "scaled" with a GradScaler."""

    def __init__(self, kind: str, device: str = "cpu", **options: Any) -> None:
        self.model, self.loss = Model().to(device), nn.MSELoss()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler(device, init_scale=4.0, enabled=kind == "scaled")
        self.x, self.y = torch.randn(8, 4, device=device), torch.randn(8, 2, device=device)
        self.monitor = fastcheck.install(self.model, self.loss, **options)
        for _ in range(3):
            self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss(self.model(self.x), self.y)).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 10.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def recover(self) -> None:
        """What a program does that catches an interrupt and goes on."""
        if self.scaler.is_enabled():
            with contextlib.suppress(AssertionError):  # it has seen no gradient yet
                self.scaler.update()

    def sites_after_two_steps(self) -> list[int]:
        self.step()
        self.step()
        self.monitor.flush()
        rows = self.monitor.records()
        return [int(row["site"]) for row in rows[rows["step"] == self.monitor.step_index]]


def thread_state() -> tuple[object, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch._C._len_torch_dispatch_stack(),
        is_unobserved(),
    )


def interrupt(training: Training, case: int, state: Callable[[], object]) -> None:
    """At some points of a step, other ones for each case."""
    counts = []
    for _ in range(_STEPS if IS_WHOLE else 5):  # the usual number is the median of either
        with Points() as points:
            training.step()
        counts.append(points.count)
    expected, before = training.sites_after_two_steps(), state()
    assert min(counts) > 500 and expected
    usual = sorted(counts)[len(counts) // 2]
    stride = usual // (_TRIED or usual)
    for at in range(101 * case % stride, usual, stride):
        for _ in range(2 * _STEPS):
            with Points(at) as interrupted, contextlib.suppress(KeyboardInterrupt):
                training.step()
            if interrupted.place:
                break
        assert interrupted.place, f"no point {at}"
        assert state() == before, interrupted.place
        training.recover()
        assert training.sites_after_two_steps() == expected, interrupted.place
    assert training.monitor.event_count == 0
    training.monitor.remove()


@pytest.mark.parametrize("scope", [unobserved, no_grad])
def test_a_scope_is_entered_and_left_in_one_piece(scope: Callable[[], Any]) -> None:
    def compute() -> None:
        with scope():
            torch.ones(1)

    before = thread_state()
    with Points(within=__file__) as points:
        compute()
    assert points.count >= 3
    for at in range(points.count):
        with Points(at, within=__file__) as interrupted, contextlib.suppress(KeyboardInterrupt):
            compute()
        assert interrupted.place and thread_state() == before


@pytest.mark.parametrize("goes_on", [True, False])
def test_an_interrupt_between_two_steps(goes_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    training = Training("plain")
    expected = training.sites_after_two_steps()
    monkeypatch.setattr(EventStore, "new_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        training.step()
    if goes_on:
        assert training.sites_after_two_steps() == expected
    training.monitor.remove()
    steps = [row.step for row in training.monitor.step_table()]
    assert steps == list(range(7 if goes_on else 5))


def test_an_interrupt_while_the_rows_of_steps_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    training = Training("plain", watch=True)
    monkeypatch.setattr(StepTable, "_rows_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        training.monitor.step_table()
    training.step()
    training.monitor.remove()
    assert [row.step for row in training.monitor.step_table()] == [0, 1, 2, 3]


# Right before a step is closed an interrupt leaves two iterations in one step: their losses add up.
@pytest.mark.filterwarnings("ignore::fastcheck.SpikeWarning")
@pytest.mark.parametrize("case", range(len(_CASES)))
def test_an_interrupt_leaves_nothing_behind(case: int) -> None:
    kind, options = _CASES[case]
    interrupt(Training(kind, **options), case, thread_state)


@pytest.mark.filterwarnings("ignore::fastcheck.SpikeWarning")
def test_an_interrupt_where_modules_begin_and_end_at_op_level() -> None:
    """Python and the extension each have a stack of the modules that run."""
    training = Training("plain", level="op")
    with Points(within=hooks.__file__) as points:
        training.step()
    expected = training.sites_after_two_steps()
    assert points.count > 100
    for at in range(points.count):
        with (
            Points(at, within=hooks.__file__) as interrupted,
            contextlib.suppress(KeyboardInterrupt),
        ):
            training.step()
        assert training.sites_after_two_steps() == expected, interrupted.place
    training.monitor.remove()


@pytest.mark.fake_accelerator
@pytest.mark.skipif(
    os.environ.get("FASTCHECK_FAKE_DEVICE") != "1", reason="make test-fake-device runs it"
)
@pytest.mark.parametrize(
    "options", sample([{"level": "op"}, {}, {"record": "range"}, {"sync": "call"}], 1)
)
def test_on_a_device(options: dict[str, Any], fake_accelerator: Any) -> None:
    name = fake_accelerator.name()
    module: Any = getattr(torch, name)

    def state() -> tuple[object, ...]:
        return *thread_state(), module.current_device(), module.current_stream()

    interrupt(Training("plain", name, **options), 1, state)
