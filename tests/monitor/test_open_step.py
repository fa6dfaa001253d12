"""A step that nothing ends: what it takes does not grow, and a warning names monitor.step()."""

from __future__ import annotations

import itertools
import os
import sys
from typing import Any, Callable

import pytest
import torch
from torch import nn

import fastcheck
from support.sampling import IS_WHOLE, sample

ON_FAKE = os.environ.get("FASTCHECK_FAKE_DEVICE") == "1"
pytestmark = [
    pytest.mark.fake_accelerator,
    pytest.mark.usefixtures("op_observer", "fake_accelerator" if ON_FAKE else "one_thread"),
]

LEVELS = pytest.mark.parametrize("level", ["module", "op"])
ENDS = r"monitor\.step\(\)"


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 backward passes in the place of 1,000."""
    monkeypatch.setattr("fastcheck.monitor.hooks.step_ends._MOST_PASSES", 20)


def new_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    if not ON_FAKE:
        return model
    from support.devices.training_on_fake import NAME

    return model.to(NAME)


def forward(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(2, 4).to(next(model.parameters()).device)).square().mean()
    return loss


def backward(model: nn.Module) -> None:
    model.zero_grad()
    forward(model).backward()


def without_gradients(model: nn.Module) -> None:
    with torch.no_grad():
        forward(model)


def sizes(monitor: fastcheck.Monitor) -> dict[str, int]:
    session = monitor._session
    step, history = session.step, session.event_store.archive.history
    return {
        "calls": len(step.calls),
        "entries": len(step.journal.entries),
        "notes": len(step.journal.due),
        "gradients": len(step.gradients),
        "findings": len(step.findings.all),
        "logged": len(step.findings.logged),
        "handles": len(step.leaf_handles),
        "records": sum(map(len, history.open_chunks)),
        "pieces": len(history.open_chunks),
    }


def calls_of(function: Callable[[], Any]) -> int:
    """How many calls, of Python and of C, it takes."""
    count = 0

    def add(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(add)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.skipif(ON_FAKE and not IS_WHOLE, reason="the CPU has it; the others take few")
def test_1000_backward_passes() -> None:
    """Fewer are a step like any other."""
    model = new_model()
    monitor = fastcheck.install(model, overflow_nums=-1)
    for _ in range(999):
        backward(model)
    assert monitor.step_index == 0 and not monitor._session.is_closed
    with pytest.warns(fastcheck.FastcheckWarning, match=ENDS) as caught:
        backward(model)
    assert len(caught) == 1 and caught[0].filename == __file__
    for _ in range(1001):
        backward(model)  # and no other warning
    assert monitor.step_index == 2


@pytest.mark.parametrize(
    ("is_bad", "level"),
    sample(itertools.product((False, True), ("module", "op")), 2 if ON_FAKE else 4),
)
def test_nothing_grows(is_bad: bool, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastcheck.monitor.hooks.step_ends._MOST_PASSES", 5)
    model = new_model()
    monitor = fastcheck.install(model, level=level, overflow_nums=-1)
    if is_bad:
        with torch.no_grad():
            next(model.parameters()).fill_(float("nan"))
    with pytest.warns(fastcheck.FastcheckWarning, match=ENDS):
        for _ in range(9):
            backward(model)
    monitor.flush()
    before = sizes(monitor)
    for _ in range(50):
        backward(model)
    monitor.flush()
    grown = {name: size for name, size in sizes(monitor).items() if size > before[name] + 5}
    # A device's records come in as many pieces as the drain makes of them.
    assert grown.keys() <= ({"pieces"} if ON_FAKE else set())
    assert monitor.step_index == 11


def test_the_events_of_an_accumulation(few: None) -> None:
    """Of fewer passes: they are those of one step, and the update ends it."""
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = fastcheck.install(model, overflow_nums=-1)
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(19):
            forward(model).backward()
        optimizer.step()
    monitor.flush()
    assert [row.step for row in monitor.step_table()] == [0, 1, 2]
    assert monitor.step_index == 2


def test_an_update_after_the_last_pass_belongs_to_the_step(few: None) -> None:
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = fastcheck.install(model, overflow_nums=-1)
    with pytest.warns(fastcheck.FastcheckWarning, match=ENDS):
        for _ in range(20):
            forward(model).backward()
    optimizer.step()
    monitor.flush()
    roles = {monitor.sites[int(site)].role for site in monitor.records()["site"]}
    assert monitor.step_index == 0 and "param_grad" in roles
    forward(model).backward()
    assert monitor.step_index == 1


def test_steps_that_are_not_observed_end_too(few: None) -> None:
    model = new_model()
    monitor = fastcheck.install(model, every=2, overflow_nums=-1)
    with pytest.warns(fastcheck.FastcheckWarning, match=ENDS):
        for _ in range(61):
            backward(model)
    assert monitor.step_index == 3


def test_a_loop_that_calls_monitor_step_is_not_warned(few: None) -> None:
    model = new_model()
    monitor = fastcheck.install(model, overflow_nums=-1)
    for _ in range(5):
        for _ in range(19):
            backward(model)
        monitor.step()
    assert monitor.step_index == 4


@pytest.mark.skipif(ON_FAKE, reason="the work of the drain's thread is not counted")
@pytest.mark.parametrize(
    ("level", "run"),
    sample(itertools.product(("module", "op"), (forward, without_gradients, backward)), 4),
)
def test_a_pass_takes_no_more_work(
    level: str, run: Callable[[nn.Module], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every pass has findings, whose records are looked for among those of the step."""
    monkeypatch.setattr("fastcheck.monitor.session.event_store._MAX_FINDINGS", 20)
    monkeypatch.setattr("fastcheck.verdict.op_rules._MAX_EARLIER_FINDINGS", 20)
    model = new_model()
    monitor = fastcheck.install(model, level=level, overflow_nums=-1)
    history = monitor._session.event_store.archive.history
    history._max_step_records = 400
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))

    def work() -> int:
        return calls_of(lambda: [run(model) for _ in range(50)])

    for _ in range(50):
        run(model)
    first = work()
    for _ in range(300):  # uncounted, as counting takes longer than they do
        run(model)
    assert work() < 2 * first
    monitor._session.collect()
    if level == "op":  # at module level the ring of the host is taken in once it is full
        assert sum(map(len, history.open_chunks)) < 600
