"""level="op" with sync="call": the exception is raised by the operator itself."""

from __future__ import annotations

import gc
import traceback
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import fastcheck
from fastcheck.types import Verdict
from support.programs.op_level import Attention, culprit, model_with, train
from support.programs.training import Net, change_gradient, stopped

pytestmark = pytest.mark.usefixtures("op_observer")

NAN = float("nan")


def roots(x: torch.Tensor) -> torch.Tensor:
    y = x.abs() + 1
    z = torch.sqrt(-y)  # the culprit
    return z * 2


def last_line(stop: BaseException) -> str:
    """The innermost line of the traceback that is neither torch's nor fastcheck's."""
    frames = traceback.extract_tb(stop.__traceback__)
    ours = [f for f in frames if "/torch/" not in f.filename and "/fastcheck/" not in f.filename]
    return ours[-1].line or ""


def watch(model: nn.Module, **options: Any) -> fastcheck.Monitor:
    """A stop comes where something appears: in the operator itself."""
    if "overflow_nums" not in options:
        options["stop"] = fastcheck.Stop(count="all")
    return fastcheck.install(model, level="op", record="stats", sync="call", **options)


def test_the_traceback_ends_at_the_line() -> None:
    model = model_with(roots)
    watch(model)
    stop = stopped(train, model, 1)
    assert culprit(stop) == ("1", "aten.sqrt", "forward", "origin")
    assert "# the culprit" in last_line(stop)


def test_without_it_the_traceback_ends_at_the_module() -> None:
    model = model_with(roots)
    fastcheck.install(model, level="op", record="stats")
    assert "# the culprit" not in last_line(stopped(train, model, 1))


def test_in_a_loss_outside_of_the_model() -> None:
    model = Net()
    watch(model)

    def loss(y: torch.Tensor) -> torch.Tensor:
        z = torch.log(-y.abs().sum() - 1)  # of the loss
        return z.mean()

    assert "# of the loss" in last_line(stopped(train, model, 1, loss=loss))


def test_in_a_backward_of_ones_own() -> None:
    def change(gradient: torch.Tensor) -> torch.Tensor:
        return (gradient * 0) / 0  # in backward

    model = model_with(lambda x: change_gradient(x, change))
    watch(model)
    stop = stopped(train, model, 1)
    assert stop.culprit.site.direction == "backward"
    assert "# in backward" in last_line(stop)


def test_a_backward_of_torchs_own_names_the_line_of_its_forward() -> None:
    def hidden(x: torch.Tensor) -> torch.Tensor:
        z = torch.sqrt(x * 0)
        return torch.where(x > 1e9, z, x)

    model = model_with(hidden)
    watch(model)
    stop = stopped(train, model, 1)
    assert culprit(stop) == ("1", "aten.sqrt", "backward", "origin")
    number = hidden.__code__.co_firstlineno + 1
    assert f"test_sync_call.py:{number} in hidden" in stop.culprit.line
    assert "backward" in last_line(stop)  # value.backward(), in the loop


def test_in_the_optimizer() -> None:
    model = nn.Linear(8, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)
    watch(model)
    stop = stopped(train, model, 2, loss=lambda y: y.sum() * 1e25, optimizer=optimizer)
    assert culprit(stop)[1:3] == ("aten.addcmul_", "optimizer")


def test_a_write_in_place() -> None:
    def poke(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        y.div_(0).mul_(0)  # the culprit
        return y + 1

    model = model_with(poke)
    watch(model)
    assert "# the culprit" in last_line(stopped(train, model, 1))


@pytest.mark.parametrize("seed", range(2))
def test_records_are_those_of_the_observer_alone(seed: int) -> None:
    """The same names, calls and numbers, forward, backward and in the optimizer."""

    def run(sync: str) -> list[tuple[Any, ...]]:
        torch.manual_seed(seed)
        model = nn.Sequential(Attention(), nn.LayerNorm(8), nn.ReLU(inplace=True), nn.Linear(8, 4))
        optimizer = torch.optim.Adam(model.parameters(), foreach=bool(seed))
        monitor = fastcheck.install(model, level="op", sync=sync)
        losses = train(model, 3, shape=(2, 6, 8), optimizer=optimizer)
        monitor.remove()
        rows: list[tuple[Any, ...]] = [tuple(losses)]
        for record in monitor.records():
            site = monitor.sites[int(record["site"])]
            place = (site.module, site.op, site.direction, site.role, site.index, site.label)
            rows.append((*place, int(record["step"]), int(record["call"]), int(record["checksum"])))
        return rows

    assert run("call") == run("never")


def test_healthy_masks_and_several_events() -> None:
    model = nn.Sequential(Attention(), model_with(lambda x: x))
    monitor = watch(model, overflow_nums=-1)
    train(model, 2, shape=(2, 6, 8))
    assert monitor.event_count == 0
    model[1][1].function = roots
    train(model, 1, shape=(2, 6, 8))
    assert [e.site.op for e in monitor.events if e.counted] == ["aten.sqrt"]


def test_filters() -> None:
    model = nn.Sequential(model_with(roots), nn.Linear(4, 4))
    watch(model, include="1")
    stop = stopped(train, model, 1)
    assert culprit(stop) == ("1", "aten.addmm", "forward", "arrived")


def test_other_modes_beside_it() -> None:
    seen: list[str] = []

    class Other(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    for outside in (True, False):
        seen.clear()
        model = model_with(roots)
        outer, inner = (Other(), None) if outside else (None, Other())
        if outer is not None:
            outer.__enter__()
        monitor = watch(model, overflow_nums=-1)
        if inner is not None:
            inner.__enter__()
        with torch.no_grad():
            model(torch.ones(2, 8))
        # Under the other, or over it: it goes, and the other stays.
        monitor.remove()
        rest = _get_current_dispatch_mode_stack()
        assert rest == [outer or inner]
        other = outer or inner
        assert other is not None
        other.__exit__(None, None, None)
        assert "aten.sqrt.default" in seen
        assert [e.site.op for e in monitor.events if e.counted] == ["aten.sqrt"]


def test_it_goes_with_the_monitor_and_with_the_model() -> None:
    before = _get_current_dispatch_mode_stack()
    watch(Net()).remove()
    assert _get_current_dispatch_mode_stack() == before
    watch(Net())
    gc.collect()
    assert _get_current_dispatch_mode_stack() == before


def test_training_goes_on_after_a_stop() -> None:
    model = model_with(roots)
    monitor = watch(model)
    stopped(train, model, 1)
    model[1].function = lambda x: x
    train(model, 2)
    assert monitor.event_count == 1
    model[1].function = roots
    stop = stopped(train, model, 1)
    assert stop.culprit.verdict is Verdict.ORIGIN


def test_under_inference_mode_and_functorch() -> None:
    model = model_with(roots)
    watch(model)
    with torch.inference_mode():
        stop = stopped(model, torch.ones(2, 8))
    assert "# the culprit" in last_line(stop)
    with torch.no_grad():
        stop = stopped(torch.vmap(model), torch.ones(3, 8))
    assert stop.culprit.site.op == "aten.sqrt"
