"""A small accelerator for the tests.

`fake = load()` registers it as torch's PrivateUse1 device and returns torch.fake. Call it before
the first backward pass of the process (at the top of a test module): autograd counts the devices
then, once. README.md beside this file says what the device guarantees.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Optional

import torch
from torch.utils import backend_registration

_PACKAGE = __name__
_loaded: Optional[tuple[str, ModuleType]] = None


def library() -> Path:
    """The compiled device, for ctypes: the C interface at the end of csrc/runtime.h."""
    from .build import build

    return build()


def load(name: Optional[str] = None) -> ModuleType:
    """Builds the device if need be, registers it, and returns its module, also torch.<name>.

    `name`: what torch calls the device type: "fake", or "npu" or "mlu" to stand in for one of
    those. Default: the environment's FAKE_DEVICE_NAME, else "fake". RuntimeError for a second
    name in one process: torch allows one.
    """
    global _loaded
    wanted = name or (_loaded[0] if _loaded else os.environ.get("FAKE_DEVICE_NAME", "fake"))
    if _loaded is not None:
        if _loaded[0] != wanted:
            raise RuntimeError(
                f"the fake device is already {_loaded[0]!r} in this process, it can't also be "
                f"{wanted!r}: use a process of its own"
            )
        return _loaded[1]
    from .build import NAME, build

    spec = importlib.util.spec_from_file_location(NAME, build())
    assert spec is not None and spec.loader is not None
    native = importlib.util.module_from_spec(spec)
    sys.modules[f"{_PACKAGE}.{NAME}"] = native
    spec.loader.exec_module(native)
    backend_registration.rename_privateuse1_backend(wanted)
    from . import device_module

    torch._register_device_module(wanted, device_module)  # type: ignore[no-untyped-call]  # torch has it untyped
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
    native.register_graphs()
    atexit.register(native.shutdown)
    _loaded = (wanted, device_module)
    return device_module
