"""The warnings of test_movement.py on an accelerator: decided by the drain, without waits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fastcheck
from fakes import fake_device
from fastcheck.monitor.weights.updates import _still
from support.programs.stalled import Branches, Frozen, Masked, said
from support.programs.training import Net, batches
from support.warned import warned

pytestmark = pytest.mark.fake_accelerator


fake: Any = fake_device.load()
NAME = fake.name()


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    yield
    fake.synchronize()


def test_a_healthy_run_says_nothing() -> None:
    model = Net().to(NAME)
    rate = torch.tensor(0.0, device=NAME)  # may not be read from the device
    groups = [{"params": model.blocks.parameters()}, {"params": model.head.parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.01)
    optimizer.param_groups[1]["lr"] = rate
    assert said(model, optimizer) == []
    before = fake.counters()
    assert _still(optimizer) == {id(p) for p in model.head.parameters()}
    spent = fake.counters() - before
    assert spent.synchronisations == spent["blocking_copy"] == 0


def test_what_does_not_move() -> None:
    (text,) = said(Branches(torch.detach).to(NAME))
    assert text.startswith("no gradient: side.weight, side.bias")
    model = Net().to(NAME)
    (text,) = said(model, Frozen(model.parameters(), [model.head.weight], lr=0.01))
    assert text.startswith("weights that don't move: head.weight kept")
    model = Net().to(NAME)
    (text,) = said(model, torch.optim.SGD(model.blocks.parameters(), lr=0.01))
    assert "no optimizer that has stepped holds head.weight, head.bias" in text


@pytest.mark.parametrize("is_row", [False, True])
def test_copies_of_a_model_on_the_host(is_row: bool) -> None:
    model = Net().to(NAME)
    held = [p.detach().cpu() for p in model.parameters()]
    held = [torch.cat([p.flatten() for p in held])] if is_row else held
    optimizer = torch.optim.Adam([torch.nn.Parameter(p) for p in held], 1e-3)
    with warned() as texts, fastcheck.install(model):
        for x in batches(12):
            model.zero_grad()
            model(x.to(NAME)).square().mean().backward()
            made = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
            made = [torch.cat([gradient.flatten() for gradient in made])] if is_row else made
            for copied, gradient in zip(optimizer.param_groups[0]["params"], made):
                copied.grad = gradient
            optimizer.step()
    (text,) = texts
    assert "Copies have to be written back to the model after each step()" in text


def test_a_constant_buffer_that_moves() -> None:
    (text,) = said(Masked(first=14).to(NAME))
    assert "changed: mask, after" in text


def test_nothing_waits() -> None:
    model = Net().to(NAME)
    optimizer = torch.optim.SGD(model.blocks.parameters(), lr=0.01)
    data = [x.to(NAME) for x in batches(30)]
    monitor = fastcheck.install(model, overflow_nums=-1, stop=fastcheck.Stop(max_lag=None))
    with pytest.warns(fastcheck.FastcheckWarning, match="no optimizer"):
        for index, x in enumerate(data):
            if index == 2:
                before = fake.counters()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if index == 27:
                spent = fake.counters() - before
        monitor.remove()
    assert spent.synchronisations == 0
    assert spent["blocking_copy"] == 0
