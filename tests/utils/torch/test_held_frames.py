"""Local variables that the extension holds, and frames as they were."""

from __future__ import annotations

import gc
import linecache
import weakref
from typing import Any

import pytest
import torch

from fastcheck.extension import status
from fastcheck.utils.torch.held_frames import HeldFrame, held_frames

MODULE: Any = status.module
pytestmark = pytest.mark.skipif(MODULE is None, reason="the extension holds them")

SCRIPT = """
mask = torch.ones(3)
step = 1
held = hold()
"""


def hold(room: int = 1 << 20) -> Any:
    return MODULE.HeldLocals(4, room)


def names(frame: HeldFrame) -> set[tuple[str, Any]]:
    return {(held.name, held.key) for held in frame.tensors}


def test_the_tensors_of_a_function() -> None:
    def function(weight: torch.Tensor) -> Any:
        parameter, number, whole = torch.nn.Parameter(weight), 1.0, torch.ones(2, dtype=torch.int64)
        made = parameter * number
        batch = {"x": weight, 2: weight, (3,): weight, "whole": whole}
        pair = (whole, weight)
        sparse = weight.to_sparse()
        many = [weight] * 33
        assert sparse.is_sparse and len(many) == 33
        return hold(), made, batch, pair, lambda: enclosed

    enclosed = torch.zeros(1)
    held = function(torch.ones(4))[0]
    own = next(f for f in held_frames(held.frames()) if f.f_code.co_name == "function")
    expected = {("weight", None), ("made", None), ("batch", "x"), ("batch", 2), ("pair", 1)}
    assert names(own) == expected | {("enclosed", None)}
    made = next(one for one in own.tensors if one.name == "made")
    assert made.node == "MulBackward0" and made.order >= 0 and made.tensor.grad_fn is None
    assert own.f_back is not None and own.f_back.f_code.co_name == "test_the_tensors_of_a_function"
    assert "return hold()" in linecache.getline(__file__, own.f_lineno)


def test_the_smaller_within_the_room() -> None:
    large, small, part = torch.ones(1000), torch.ones(10), torch.ones(1000)[:5]
    held = hold(room=100)
    assert held.nbytes == 40 and len(part) == 5 and len(large) == 1000 and len(small) == 10
    assert {one.name for frame in held_frames(held.frames()) for one in frame.tensors} == {"small"}


def test_what_was_written_since_is_told() -> None:
    written, kept = torch.ones(2), torch.ones(2)
    held = hold()
    written.add_(1)
    own = held_frames(held.frames())[1]
    assert set(own.f_locals) == {"kept"} and bool((kept == own.f_locals["kept"]).all())


def test_a_script() -> None:
    names_of: dict[str, Any] = {"torch": torch, "hold": hold, "__name__": "script"}
    exec(compile(SCRIPT, "script.py", "exec"), names_of)
    own = held_frames(names_of["held"].frames())[1]
    assert names(own) == {("mask", None)} and own.f_lineno == 4


def test_nothing_else_lives_longer() -> None:
    class Batch:
        pass

    def step() -> tuple[Any, ...]:
        batch, of_node = Batch(), Batch()
        graph = torch.ones(2, requires_grad=True).exp()
        graph.grad_fn.register_hook(lambda *_, of_node=of_node: None)
        held = hold()
        refs = weakref.ref(batch), weakref.ref(of_node)
        del batch
        assert refs[0]() is None  # the frame keeps no copy of its variables
        return held, *refs

    held, batch, of_node = step()
    gc.collect()
    assert batch() is None and of_node() is None and held.nbytes > 0
