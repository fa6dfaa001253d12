"""Names of modules that hold what steers a terminal, or ends a line of Python."""

from __future__ import annotations

import ast
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

import fastcheck
from support.programs.stops_with_dumps import FOLDER, roots, watch
from support.programs.training import stopped


class Roots(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return roots(x)


pytestmark = pytest.mark.usefixtures("op_observer")

NAMES = ["\x1b[31mred", "a\u202eb", "a\nimport os", 'a"""\nb', "a\\", "@RANDOM", "\r"]


@pytest.mark.parametrize("name", NAMES)
def test_a_stop_says_and_replays_them(name: str) -> None:
    model = nn.Sequential(OrderedDict([("first", nn.Linear(2, 2)), (name, Roots())]))

    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()

    with watch(model) as monitor:
        stop = stopped(step)
        summary = monitor.summary()
    for text in (str(stop), summary):
        assert all(one.isprintable() or one == "\n" for one in text)
    (script,) = Path(FOLDER).rglob("replay.py")
    ast.parse(script.read_text())


@pytest.mark.parametrize("name", NAMES)
def test_at_module_level(name: str) -> None:
    model = nn.Sequential(OrderedDict([("first", nn.Linear(2, 2)), (name, Roots())]))
    with fastcheck.install(model, overflow_nums=1):
        stop = stopped(lambda: model(torch.ones(1, 2)))
    assert all(one.isprintable() or one == "\n" for one in str(stop))
