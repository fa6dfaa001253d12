"""Finds the device that is to be checked."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from fastcheck.errors import ConfigError, did_you_mean, explain

#: What registers a device type that torch alone does not have.
_PLUGINS = {"npu": "torch_npu", "mlu": "torch_mlu"}


def find_device(name: str) -> torch.device:
    """The device of this name, as ``"cuda"`` or ``"npu:1"``, with its index.

    Raises ConfigError where it isn't.
    """
    kind = name.partition(":")[0]
    if kind in _PLUGINS and not hasattr(torch, kind):
        try:
            importlib.import_module(_PLUGINS[kind])
        except Exception as error:  # a missing driver library raises all sorts of things
            raise _no_device(name, f"{_PLUGINS[kind]} can't be imported: {error}") from None
    try:
        device = torch.device(name)
    except RuntimeError:
        raise _no_device(name, "torch has no such device") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if not _is_available(device.type):
        raise _no_device(name, f"torch finds no {device.type} device")
    module: Any = getattr(torch, device.type)
    index = module.current_device() if device.index is None else device.index
    if not 0 <= index < module.device_count():
        raise _no_device(name, f"torch finds {module.device_count()} of them")
    return torch.device(device.type, index)


def _no_device(name: str, got: str) -> ConfigError:
    kinds = (str(torch._C._get_privateuse1_backend_name()), "cuda", "xpu")
    present = ["cpu", *filter(_is_available, kinds)]
    return ConfigError(
        explain(
            f"device {name!r} can't be tested here",
            expected=" or ".join(map(repr, present)),
            got=f"{name!r}: {got}",
            hint=did_you_mean(name, present),
        )
    )


def _is_available(kind: str) -> bool:
    try:
        return bool(getattr(torch, kind).is_available())
    except Exception:  # torch has no such module, or its driver fails
        return False
