"""install() in a loop: what a monitor has held goes with it, by remove() or with its model."""

from __future__ import annotations

import gc
import itertools
import os
import threading
import weakref
from collections import Counter
from pathlib import Path
from typing import Callable

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.record.format import RECORD_DTYPE
from fastcheck.ring.device import _FIRST_SEGMENTS, SEGMENT_SLOTS
from fastcheck.ring.host import CAPACITY
from support.sampling import IS_WHOLE, sample

ON_FAKE = os.environ.get("FASTCHECK_FAKE_DEVICE") == "1"
pytestmark = [
    pytest.mark.fake_accelerator,
    pytest.mark.usefixtures("op_observer", "fake_accelerator" if ON_FAKE else "one_thread"),
]

CYCLES = (25 if IS_WHOLE else 8) if ON_FAKE else (100 if IS_WHOLE else 30)
RING = (CAPACITY + ON_FAKE * 2 * _FIRST_SEGMENTS * SEGMENT_SLOTS) * RECORD_DTYPE.itemsize


def new_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    if not ON_FAKE:
        return model
    from support.devices.training_on_fake import NAME

    return model.to(NAME)


def train(model: nn.Module) -> None:
    """Two steps, and one that is open."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.ones(4, 8).to(next(model.parameters()).device)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    model(x).square().mean().backward()


def removed(model: nn.Module, level: str) -> None:
    with fastcheck.install(model, level=level):
        train(model)


def dropped(_: nn.Module, level: str) -> None:
    model = new_model()
    fastcheck.install(model, level=level)
    train(model)
    del model
    gc.collect()  # one monitor at a time at op level


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def live() -> Counter[str]:
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "fastcheck-drain":  # it may hold the last monitor a little longer
            thread.join(1)
    gc.collect()
    kinds = (type(one) for one in gc.get_objects())
    return Counter(kind.__name__ for kind in kinds if str(kind.__module__).startswith("fastcheck"))


@pytest.mark.parametrize(
    ("cycle", "level"),
    sample(itertools.product((removed, dropped), ("module", "op")), 2 if ON_FAKE else 4),
)
def test_nothing_stays(cycle: Callable[[nn.Module, str], None], level: str) -> None:
    """Of the memory that tracemalloc does not see, too: the rings' records, and what C++ holds."""
    gc.freeze()  # each collection would go through all that was imported
    model = new_model()
    for _ in range(CYCLES):
        cycle(model, level)
    before, memory = live(), resident()
    for _ in range(CYCLES):
        cycle(model, level)
    assert {kind: n for kind, n in (live() - before).items() if n >= CYCLES // 2} == {}
    assert resident() - memory < CYCLES // 2 * RING


def test_the_variable_lives_on() -> None:
    """Until the next monitor takes its place, which is all that is left of the first."""
    model, before = new_model(), live()
    for _ in range(3):
        monitor = fastcheck.install(model)
        train(model)
        monitor.remove()
    assert monitor.step_index == 2 and live()["Monitor"] - before["Monitor"] == 1


@pytest.mark.parametrize("level", ["module", "op"])
def test_a_step_that_is_over_goes_without_the_garbage_collector(level: str) -> None:
    model = new_model()
    gc.disable()
    try:
        with fastcheck.install(model, level=level) as monitor:
            train(model)
            step = weakref.ref(monitor._core.session.step)
            train(model)
            assert monitor.step_index == 4
        assert step() is None
    finally:
        gc.enable()
