"""An exception ends a forward or the training loop while findings are still pending."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.log.reader import read_log
from fastcheck.types import Verdict
from support.processes import run_code
from support.programs.training import Apply, chain, nan_gradient, poison, stopped, train, where

pytestmark = pytest.mark.usefixtures("fresh_start")


def refuse(x: torch.Tensor) -> torch.Tensor:
    if not bool(x.isfinite().all()):
        raise ValueError("it wants finite numbers")
    return x


def model_of(function: Any = poison) -> Any:
    return chain(a=nn.Linear(8, 8), bad=Apply(function), check=Apply(refuse), b=nn.Linear(8, 4))


def test_what_an_exception_has_cut_off_is_in_the_summary_at_once() -> None:
    model = model_of()
    monitor = fastcheck.install(model)
    with pytest.raises(ValueError, match="finite numbers"):
        model(torch.ones(2, 8))
    lines = monitor.summary().split("\n\n")
    pending = " ".join(next(part for part in lines if part.startswith("pending")).split())
    assert "output of bad (Apply), forward: 1 NaN" in pending
    assert "ValueError has left Sequential.forward" in pending
    assert not any(part.startswith("harmless") for part in lines)


def test_of_pending_gradients_the_first_is_told() -> None:
    """The others are taken to follow: no text says that those before them were finite."""
    model = chain(
        first=nn.Linear(8, 8), middle=nn.Linear(8, 8), bad=Apply(nan_gradient), last=nn.Linear(8, 4)
    )
    monitor = fastcheck.install(model.requires_grad_(False))
    model(torch.ones(2, 8, requires_grad=True)).sum().backward()
    events = [(e.site.module, e.site.label) for e in monitor._session.event_store.pending]
    assert events == [("bad", "input[0]")]


def test_at_the_end_of_the_run_it_counts() -> None:
    model = model_of()
    monitor = fastcheck.install(model)
    with pytest.raises(ValueError, match="finite numbers"):
        model(torch.ones(2, 8))
    assert monitor.event_count == 0
    stop = stopped(monitor.remove)
    assert where(stop.culprit) == ("bad", "output", "output", "origin")
    assert stop.culprit.reason.endswith("; ValueError has left Sequential.forward")


def test_the_exception_of_a_block_goes_on_and_the_log_has_the_event(tmp_path: Path) -> None:
    model = model_of()
    with (
        pytest.raises(ValueError, match="finite numbers"),
        fastcheck.install(model, log_dir=str(tmp_path)) as monitor,
    ):
        model(torch.ones(2, 8))
    assert monitor.event_count == 1
    assert read_log(str(tmp_path)).events[-1].verdict is Verdict.ORIGIN


def test_a_run_that_goes_on_has_not_been_cut_off() -> None:
    model = model_of()
    monitor = fastcheck.install(model)
    with pytest.raises(ValueError, match="finite numbers"):
        model(torch.ones(2, 8))
    model.bad.function = torch.neg
    with torch.no_grad():
        model(torch.ones(2, 8))
    monitor.remove()
    assert monitor.event_count == 0


def test_what_came_to_nothing_before_is_not_blamed_for_an_exception() -> None:
    model = chain(a=nn.Linear(8, 8), bad=Apply(poison), clean=Apply(torch.nan_to_num), b=Apply())
    monitor = fastcheck.install(model)
    train(model)

    def interrupt(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("of another kind")

    model.clean.function = interrupt
    with pytest.raises(KeyError, match="of another kind"):
        model(torch.ones(2, 8))
    monitor.remove()
    assert monitor.event_count == 0


def test_a_loop_that_looks_at_its_gradients_itself() -> None:
    model = chain(a=nn.Linear(8, 8), bad=Apply(lambda x: x), b=nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = fastcheck.install(model)
    train(model, 2, optimizer=optimizer)
    model.bad.function = nan_gradient
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    summary = " ".join(monitor.summary().split())
    assert "pending gradient of input[0] of bad (Apply), backward: 16 NaN" in summary
    assert {e.verdict for e in monitor.events} == {Verdict.UNRESOLVED}


SCRIPT = """
import sys, torch
from torch import nn
import fastcheck
from support.programs.training import Apply, chain, nan_gradient, poison, train

def refuse(x):
    raise ValueError("enough")

where, log = sys.argv[1:]
model = chain(a=nn.Linear(8, 8), bad=Apply(), check=Apply(), b=nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
monitor = fastcheck.install(model, log_dir=log)
train(model, 2, optimizer=optimizer)
if where == "forward":
    model.bad.function, model.check.function = poison, refuse
else:
    model.bad.function = nan_gradient
optimizer.zero_grad()
model(torch.ones(2, 8)).sum().backward()
assert all(bool(p.grad.isfinite().all()) for p in model.parameters()), "by the loop"
"""


def run(place: str, log: Path) -> str:
    done = run_code(f"import sys\nsys.argv[1:] = [{place!r}, {str(log)!r}]\n{SCRIPT}")
    assert done.returncode == 1, done.stderr
    return " ".join(done.stderr.split())


def test_an_interpreter_that_ends_in_the_forward(tmp_path: Path) -> None:
    error = run("forward", tmp_path)
    assert "ValueError: enough" in error
    assert "fastcheck.OverflowDetected" in error
    assert "bad (Apply)" in error
    log = read_log(str(tmp_path))
    assert (log.events[-1].verdict, log.events[-1].step) == (Verdict.ORIGIN, 2)
    assert log.records["step"].max() == 2


def test_an_interpreter_that_ends_in_the_loop(tmp_path: Path) -> None:
    error = run("loop", tmp_path)
    assert "AssertionError: by the loop" in error
    assert "fastcheck: AssertionError ended the run in step 2" in error
    assert "gradient of input[0] of bad (Apply), backward: 16 NaN" in error
    assert "OverflowDetected" not in error
    log = read_log(str(tmp_path))
    assert {(e.verdict, e.step) for e in log.events} == {(Verdict.UNRESOLVED, 2)}


def test_a_stop_cuts_nothing_off() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bad, self.b = Apply(), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.kept = self.bad(x)
            y: torch.Tensor = self.b(x)
            return y

    model = Two()
    monitor = fastcheck.install(model)
    train(model, 1)
    with torch.no_grad():
        model.b.weight[0, 0] = float("nan")
    model.bad.function = poison
    assert where(stopped(model, torch.ones(2, 8)).culprit)[1] == "param"
    monitor.remove()
    assert monitor.event_count == 1
