"""Descriptors that the program closed, as ``os.closerange`` does before it starts a daemon: their
numbers are those of its own files then, which are neither written nor closed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

import fastcheck
from fastcheck.log.reader import read_log

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no /proc")


@contextmanager
def taken(folder: Path, own: Path) -> Iterator[None]:
    """The program's file ``own`` has the number of each open file below ``folder``, which is
    closed. It stays open, and as it was.
    """
    numbers = []
    for link in Path("/proc/self/fd").iterdir():
        if link.exists() and folder in link.resolve().parents:
            numbers.append(int(link.name))
    assert numbers
    own.write_bytes(b"mine")
    descriptor = os.open(own, os.O_RDWR)
    for number in numbers:
        os.dup2(descriptor, number)
    yield
    assert own.read_bytes() == b"mine"
    for number in numbers:
        assert os.fstat(number).st_ino == own.stat().st_ino
    for number in (*numbers, descriptor):
        os.close(number)


def train(model: torch.nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def test_of_a_log(tmp_path: Path) -> None:
    monitor = fastcheck.install(model := torch.nn.Linear(4, 2), log_dir=tmp_path / "log")
    train(model)
    monitor.flush()
    written = len(read_log(tmp_path / "log").records)
    with taken(tmp_path / "log", tmp_path / "own"):
        with pytest.warns(fastcheck.FastcheckWarning, match="closed by the program"):
            train(model)
            monitor.flush()
        monitor.remove()
    assert len(read_log(tmp_path / "log").records) == written > 0


def test_of_a_dump(tmp_path: Path) -> None:
    model, dumper = torch.nn.Linear(4, 2), fastcheck.Dumper(tmp_path / "dump", tensors=True)
    says = pytest.warns(fastcheck.FastcheckWarning, match="closed by the program")
    with ExitStack() as at_end, says, dumper:
        model(torch.ones(2, 4))
        while not list(tmp_path.rglob("*.safetensors.part")):  # a thread makes it
            time.sleep(0.01)
        at_end.enter_context(taken(tmp_path / "dump", tmp_path / "own"))
        model(torch.ones(2, 4))
