"""Replay: a stopped step of module level runs again at op level, and the state stays unchanged."""

from __future__ import annotations

import pickle
from typing import Any, Callable

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import fastcheck
from support.programs.op_level import culprit
from support.programs.training import Apply, batches
from support.programs.training_state import same, state_of

pytestmark = pytest.mark.usefixtures("op_observer")

NAN = float("nan")


def roots(x: torch.Tensor) -> torch.Tensor:
    y = x.abs() + 1
    return torch.sqrt(-y)


class Run:
    """A model with dropout, batch norm and a part that may be exchanged, and its step."""

    def __init__(self, optimizer: Any = torch.optim.Adam, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), Apply(), nn.Linear(8, 4)
        )
        self.optimizer = optimizer(self.model.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler("cpu", enabled=options.pop("scaled", False))
        self.seen: list[torch.Tensor] = []
        options.setdefault("stop", fastcheck.Stop(replay=True))
        self.monitor = fastcheck.install(self.model, **options)

    def step(self, x: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        y = self.model(x)
        self.seen.append(y.detach().clone())
        loss = y.square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return float(loss.detach())

    def train(self, bad: int = -1, function: Callable[..., Any] = roots) -> None:
        for index, x in enumerate(batches(4)):
            self.model[3].function = function if index == bad else lambda x: x
            self.monitor.run(self.step, x)

    def state(self) -> dict[str, Any]:
        return state_of(self.model, self.optimizer, self.scaler)

    @property
    def parameters(self) -> list[torch.Tensor]:
        return list(self.model.parameters())


def stopped(run: Run, **options: Any) -> fastcheck.OverflowDetected:
    with pytest.raises(fastcheck.OverflowDetected) as caught:
        run.train(bad=2, **options)
    return caught.value


def test_the_module_level_yields_the_operator_and_the_line() -> None:
    run = Run()
    stop = stopped(run)
    assert (stop.culprit.site.op, stop.culprit.site.module) == (None, "3")
    replay = stop.report.replay
    assert replay is not None and replay.stop is not None and replay.notes == ()
    assert culprit(replay.stop) == ("3", "aten.sqrt", "forward", "origin")
    text = str(stop)
    assert "run again at op level" in text and "aten.sqrt #0" in text and "in roots" in text
    assert isinstance(stop.__cause__, fastcheck.OverflowDetected)
    assert stop.__cause__.report is replay.report
    assert str(pickle.loads(pickle.dumps(stop))) == text


def test_the_advice_is_that_of_the_replay() -> None:
    """Of the module alone only the input is known."""

    def spread(x: torch.Tensor) -> torch.Tensor:
        return (x * 1e3).exp()

    replay = stopped(Run(), function=spread)
    alone = stopped(Run(stop=fastcheck.Stop(find_operator=False)), function=spread)
    limit = "exp of more than 88.7 is beyond the range of float32"
    assert limit in " ".join(str(replay).split()) and limit not in " ".join(str(alone).split())


def test_nothing_is_kept_without_it() -> None:
    run = Run(stop=fastcheck.Stop())
    assert stopped(run).report.replay is None


def test_training_is_bit_identical() -> None:
    plain, watched = Run(stop=fastcheck.Stop()), Run()
    torch.manual_seed(1)
    plain.train()
    torch.manual_seed(1)
    watched.train()
    assert same(plain.state(), watched.state())


def test_the_random_numbers_of_the_step_are_drawn_again() -> None:
    run = Run()
    seen: list[torch.Tensor] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.detach().clone())
        return roots(x)

    stopped(run, function=function)
    first, again = seen
    assert bool((first == 0).any()) and torch.equal(first, again)


class Once:
    """Bad in its first call alone: run again, the step goes to its end."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return roots(x) if self.calls == 1 else x


@pytest.mark.parametrize("function", [lambda: roots, Once], ids=["roots", "once"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("scaled", [False, True])
def test_everything_is_as_without_a_replay(kind: Any, scaled: bool, function: Any) -> None:
    states = []
    for stop in (fastcheck.Stop(), fastcheck.Stop(replay=True)):
        run = Run(lambda p, lr: kind(p, lr=lr), scaled=scaled, stop=stop)
        torch.manual_seed(1)
        stopped(run, function=function())
        states.append((run.state(), run.monitor.event_count, run.monitor.step_index))
        run.monitor.remove()
    assert same(states[0][0], states[1][0])
    assert states[0][1:] == states[1][1:]


def test_an_optimizer_that_never_stepped_keeps_nothing() -> None:
    run = Run()
    bad = Once()
    with pytest.raises(fastcheck.OverflowDetected, match="run again, the step was finite"):
        run.train(bad=0, function=bad)
    assert bad.calls == 2 and not run.optimizer.state
    assert all(p.grad is None for p in run.parameters)


def test_only_the_backward_is_bad() -> None:
    run = Run()

    def hidden(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 1e9, torch.sqrt(x * 0), x)

    stop = stopped(run, function=hidden)
    replay = stop.report.replay
    assert replay is not None and replay.stop is not None
    assert culprit(replay.stop)[1:3] == ("aten.sqrt", "backward")
    assert "in hidden" in replay.stop.culprit.line


def test_weights_that_are_gone_are_said() -> None:
    """The first of two optimizers that take turns has stepped when the stop comes."""
    model = nn.Sequential(nn.Linear(8, 8), Apply(), nn.Linear(8, 4))
    first, second = (torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2))
    monitor = fastcheck.install(model, stop=fastcheck.Stop(replay=True))

    def step(x: torch.Tensor, function: Callable[..., Any]) -> None:
        for optimizer in (first, second):
            model[1].function = function if optimizer is second else lambda x: x
            model.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    monitor.run(step, torch.ones(4, 8), lambda x: x)
    with pytest.raises(fastcheck.OverflowDetected) as caught:
        monitor.run(step, torch.ones(4, 8), roots)
    assert "weights of the step are gone" in str(caught.value)


def test_a_batch_that_is_gone_is_said() -> None:
    run = Run()

    def step(x: torch.Tensor) -> None:
        x.div_(x.abs().sum() * 0)
        run.model(x)

    with pytest.raises(fastcheck.OverflowDetected) as caught:
        run.monitor.run(step, torch.ones(4, 8))
    assert "written in place" in str(caught.value)


def test_what_does_not_come_again_is_said() -> None:
    run = Run()
    source = iter([NAN, 1.0])
    run.model[3].function = lambda x: x * next(source)
    with pytest.raises(fastcheck.OverflowDetected) as caught:
        run.monitor.run(run.step, torch.ones(4, 8))
    assert "run again, the step was finite" in str(caught.value)


class Counting(nn.Module):
    """Bad in its third call, as its buffer counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.linear = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = self.get_buffer("count").add_(1)
        y: torch.Tensor = self.linear(x) + torch.sqrt(-(count == 3).float())
        return y


def test_the_buffers_are_those_of_the_beginning() -> None:
    model = Counting()
    monitor = fastcheck.install(model, stop=fastcheck.Stop(replay=True))

    def step() -> None:
        model(torch.ones(1, 8)).sum().backward()

    with pytest.raises(fastcheck.OverflowDetected) as caught:
        for _ in range(4):
            monitor.run(step)
    replay = caught.value.report.replay
    assert replay is not None and replay.stop is not None
    assert replay.stop.culprit.site.op == "aten.sqrt"
    assert int(model.get_buffer("count")) == 3


def test_an_exception_of_the_step_is_said() -> None:
    run = Run()

    def fail(x: torch.Tensor) -> torch.Tensor:
        run.model[3].function = lambda x: {}["mine"]
        return roots(x)

    assert "run again, the step failed: KeyError" in str(stopped(run, function=fail))
    with pytest.raises(KeyError):
        run.monitor.run(lambda: {}["mine"])


def test_it_leaves_nothing_behind_and_the_monitor_goes_on() -> None:
    run = Run()
    stopped(run)
    assert fastcheck._C.op_observer().run() == 0
    assert not _get_current_dispatch_mode_stack()
    run.train()
    assert run.monitor.event_count == 1
    assert stopped(run).report.replay is not None
    assert run.monitor.event_count == 2


class Lerping(nn.Module):
    """A variance of one's own, of a batch of one row NaN in its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.register_buffer("variance", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        with torch.no_grad():
            self.variance.lerp_(y.var(0), 0.1)
        return y


@pytest.mark.filterwarnings("ignore:.*degrees of freedom:UserWarning")
def test_a_replay_that_no_event_ends_is_not_called_finite() -> None:
    model = Lerping()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()

    with fastcheck.install(model, stop=fastcheck.Stop(replay=True)) as monitor:
        monitor.run(step, torch.rand(3, 8))
        with pytest.raises(fastcheck.OverflowDetected) as caught:
            monitor.run(step, torch.rand(1, 8))
            monitor.run(step, torch.rand(3, 8))
    replay = caught.value.report.replay
    assert replay is not None
    text = " ".join(replay.remarks)
    assert "finite: the cause" not in text
    if replay.report is None:
        assert "the first non-finite tensor was" in text and "in forward" in text


class Breaking(torch.optim.SGD):
    """Its second update writes NaN."""

    count = 0

    def step(self, closure: Any = None) -> None:
        self.count += 1
        super().step(closure)
        if self.count == 2:
            with torch.no_grad():
                self.param_groups[0]["params"][0].div_(0).mul_(0)


def test_what_an_update_made_is_not_looked_for_in_the_step_after_it() -> None:
    run = Run(Breaking)
    with pytest.raises(fastcheck.OverflowDetected) as caught:
        run.train()
    assert caught.value.culprit.site.role == "param"
    replay = caught.value.report.replay
    assert replay is not None and replay.report is None
    assert "the step was not run again: what was found is stored" in str(caught.value)
    assert "first read" not in str(caught.value)


def test_a_call_of_several_steps_is_replayed_from_its_first() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def epoch() -> None:
        for factor in (1.0, 1.0, NAN):
            optimizer.zero_grad()
            (model(torch.ones(2, 4)) * factor).sum().backward()
            optimizer.step()

    monitor = fastcheck.install(model, stop=fastcheck.Stop(replay=True))
    with monitor, pytest.raises(fastcheck.OverflowDetected) as stop:
        monitor.run(epoch)
    replay = stop.value.report.replay
    assert replay is not None and replay.report is not None
    assert (stop.value.step, replay.report.step) == (2, 2)
    assert "an update has been applied since it began" in " ".join(replay.notes)
