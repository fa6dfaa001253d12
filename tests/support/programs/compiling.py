"""Helpers shared by the tests of torch.compile: compiled models, and what was read of them."""

from __future__ import annotations

from collections import Counter
from typing import Any, Callable

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.types import RECORD_DTYPE
from support.programs.training import Net

# Without it modules in compiled code are not observed, and these tests have no subject.
pytest.importorskip(
    "torch._higher_order_ops.register_hook",
    reason="this torch can't hook a tensor that is made inside a graph",
)
from torch._dynamo.testing import CompileCounterWithBackend

# torch's own, from within Dynamo, Inductor and torch.optim.
marks = [
    pytest.mark.usefixtures("nothing_compiled"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

Wrap = Callable[[nn.Module], nn.Module]

# All fields of a record but when it was made: autograd decides on the order in backward.
FIELDS = [name for name in RECORD_DTYPE.names if name not in ("seq", "site")]


def net(blocks: int = 1) -> Net:
    """Without the dropout: torch.compile copies the tensor where eager dropout(p=0) returns it.
    Each compilation takes time for each block.
    """
    model = Net()
    model.dropout = nn.Identity()
    del model.blocks[blocks:]
    return model


def counter() -> CompileCounterWithBackend:
    return CompileCounterWithBackend("aot_eager")


def compiled(model: nn.Module, backend: Any = "aot_eager", **options: Any) -> nn.Module:
    return torch.compile(model, backend=backend, fullgraph=True, **options)


def one_submodule(model: nn.Module) -> nn.Module:
    model.blocks[1] = compiled(model.blocks[1])
    return model


def contents(monitor: fastcheck.Monitor) -> Counter[tuple[Any, ...]]:
    return Counter(
        (str(monitor.sites[record["site"]]), *(record[name].item() for name in FIELDS))
        for record in monitor.records()
    )


def sites(monitor: fastcheck.Monitor, direction: str = "") -> Counter[str]:
    named = [str(monitor.sites[record["site"]]) for record in monitor.records()]
    return Counter(name for name in named if direction in name)


def observed(
    make: Callable[[], nn.Module], wrap: Wrap, run: Callable[[nn.Module], Any], **options: Any
) -> tuple[Any, fastcheck.Monitor]:
    torch.manual_seed(0)
    model = make()
    monitor = fastcheck.install(model, overflow_nums=-1, **options)
    result = run(wrap(model))
    monitor.remove()
    return result, monitor


def eager(model: nn.Module) -> nn.Module:
    return model
