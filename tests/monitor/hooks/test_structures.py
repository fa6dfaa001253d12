"""Tensors in the arguments and outputs of modules, in any structure: their labels and gradients."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.utils.torch.flatten import flatten, flatten_arguments
from support.programs.training import Apply, names

pytestmark = pytest.mark.usefixtures("fresh_start")


Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Result:
    logits: torch.Tensor
    extra: Any = None


class ModelOutput(OrderedDict):
    """As in Hugging Face transformers: a mapping with attributes."""


X = torch.ones(2)


class TestFlatten:
    @pytest.mark.parametrize(
        ("value", "labels"),
        [
            (X, ["output"]),
            ((X, X), ["output[0]", "output[1]"]),
            ([X, (X, None)], ["output[0]", "output[1][0]"]),
            ({"a": X, "not a name": X, 3: X}, ["output.a", "output['not a name']", "output[3]"]),
            (Pair(X, {"b": X}), ["output.left", "output.right.b"]),
            (Result(X, [X]), ["output.logits", "output.extra[0]"]),
            (ModelOutput(logits=X, past=None), ["output.logits"]),
            (None, []),
            ("text", []),
            (Result, []),
            ({X.dtype: X}, ["output[torch.float32]"]),
        ],
    )
    def test_labels(self, value: Any, labels: list[str]) -> None:
        assert [label for label, _ in flatten(value, "output")] == labels

    def test_arguments(self) -> None:
        found = flatten_arguments((X, None, (X,)), {"mask": X, "past": {"k": X}, "flag": True})
        assert [label for label, _ in found] == [
            "input[0]", "input[2][0]", "input.mask", "input.past.k",
        ]  # fmt: skip

    def test_a_structure_that_holds_itself(self) -> None:
        loop: list[Any] = [X]
        loop.append(loop)
        assert 0 < len(flatten(loop, "output")) < 20


class TestStructures:
    @pytest.mark.parametrize("wrap", [
        lambda y: {"logits": y, "cache": [y + 1]},
        lambda y: Result(y, [y + 1]),
        lambda y: ModelOutput(logits=y, hidden=(y + 1,)),
        lambda y: Pair(y, y + 1),
    ], ids=["dict", "dataclass", "model output", "named tuple"])  # fmt: skip
    def test_outputs_and_their_gradients(self, wrap: Any) -> None:
        model = nn.Sequential(nn.Linear(8, 8), Apply(lambda x: wrap(torch.tanh(x))))
        monitor = fastcheck.install(model)
        found = flatten(model(torch.ones(2, 8)), "output")
        sum(tensor.sum() for _, tensor in found).backward()
        for label, _ in found:
            assert f"1 (Apply) · forward · {label}" in names(monitor)
            assert f"1 (Apply) · backward · gradient of {label}" in names(monitor)

    def test_keyword_arguments(self) -> None:
        masked = Apply(lambda x, *, mask: x * mask)
        model = nn.Linear(2, 2)
        monitor = fastcheck.install(model, masked)
        masked(torch.ones(2), mask=torch.zeros(2))
        assert names(monitor)[2:4] == [
            "Apply (Apply) · forward · input[0]",
            "Apply (Apply) · forward · input.mask",
        ]

    def test_a_module_that_returns_nothing(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), Apply(lambda x: None))
        monitor = fastcheck.install(model)
        assert model(torch.ones(2, 8)) is None
        assert names(monitor)[-1] == "0 (Linear) · forward · output"
