"""level="op" with ops=, roles=, include=, exclude=, steps= and every=: what is read, and correct
verdicts beside what is not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.types import Verdict
from support.programs.op_level import Attention, model_with, train
from support.programs.training import Net, stopped

pytestmark = pytest.mark.usefixtures("op_observer")

NAN = float("nan")


def seen(monitor: fastcheck.Monitor, what: str = "op") -> set[Any]:
    return {getattr(monitor.sites[int(r["site"])], what) for r in monitor.records()} - {None}


def watch(model: nn.Module, **options: Any) -> fastcheck.Monitor:
    options = {"record": "stats", "overflow_nums": -1, **options}
    return fastcheck.install(model, level="op", **options)


def roots(x: torch.Tensor) -> torch.Tensor:
    return torch.sqrt(-x.abs() - 1)


# By operator


@pytest.mark.parametrize("ops", ["aten.relu", "relu", "rel*", "Functional.relu", ["relu", "!mm"]])
def test_one_operator_and_its_backward(ops: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    monitor = watch(model, filter=fastcheck.Filter(ops=ops, roles=["output", "grad_input"]))
    train(model, 1)
    assert seen(monitor) == {"aten.relu"}
    assert seen(monitor, "direction") == {"forward", "backward"}


def test_an_operator_that_is_made_of_others_stands_for_these() -> None:
    model = model_with(lambda x: x @ x.T @ x)
    monitor = watch(model, filter=fastcheck.Filter(ops="linear", roles="output"))
    train(model, 1)
    assert seen(monitor) == {"aten.addmm"} and len(monitor.records()) == 2


def test_what_is_left_out() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    monitor = watch(model, filter=fastcheck.Filter(ops=["!aten.relu", "!aten.mul*"]))
    train(model, 1)
    ops = seen(monitor)
    assert "aten.addmm" in ops and "aten.relu" not in ops
    assert not any(op.startswith("aten.mul") for op in ops)


def test_calls_are_counted_whether_they_are_read_or_not() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    monitor = watch(model, include="2", filter=fastcheck.Filter(roles="output"))
    train(model, 1)
    found = {(monitor.sites[int(r["site"])].op, int(r["call"])) for r in monitor.records()}
    assert ("aten.addmm", 2) in found and ("aten.addmm", 0) not in found


@pytest.mark.parametrize(
    ("ops", "near"),
    [
        ("aten.softmx", "aten.*softmax"),
        ("Functional.sofmax", "Functional.softmax"),
        ("addm", "addmm"),
    ],
)
def test_an_unknown_operator_is_an_error(ops: str, near: str) -> None:
    with pytest.raises(fastcheck.ConfigError, match=f"matches no operator(?s:.*){near}"):
        watch(Net(), filter=fastcheck.Filter(ops=ops))
    watch(Net()).remove()  # nothing was installed


def test_the_name_of_a_module_is_no_operator() -> None:
    with pytest.raises(fastcheck.ConfigError, match=r"include='blocks\.0'"):
        watch(Net(), filter=fastcheck.Filter(ops="Module.blocks.0.Residual.forward.0"))


def test_a_single_call_is_no_operator() -> None:
    with pytest.raises(fastcheck.ConfigError, match="not single calls"):
        watch(Net(), filter=fastcheck.Filter(ops="Functional.softmax.3.forward"))


# By module


def test_modules() -> None:
    model = Net()
    monitor = watch(model, include=["blocks.1", "head"], exclude="blocks.1.b")
    train(model, 1)
    assert seen(monitor, "module") == {"blocks.1", "blocks.1.a", "blocks.1.act", "head"}
    assert "outside the model" not in seen(monitor, "module_type")


def test_an_excluded_module_leaves_the_rest_and_the_outside() -> None:
    model = Net(dropout=0.1)
    monitor = watch(model, exclude="blocks.*")
    train(model, 1)
    assert seen(monitor, "module") == {"", "dropout", "head"}
    assert "outside the model" in seen(monitor, "module_type")


def test_an_unknown_module_is_an_error() -> None:
    with pytest.raises(fastcheck.ConfigError, match=r"'heat' matches no module(?s:.*)'head'"):
        watch(Net(), include="heat")


# By role, step and cadence


@pytest.mark.parametrize(
    ("roles", "directions"),
    [
        ("output", {"forward"}),
        (["grad_input", "grad_output"], {"backward"}),
        ("optimizer_state", {"optimizer"}),
        ("param", {"optimizer"}),
    ],
)
def test_roles(roles: Any, directions: set[str]) -> None:
    model = Net()
    monitor = watch(model, filter=fastcheck.Filter(roles=roles))
    train(model, 2, optimizer=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    assert seen(monitor, "direction") == directions
    if directions != {"optimizer"}:
        assert seen(monitor, "role") <= {*([roles] if isinstance(roles, str) else roles)}


def test_an_unknown_role_is_an_error() -> None:
    with pytest.raises(fastcheck.ConfigError, match=r"unknown role(?s:.*)'grad_input'"):
        watch(Net(), filter=fastcheck.Filter(roles="grad_inputs"))


@pytest.mark.parametrize("level", ["module", "op"])
@pytest.mark.parametrize(
    ("steps", "every", "read"),
    [(range(2, 5), 1, {2, 3, 4}), ([1, 4], 1, {1, 4}), (range(1, 6), 2, {2, 4})],
)
def test_steps(level: str, steps: Any, every: int, read: set[int]) -> None:
    model = Net()
    monitor = fastcheck.install(
        model, level=level, filter=fastcheck.Filter(steps=steps), every=every
    )
    train(model, 7)
    assert set(monitor.records()["step"]) == read


@pytest.mark.parametrize("steps", [range(0), [], "3", [-1], [1.5], 3])
def test_steps_that_are_none(steps: Any) -> None:
    with pytest.raises(fastcheck.ConfigError, match="steps must be ints of at least 0"):
        watch(Net(), filter=fastcheck.Filter(steps=steps))


def test_what_a_step_that_was_left_out_did_is_not_taken_for_known() -> None:
    """The weight is written through an alias whose version is not counted, in a step unread."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    monitor = watch(model, every=2)

    def before(step: int) -> None:
        if step == 2:  # still in the step before
            model[1].weight.data.view(-1)[0] = NAN

    train(model, 3, before)
    first = next(e for e in monitor.events if e.counted)
    assert (first.step, first.verdict, first.site.module) == (2, Verdict.ARRIVED, "1")
    assert "every=" in first.reason


