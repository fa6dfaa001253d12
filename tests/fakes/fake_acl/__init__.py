"""torch_npu's own wheel over an ACL runtime of our own: `load()` puts it in CANN's place.

README.md beside this file says what it does and what not. For an environment in which torch_npu is
installed (`make test-npu-lab` makes one); TORCH_DEVICE_BACKEND_AUTOLOAD=0 has to be set, or torch
looks for the device before this can be there.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from typing import Any

import torch  # its libraries come first: the runtime computes with them

__all__ = ["counters", "hold", "library", "load", "release", "set_overflow"]


@functools.cache
def library() -> ctypes.CDLL:
    """The runtime, in this process for good."""
    from .build import LIBRARY, NAMES, build

    folder = build()
    made = ctypes.CDLL(str(folder / LIBRARY), ctypes.RTLD_GLOBAL)
    for name in NAMES:
        ctypes.CDLL(str(folder / name), ctypes.RTLD_GLOBAL)
    return made


def load() -> Any:
    """torch.npu, on two devices of the chip that the environment's FAKE_ACL_SOC names."""
    library()
    importlib.import_module("torch_npu")
    return torch.npu  # type: ignore[attr-defined]  # torch_npu adds it


def counters() -> dict[str, int]:
    """What the runtime was asked to do, by the names of the fake accelerator's counters; the sum of
    those that make the host wait as "synchronisations".
    """
    found, waits = {}, 0
    name, value = ctypes.create_string_buffer(64), ctypes.c_int64()
    index = 0
    while kind := library().fake_acl_counter(index, name, 64, ctypes.byref(value)):
        found[name.value.decode()] = value.value
        waits += value.value if kind == 2 else 0
        index += 1
    found["synchronisations"] = waits
    return found


def hold(device: int = 0) -> None:
    """Nothing of the device's streams runs from now on."""
    library().fake_acl_hold(device)


def release(device: int = 0) -> None:
    library().fake_acl_release(device)


def set_overflow(device: int = 0) -> None:
    """As an operator does whose result did not fit; at once."""
    library().fake_acl_set_overflow(device)
