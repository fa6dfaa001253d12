"""A stand-in for torch_npu's overflow interface over the fake accelerator: chips that saturate or
do not, and their status word, in stream order. Values saturate only where a test asks for it: the
fake device computes as the CPU does.
"""

from __future__ import annotations

import os
import sys
import types
from typing import Any, Optional

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fakes import fake_device
from fastcheck.backends import table
from support.programs.training import Apply, batches, poison

fake: Any = fake_device.load("npu")
SATURATED = 65504.0
DEVICES = [torch.device("npu", index) for index in range(fake.device_count())]


class Chip:
    """One kind of chip, as torch_npu's own sources decide its mode. ``name``: the SoC's."""

    def __init__(self, name: str) -> None:
        self.name = name
        # Status words as the hardware has them: one set of numbers per device.
        self.words = [torch.zeros(8, device=device) for device in DEVICES]

    @property
    def is_first_generation(self) -> bool:
        return self.name == "Ascend910A"

    def is_support_inf_nan(self) -> bool:
        if self.name.startswith("Ascend950"):
            return True
        is_off = os.environ.get("INF_NAN_MODE_FORCE_DISABLE") == "1"
        if os.environ.get("INF_NAN_MODE_ENABLE") == "0" and not is_off:
            if not self.is_first_generation:
                raise RuntimeError("INF_NAN_MODE_ENABLE shouldn't be set to 0 on this device")
            return False
        return not (self.is_first_generation or is_off)

    def npu_get_float_status(self, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.dtype is torch.float32 and tensor.shape == (8,)
        assert fake.current_device() == tensor.device.index
        words = self.words[tensor.device.index]
        if self.is_first_generation:
            return tensor.copy_(words)
        return words.to(torch.int32)

    def npu_clear_float_status(self, tensor: torch.Tensor) -> torch.Tensor:
        assert fake.current_device() == tensor.device.index
        self.words[tensor.device.index].zero_()
        return torch.zeros_like(tensor)

    # What the hardware does to values

    def result(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` as this chip would have computed it, differentiable. Waits for nothing."""
        if self.is_support_inf_nan():
            return x
        self.flag(x)
        return torch.nan_to_num(x)

    def flag(self, x: torch.Tensor) -> None:
        """Sets the status word if ``x``, which is not observed, holds an overflow."""
        with torch.no_grad():
            word = self.words[x.device.index][:1]
            word.copy_(((word != 0) | (x.detach() - x.detach()).isnan().any()).to(torch.float32))


class Computing(TorchDispatchMode):
    """Within it, also in its backward, every operator computes as the chip would: no infinity and
    no NaN is left on a device of it, and its status word is set.
    """

    def __init__(self, chip: Chip) -> None:
        super().__init__()
        self.chip = chip
        #: An operator, with its overload, in which something overflows that it doesn't give back.
        self.inside = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.chip.is_support_inf_nan() or func.is_view:
            return out
        for made in out if isinstance(out, (list, tuple)) else (out,):
            is_ours = isinstance(made, torch.Tensor) and made.device.type == "npu"
            if is_ours and made.is_floating_point():
                self.chip.flag(made)
                torch.nan_to_num_(made)
                if str(func) == self.inside:
                    self.chip.words[made.device.index].fill_(1)
        return out


def use_chip(monkeypatch: pytest.MonkeyPatch, name: str, **variables: str) -> Chip:
    """From now on the devices are this chip's, with these environment variables."""
    for variable in ("INF_NAN_MODE_ENABLE", "INF_NAN_MODE_FORCE_DISABLE"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    chip = Chip(name)
    utils = types.SimpleNamespace(is_support_inf_nan=chip.is_support_inf_nan)
    monkeypatch.setattr(torch.npu, "utils", utils, raising=False)
    monkeypatch.setattr(torch.npu, "get_device_name", lambda device=None: chip.name)
    package: Any = types.ModuleType("torch_npu")
    package.npu_get_float_status = chip.npu_get_float_status
    package.npu_clear_float_status = chip.npu_clear_float_status
    monkeypatch.setitem(sys.modules, "torch_npu", package)
    forget_modes()
    return chip


def forget_modes() -> None:
    """The mode of a device is asked once in a process."""
    table._completed.cache_clear()


class Net(nn.Module):
    """Two layers in float16 with a hole between them, into which a test puts an operation."""

    def __init__(self, device: str = "npu:0") -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, device=device, dtype=torch.float16)
        self.hole = Apply()
        self.last = nn.Linear(8, 8, device=device, dtype=torch.float16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.hole(self.first(x)))


def loop(
    model: Net,
    steps: int,
    fault: Optional[int] = None,
    damage: Any = None,
    *,
    device: str = "npu:0",
    optimizer: Optional[torch.optim.Optimizer] = None,
) -> None:
    """Trains without waiting, with ``damage`` in the hole in the step ``fault``."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    for step, x in enumerate(batches(steps)):
        model.hole.function = damage if step == fault else Apply().function
        optimizer.zero_grad()
        x = x.to(torch.float16).pin_memory().to(device, non_blocking=True)
        # The loss is no module's output, and small: what overflows is the hole's business.
        (model(x).float() * 1e-2).square().mean().backward()
        optimizer.step()


def too_large(chip: Chip) -> Any:
    """One element in the largest number's place, as an overflow leaves it."""
    return lambda x: chip.result(poison(x, float("inf")))