# Correct verdicts beside what is not read


def test_made_where_nobody_looked_it_arrives_where_somebody_does() -> None:
    model = model_with(roots)
    monitor = watch(model, exclude="1")
    train(model, 1)
    first = next(e for e in monitor.events if e.counted)
    assert (first.site.module, first.site.op, first.verdict) == ("2", "aten.addmm", Verdict.ARRIVED)
    assert "exclude=" in first.reason
    assert sum(e.counted for e in monitor.events) == 1


def test_what_began_in_a_part_that_is_read_is_followed_through_one_that_is_not() -> None:
    model = nn.Sequential(model_with(roots), nn.Linear(4, 4), nn.Linear(4, 4))
    monitor = watch(model, exclude="1")
    train(model, 1)
    counted = [(e.site.module, e.site.op) for e in monitor.events if e.counted]
    assert counted == [("0.1", "aten.sqrt")]


def test_a_write_in_place_that_is_not_read_is_known_to_have_happened() -> None:
    kept: list[torch.Tensor] = []

    def poke(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        x.data.fill_(NAN)  # the version of x doesn't move
        return x + 1

    model = model_with(poke)
    monitor = watch(model, filter=fastcheck.Filter(ops=["addmm", "add"]))
    with torch.no_grad():
        model(torch.ones(2, 8))
    monitor.flush()
    first = next(e for e in monitor.events if e.counted)
    assert (first.site.op, first.site.role, first.verdict) == (
        "aten.add.Tensor",
        "input",
        Verdict.ARRIVED,
    )


def test_an_input_of_no_role_is_read_before_its_op_is_blamed() -> None:
    monitor = watch(Net(), filter=fastcheck.Filter(roles="output"))
    x = torch.from_numpy(np.full((2, 8), NAN, np.float32))
    with torch.no_grad():
        (x * 2).sum().item()
    monitor.flush()
    assert [(e.site.op, e.site.role, e.verdict) for e in monitor.events if e.counted] == [
        ("aten.mul.Tensor", "input", Verdict.ARRIVED)
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"filter": fastcheck.Filter(ops="aten.masked_fill*")},
        {"filter": fastcheck.Filter(ops="aten._softmax")},
        {"filter": fastcheck.Filter(roles="input")},
        {"filter": fastcheck.Filter(roles=["grad_input"])},
        {"filter": fastcheck.Filter(ops=["!aten._softmax"])},
        {"include": "1"},
        {"exclude": "0"},
        {"every": 2},
    ],
    ids=str,
)
def test_a_healthy_mask_stays_healthy(options: dict[str, Any]) -> None:
    model = nn.Sequential(Attention(), nn.Linear(8, 8))
    monitor = watch(model, **options)
    train(model, 4, shape=(2, 6, 8))
    assert monitor.event_count == 0, [str(e) for e in monitor.events if e.counted]


def test_the_origin_is_the_same_through_a_filter() -> None:
    model = nn.Sequential(nn.Linear(8, 8), model_with(roots))
    fastcheck.install(model, level="op", filter=fastcheck.Filter(ops=["sqrt", "aten.add*"]))
    stop = stopped(train, model, 1)
    # What it read was read then, and was finite.
    assert (stop.culprit.site.op, stop.culprit.verdict) == ("aten.sqrt", Verdict.ORIGIN)
