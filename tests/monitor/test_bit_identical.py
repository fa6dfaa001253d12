"""Training is bit for bit the same with and without fastcheck: losses, weights, buffers, and the
random state.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any, Callable, ClassVar, cast

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import fastcheck
from support.programs.training import Net, batches

STEPS = 50


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 8), Net(dropout=0.3), nn.Linear(4, 4)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(checkpoint(self.inner, self.first(x), use_reentrant=self.reentrant))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(8, 16),
            nn.BatchNorm1d(16),
            nn.ReLU(inplace=True),
            nn.Dropout(0.2),
            nn.Linear(16, 4),
        )

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"logits": self.body(x), "kept": (x, None)}


def tensor_of(output: Any) -> torch.Tensor:
    return output["logits"] if isinstance(output, dict) else output


def plain(model: nn.Module) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for x in batches(STEPS):
        optimizer.zero_grad()
        loss = tensor_of(model(x)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return losses


def accumulating(model: nn.Module) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for number, x in enumerate(batches(STEPS)):
        loss = tensor_of(model(x)).square().mean() / 4
        loss.backward()
        losses.append(loss.detach())
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def scaled(model: nn.Module) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=4)
    losses = []
    for x in batches(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = tensor_of(model(x)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    return losses


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: Net(dropout=0.3),
    "batch norm, in place, dict": Normed,
    "checkpoint": lambda: Checkpointed(False),
    "checkpoint reentrant": lambda: Checkpointed(True),
    "transformer": lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
}


@pytest.mark.parametrize("loop", [plain, accumulating, scaled])
@pytest.mark.parametrize("name", MODELS)
def test_training_is_bit_identical(
    name: str, loop: Callable[[nn.Module], list[torch.Tensor]]
) -> None:
    torch.manual_seed(1)
    bare = MODELS[name]()
    observed = copy.deepcopy(bare)
    results = []
    for model, options in ((bare, None), (observed, {"overflow_nums": -1})):
        torch.manual_seed(2)
        monitor = None if options is None else fastcheck.install(model, **options)
        losses = loop(model)
        results.append((losses, list(model.state_dict().values()), torch.get_rng_state()))
    assert monitor is not None
    assert len(monitor.records()) > STEPS
    for without, with_it in zip(results[0][0] + results[0][1], results[1][0] + results[1][1]):
        assert torch.equal(without, with_it)
    assert torch.equal(results[0][2], results[1][2])


def test_the_graph_is_the_same() -> None:
    """No node is added, and no output becomes another object."""

    def names(node: Any, found: list[str]) -> list[str]:
        if node is not None:
            found.append(node.name())
            for following, _ in node.next_functions:
                names(following, found)
        return found

    model = Net()
    x = torch.ones(2, 8)
    bare = names(model(x).grad_fn, [])
    fastcheck.install(model)
    assert names(model(x).grad_fn, []) == bare


@pytest.mark.parametrize("level", ["module", "op"])
@pytest.mark.parametrize("by_mode", [True, False], ids=["mode", "subclass"])
def test_what_a_program_watches_of_torch_is_the_same(by_mode: bool, level: str) -> None:
    calls: list[list[str]] = []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # as torch calls it
            calls[-1].append(str(function))
            return super().__torch_function__(function, types, args, kwargs or {})

    class Watching(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # as torch calls it
            calls[-1].append(str(function))
            return function(*args, **(kwargs or {}))

    for options in (None, {"level": level, "overflow_nums": -1}):
        model = Net()
        monitor = fastcheck.install(model, **options) if options else None
        calls.append([])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in batches(3):
            with Watching() if by_mode else contextlib.nullcontext():
                optimizer.zero_grad()
                model(x if by_mode else x.as_subclass(Watched)).square().mean().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
    assert monitor is not None
    assert len(monitor.records()) > 3 * 8
    monitor.remove()
    assert calls[0] == calls[1]


class _Wrapper(torch.Tensor):
    """Calls the operators for what it wraps, and counts them."""

    calls: ClassVar[list[list[str]]] = []
    inside: torch.Tensor

    @staticmethod
    def __new__(cls, inside: torch.Tensor) -> _Wrapper:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, inside.shape)
        made.inside = inside
        return cast(_Wrapper, made)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls[-1].append(str(func))
        given = tree_map_only(cls, lambda tensor: tensor.inside, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, func(*given[0], **given[1]))


@pytest.mark.parametrize("options", [{}, {"level": "op"}, {"stats_every": 2}])
@pytest.mark.parametrize("by_mode", [True, False], ids=["mode", "subclass"])
def test_the_operators_that_a_program_watches_are_the_same(
    by_mode: bool, options: dict[str, Any]
) -> None:
    class Watching(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            _Wrapper.calls[-1].append(str(func))
            return func(*args, **(kwargs or {}))

    _Wrapper.calls.clear()
    for is_observed in (False, True):
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
        monitor = fastcheck.install(model, overflow_nums=-1, **options) if is_observed else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        scaler = torch.amp.GradScaler("cpu", enabled=by_mode)
        targets = torch.tensor([0, 1])
        _Wrapper.calls.append([])
        for _ in range(4):
            x = torch.randn(2, 4)
            with Watching() if by_mode else contextlib.nullcontext():
                logits = model(x if by_mode else _Wrapper(x)).exp()
                optimizer.zero_grad()
                scaler.scale(nn.functional.cross_entropy(logits, targets)).backward()
                scaler.step(optimizer)
                scaler.update()
    assert monitor is not None
    monitor.remove()
    assert _Wrapper.calls[0] == _Wrapper.calls[1] != []
