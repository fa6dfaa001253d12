"""The local variable, or the element of one, that holds what an operator has made."""

from __future__ import annotations

from typing import Any

import torch

from support.programs.losses import maker_of


def test_the_element_of_a_dictionary_that_holds_the_result() -> None:
    def loss(y: torch.Tensor) -> torch.Tensor:
        parts = {"box": y.square().mean(), "mask": (y * 0).log().sum(), "class": y.mean()}
        total = sum(parts.values(), y.sum())
        total.backward()
        return total

    variable = maker_of(loss).variable
    assert variable.startswith("the result is used in parts['mask']; parts is assigned at ")


class Private(dict[object, torch.Tensor]):
    def items(self) -> Any:
        raise RuntimeError("no elements")

    def __len__(self) -> int:
        raise RuntimeError("no elements")


class Key:
    def __repr__(self) -> str:
        raise RuntimeError("no name")


def test_elements_are_found_without_running_code_of_the_program() -> None:
    def loss(y: torch.Tensor) -> torch.Tensor:
        by_tensor = {y: (y * 0).log().sum(), Key(): y.mean(), "x" * 9999: y.mean()}
        parts = Private({Key(): y.mean()}, mask=by_tensor[y] + y.mean())
        total = parts["mask"] + y.sum()
        total.backward()
        return total

    variable = maker_of(loss).variable
    assert variable.startswith("the result is used in parts['mask']; parts is assigned at ")


class Proxy:
    @property  # type: ignore[misc]  # as a proxy has it
    def __class__(self) -> type:
        raise RuntimeError("working outside of a context")


def test_a_local_variable_that_stands_for_something_else() -> None:
    def loss(y: torch.Tensor) -> torch.Tensor:
        other, others = Proxy(), [Proxy()]
        bad = (y * 0).log().sum()
        bad.backward()
        return bad if others and other is not None else y

    assert "bad, assigned at " in maker_of(loss).variable


def test_an_element_that_was_put_into_a_list_later() -> None:
    def loss(y: torch.Tensor) -> torch.Tensor:
        goals: list[torch.Tensor] = []
        goals.append(torch.zeros(y.shape))
        goals.append(torch.zeros(y.shape).log())
        result = (y * goals[1]).sum()
        result.backward()
        return result

    made = maker_of(loss)
    assert made.variable.startswith("goals[1]; goals is assigned or changed at ")
    assert "was assigned from" not in made.how


def test_what_an_element_of_its_own_assignment_was_assigned_from() -> None:
    def loss(y: torch.Tensor) -> torch.Tensor:
        count = torch.zeros(())
        state = {"old": torch.ones(()) / count, "weight": torch.ones(())}
        weight = y.detach().mean() / count
        state["weight"] = 0.9 * state["weight"] + 0.1 * weight
        result = (y * state["weight"]).sum()
        result.backward()
        return result

    made = maker_of(loss)
    assert "state['weight'] was assigned from weight, which is not finite either" in made.how
    assert made.variable.startswith("weight, assigned at ")
