"""Tests of the pause after an event: how long it is, and what it holds back."""

from __future__ import annotations

from support.watched import Run


def test_the_pause_ends_though_what_it_holds_back_goes_on() -> None:
    run = Run()
    run.steps(100)
    for step in range(400):
        run.step(gradient_norm=50.0 if step % 20 == 0 else 1.0)
    steps = [event.step for event in run.watcher.events if event.kind == "gradient_spike"]
    assert steps == list(range(100, 500, 40))


def test_it_ends_for_warnings_too() -> None:
    """Three tensors, one after another, are cut to the largest number of their dtype."""
    run = Run()
    run.steps(100)
    for step in range(60):
        run.step({1 + at: {"saturated_count": 3} for at in range(step // 20 + 1)})
    found = [(one.step, one.is_warning) for one in run.watcher.events if one.kind == "saturated"]
    assert found == [(109, True), (129, False), (149, True)]
