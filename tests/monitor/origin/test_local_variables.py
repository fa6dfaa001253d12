"""Tests of the lines that assigned or changed a local variable, as a running function has them."""

from __future__ import annotations

import sys
from typing import Callable

import pytest
import torch

from fastcheck.monitor.origin.local_variables import find_variable

needs_positions = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="instructions have no place in their line"
)


def lines_of(tensor: torch.Tensor) -> str:
    """What is said of the variable of the caller that holds it, without its place."""
    variable = find_variable(lambda one: one is tensor)
    head, _, lines = str(variable).partition(" in ")
    assert head.split(":")[0].endswith("assigned at " + __file__) or "changed at " in head
    return head.partition(" at ")[0] + ": " + lines.partition(": ")[2]


def test_what_a_loop_assigns_behind_the_call_may_have_run_the_last_time_round() -> None:
    x = torch.zeros(2)
    for i in range(2):
        said = lines_of(x)
        if i:
            x = x - 1
        else:
            x = x + 1
            print(end="")
    assert said == "x, assigned: x = torch.zeros(2); x = x - 1; x = x + 1"


def test_what_the_loop_assigns_before_the_call_has_run_since() -> None:
    for _ in range(2):
        x = torch.zeros(2)
        said = lines_of(x)
        x = x + 1
    assert said == "x, assigned: x = torch.zeros(2)"


def test_of_two_loops_the_outer_one_has_not_run_since() -> None:
    x, count = torch.zeros(2), 0
    while count < 2:
        y = x + 1
        for _ in range(2):
            said = lines_of(x), lines_of(y)
            y = y * 2
        x = y - 1
        count += 1
    assert said == (
        "x, assigned: x, count = torch.zeros(2), 0; x = y - 1",
        "y, assigned: y = x + 1; y = y * 2",
    )


def test_behind_a_loop_nothing_runs_again() -> None:
    x = torch.zeros(2)
    for _ in range(2):
        print(end="")
    said = lines_of(x)
    x = x + 1
    assert said == "x, assigned: x = torch.zeros(2)"


def test_the_line_that_runs_has_not_assigned_yet() -> None:
    def returned(x: torch.Tensor) -> torch.Tensor:
        said.append(lines_of(x))
        return x + 1

    said: list[str] = []
    x = torch.zeros(2)
    x = returned(x)
    # It is the caller's, since an argument was not assigned where it is one.
    assert said == ["x, assigned: x = torch.zeros(2)"]


def test_several_that_one_line_assigns_have_read_the_same() -> None:
    bad = torch.tensor([0.0]).log()
    x, y = bad + 1, bad - 1
    first, second = x * 2, y * 2
    cause = find_variable(lambda one: one is second)
    assert cause is not None and str(cause.first_cause()).endswith(
        ": bad = torch.tensor([0.0]).log()"
    )
    assert len(first) == 1


@needs_positions
def test_elements_that_are_written_and_methods_that_write() -> None:
    x, value = torch.zeros(4), 2.0
    chosen = x > 1
    x[chosen] = value
    x[0] = 1.0
    x[1:] += 1
    x.data[:, None][2] = 1.0
    said = lines_of(x)
    assert said == (
        "x, assigned: x, value = torch.zeros(4), 2.0; x[chosen] = value; x[0] = 1.0; x[1:] += 1; "
        "x.data[:, None][2] = 1.0"
    )
    x.mul_(2)
    y = torch.zeros(4)
    y.data.mul_(3)
    said = lines_of(y)
    assert said == "y, assigned or changed: y = torch.zeros(4); y.data.mul_(3)"


@needs_positions
def test_what_does_not_change_a_tensor() -> None:
    kept: dict[str, torch.Tensor] = {}
    x = torch.zeros(4)
    x.requires_grad_()
    x.sum().backward()
    x.grad[0] = 1.0  # type: ignore[index]  # backward() has set it
    kept["x"] = x + 1
    x.clone().mul_(2)
    print(x, end="")
    said = lines_of(x)
    assert said == "x, assigned: x = torch.zeros(4)"


@needs_positions
def test_a_list_that_grows() -> None:
    parts: list[torch.Tensor] = []
    for k in range(2):
        parts.append(torch.ones(k + 1 if k else 1))
    said = lines_of(parts[1])
    assert said == (
        "parts[1]; parts is assigned or changed: "
        "parts: list[torch.Tensor] = []; parts.append(torch.ones(k + 1 if k else 1))"
    )


@needs_positions
def test_an_element_of_another_key_is_another() -> None:
    parts: dict[str, torch.Tensor] = {}
    for key in ("a", "b"):
        parts[key] = torch.ones(2)
    parts["c"] = torch.zeros(2)
    said = lines_of(parts["a"]), lines_of(parts["c"])
    assert said == (
        "parts['a']; parts is assigned: "
        "parts: dict[str, torch.Tensor] = {}; parts[key] = torch.ones(2)",
        """parts['c'], assigned: parts["c"] = torch.zeros(2)""",
    )


@needs_positions
def test_of_many_changes_the_assignment_is_named() -> None:
    parts = [torch.zeros(1)]
    parts.append(torch.ones(1))
    parts.append(torch.ones(2))
    parts.append(torch.ones(3))
    parts.append(torch.ones(4))
    parts.append(torch.ones(5))
    said = lines_of(parts[2])
    assert said == "parts[2]; parts is assigned: parts = [torch.zeros(1)]"


def test_what_a_function_within_it_assigns_may_have_run() -> None:
    x, said = torch.zeros(2), []

    def step() -> None:
        nonlocal x
        said.append(lines_of(x))
        x = x + 1

    step()
    step()
    assert said == ["x, assigned: x, said = torch.zeros(2), []; x = x + 1"] * 2


def test_what_a_function_assigned_the_last_time_that_it_ran() -> None:
    step, said = _made()
    step()
    step()
    assert said[1] == "x, assigned: x = x + 1"


def _made() -> tuple[Callable[[], None], list[str]]:
    x, said = torch.zeros(2), []

    def step() -> None:
        nonlocal x
        said.append(lines_of(x))
        x = x + 1

    return step, said


def test_a_statement_of_several_lines_and_one_with_a_condition() -> None:
    is_on = torch.zeros(1)
    if len(is_on):
        x = torch.zeros(
            2  # of them
        ) + (1 if is_on.sum() else 2)  # whole
    said = lines_of(x)
    assert said == "x, assigned: x = torch.zeros( 2 ) + (1 if is_on.sum() else 2) # whole"


@needs_positions
def test_the_call_that_has_an_argument() -> None:
    def called(x: torch.Tensor) -> None:
        said.append(str(find_variable(lambda one: one is x)))

    said: list[str] = []
    called(
        torch.zeros(2) + 1,
    )
    assert said[0].startswith(f"x, an argument of called, which runs from {__file__}:")
    assert said[0].endswith(": called( torch.zeros(2) + 1, )")
