"""Counting events against overflow_nums, and the action when it is reached."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.types import Verdict
from fastcheck.verdict.findings import Counter
from support.programs.training import Apply, Net, poison, stopped, train

pytestmark = pytest.mark.usefixtures("fresh_start")


class TestCounter:
    def test_reached_at_the_limit_and_ever_after(self) -> None:
        counter = Counter(3, None, "origin")
        assert [counter.add(step) for step in range(5)] == [False, False, True, True, True]
        assert counter.total == 5

    def test_never(self) -> None:
        counter = Counter(-1, None, "origin")
        assert not any(counter.add(0) for _ in range(1000))
        assert counter.total == 1000

    def test_within(self) -> None:
        counter = Counter(2, 10, "origin")
        assert [counter.add(step) for step in (0, 10, 20, 29, 29)] == [
            False,
            False,
            False,
            True,
            True,
        ]

    @pytest.mark.parametrize(
        ("count", "verdicts"),
        [
            ("origin", {Verdict.ORIGIN, Verdict.ARRIVED}),
            ("all", {Verdict.ORIGIN, Verdict.ARRIVED, Verdict.PROPAGATED}),
        ],
    )
    def test_which_verdicts_count(self, count: str, verdicts: set[Verdict]) -> None:
        counter = Counter(1, None, count)
        assert counter.verdicts == verdicts


def faulty() -> nn.Module:
    """Overflows once in every forward, and returns it."""
    return nn.Sequential(nn.Linear(8, 8), Apply(poison))


def forwards(model: nn.Module, count: int) -> None:
    with torch.no_grad():
        for _ in range(count):
            model(torch.ones(2, 8))


def test_overflow_nums_lets_that_many_less_one_pass() -> None:
    model = faulty()
    monitor = fastcheck.install(model, overflow_nums=3)
    forwards(model, 2)
    assert monitor.event_count == 2
    stop = stopped(forwards, model, 1)
    assert stop.report.event_count == 3


def test_minus_one_never_stops() -> None:
    model = faulty()
    monitor = fastcheck.install(model, overflow_nums=-1)
    forwards(model, 20)
    assert monitor.event_count == 20


def test_within_forgets_old_events() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Apply())
    monitor = fastcheck.install(model, overflow_nums=2, stop=fastcheck.Stop(within=3))

    def now_and_then(step: int) -> None:
        model[1].function = poison if step in (1, 5, 7) else (lambda x: x)

    # The gradient of poison() is zero where it has replaced a value: the weights stay finite.
    stop = stopped(train, model, 10, before_step=now_and_then)
    assert stop.step == 7
    assert monitor.event_count == 3


def test_count_all_counts_what_is_propagated() -> None:
    model = nn.Sequential(Apply(poison), Apply(torch.neg), Apply(torch.neg), nn.Linear(8, 8))
    fastcheck.install(model, overflow_nums=3, stop=fastcheck.Stop(count="all"))
    stop = stopped(forwards, model, 1)
    assert stop.report.event_count == 3
    # It is the third event that ends the run, but the first that is to blame.
    assert stop.culprit.site.module == "0"


def test_the_run_can_go_on_after_a_stop() -> None:
    model = faulty()
    monitor = fastcheck.install(model)
    for expected in range(3):
        stop = stopped(forwards, model, 1)
        assert stop.step == expected
    model[1].function = lambda x: x
    train(model, 2)
    assert monitor.event_count == 3


def test_warn_says_each_event_and_goes_on() -> None:
    model = faulty()
    monitor = fastcheck.install(model, stop=fastcheck.Stop(action="warn"))
    with pytest.warns(
        fastcheck.FastcheckWarning, match="NaN in output of 1 .Apply. at step 0"
    ) as said:
        forwards(model, 3)
    assert len(said) == 3
    assert monitor.event_count == 3


def test_a_callable_is_called_with_each_event_from_the_limit_on() -> None:
    model, events = faulty(), []
    fastcheck.install(model, stop=fastcheck.Stop(action=events.append), overflow_nums=2)
    forwards(model, 4)
    assert [event.site.module for event in events] == ["1", "1", "1"]
    assert all(event.counted for event in events)


# Not instances: what was raised keeps the frames that it went through, and so their monitors.
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_a_callable_raises_reaches_the_training_loop(error: type[BaseException]) -> None:
    def refuse(event: Any) -> None:
        raise error("enough")

    model = faulty()
    monitor = fastcheck.install(model, stop=fastcheck.Stop(action=refuse))
    with pytest.raises(error):
        forwards(model, 1)
    with pytest.raises(error):
        forwards(model, 1)
    assert monitor.event_count == 2


def test_a_limit_above_every_count() -> None:
    model = faulty()
    monitor = fastcheck.install(model, overflow_nums=10**30)
    forwards(model, 3)
    assert monitor.event_count == 3


def test_with_minus_one_nothing_is_said(recwarn: pytest.WarningsRecorder) -> None:
    model = faulty()
    fastcheck.install(model, stop=fastcheck.Stop(action="warn"), overflow_nums=-1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forwards(model, 3)


def test_stopping_leaves_weights_and_optimizer_untouched() -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    fastcheck.install(model)
    train(model, 1, optimizer=optimizer)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.head.register_forward_hook(lambda module, args, output: poison(output))
    stopped(train, nn.Sequential(model), 1, optimizer=optimizer)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
