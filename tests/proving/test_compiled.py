"""torch.compile against eager: within the noise, or with the layer that differs."""

from __future__ import annotations

import gc
import shutil
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.proving.models import TorchCompile
from fastcheck.proving.result import Outcome

# torch.compile reads gradients of tensors that are no leaves, and uses deprecated parts of torch.
pytestmark = pytest.mark.filterwarnings("ignore")
WIDTH = 16


class Fast(nn.Module):
    """Takes another way within torch.compile."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.linear, self.drop, self.factor = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.drop(self.linear(x)).tanh()
        return y * self.factor if torch.compiler.is_compiling() else y


def compiled(backend: Any, *factors: float, first: Any = None) -> tuple[nn.Module, Outcome]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(Fast(factor) for factor in factors))
    used: Any = model if first is None else torch.compile(model, backend=first)
    used(torch.randn(4, WIDTH)).mean().backward()  # the graph is there before
    one, permuted = fastcheck.prove(
        lambda x: used(x).square().mean(),
        torch.randn(4, WIDTH),
        model=used,
        relations=[TorchCompile(backend) if callable(backend) else backend, "permuted"],
    ).outcomes
    assert permuted.state == "holds"  # dropout is left out within a graph too
    return model, one


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_a_compiled_model_agrees_within_the_noise() -> None:
    model, one = compiled("compiled", 1.0, 1.0)
    assert (one.state, one.note) == ("holds", "1 graph") and 0 < (one.score or 0) < 5
    assert "forward" not in vars(model)


@pytest.mark.parametrize("first", [None, "aot_eager"])
def test_a_layer_that_differs_within_torch_compile_is_named(first: Any) -> None:
    _, one = compiled("traced", 1.0, 1.001, first=first)
    assert one.state == "differs" and one.first is not None
    assert one.first.module.removeprefix("_orig_mod.") == "1" and one.first.kind == "forward"


def test_no_graph_stays_when_it_is_over() -> None:
    model, one = compiled("traced", 1.0)
    assert (one.state, one.note) == ("holds", "1 graph")
    cached = torch._dynamo.eval_frame._debug_get_cache_entry_list
    assert not cached(type(model).forward.__code__)
    kept = weakref.ref(model)
    del model
    gc.collect()
    assert kept() is None


def test_what_torch_compile_cannot_do_is_the_reason() -> None:
    def refuses(graph: Any, inputs: Any) -> Any:
        raise ValueError("no such operator")

    _, one = compiled(refuses, 1.0)
    assert one.state == "not asked"
    assert one.note == "torch.compile: ValueError: no such operator"

    class Eager(nn.Linear):
        forward = torch.compiler.disable(nn.Linear.forward)

    model = Eager(4, 4)
    proof = fastcheck.prove(
        lambda x: model(x).sum(), torch.ones(2, 4), model=model, relations="traced"
    )
    assert proof.outcomes[0].note == "torch.compile makes no graph of the model"
