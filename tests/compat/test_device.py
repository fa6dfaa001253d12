"""compat.ptdbg on an accelerator gives calls the same names as on the CPU."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from fakes import fake_device
from fastcheck.compat import ptdbg
from fastcheck.compat._overflows import OverflowWatch, _usable_level
from support.programs.compat import overflows_of

pytestmark = [pytest.mark.fake_accelerator, pytest.mark.usefixtures("op_observer")]
fake: Any = fake_device.load()
NAME = fake.name()


class Net(nn.Module):
    """Zero throughout, but the gradient of what ``middle`` read, which float32 can't hold."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.middle = nn.Linear(4, 4)
        self.last = nn.Linear(4, 1)
        for layer, weight in ((self.first, 1.0), (self.middle, 3e38), (self.last, 2.0)):
            nn.init.constant_(layer.weight, weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def overflowing(device: str, dump_path: Path) -> dict[str, Any]:
    """The one line of the record file of a run that ends at its first overflow."""
    model = Net().to(device)
    watch = OverflowWatch([model], dump_path=str(dump_path), overflow_nums=1)
    with pytest.raises(fastcheck.OverflowDetected):  # on the CPU an operator can't raise it
        model(torch.zeros(2, 4).to(device)).sum().backward()
        watch.close()
    watch.close()
    (line,) = overflows_of(dump_path)
    return line


def test_a_call_has_the_name_that_it_has_on_the_cpu(tmp_path: Path) -> None:
    there, here = (overflowing(device, tmp_path / device) for device in (NAME, "cpu"))
    assert there["name"] == "Functional.linear.1.backward"
    assert {**there, "line": None} == {**here, "line": None}


def test_register_hook_takes_a_model_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    session = ptdbg._Session()
    monkeypatch.setattr(ptdbg, "_session", session)
    model = Net().to(NAME)
    ptdbg.set_dump_path(str(tmp_path / "dump"))
    ptdbg.register_hook(model, ptdbg.overflow_check, overflow_nums=-1)
    model(torch.zeros(2, 4).to(NAME)).sum().backward()
    names = [line["name"] for line in overflows_of(tmp_path / "dump")]
    assert names[0] == "Functional_linear_1_backward"
    session.release()
    assert session.watch is not None
    session.watch.close()
    watch = weakref.ref(session.watch)
    session.watch = None
    gc.collect()
    assert watch() is None  # nor does anything else keep the model that it observed


def test_a_model_on_the_device_is_watched_by_operator() -> None:
    assert _usable_level([Net().to(NAME)]) == ("op", "call")
