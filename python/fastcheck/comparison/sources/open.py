"""Opens anything that compare() takes as one side.

Each file reads one kind and gives it the form of ``..block``; they are independent of each other's
kinds, nor of what is done with them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from fastcheck.comparison.block import Source
from fastcheck.errors import CompareError, did_you_mean, explain

from .checkpoint import CheckpointSource, MemorySource
from .dump import DumpSource, is_dump
from .files import flatten_checkpoint
from .formats import format_of
from .log import LogSource, is_log
from .msprobe import MsprobeSource, is_msprobe
from .settings import SettingsSource, read_settings, settings_kind

__all__ = ["open_source"]

_TAKEN = (
    "a record log, a dump, a checkpoint (torch, safetensors, NumPy, or a directory of them), an "
    "msprobe dump, or the JSON of environment() or inventory()"
)


def open_source(value: Any, side: str, trust: bool = False) -> Source:
    """``value``: a path, or in memory a tensor, a state_dict, or what environment() and inventory()
    return. ``side``: how messages call it. CompareError when it is none of these.
    """
    if isinstance(value, (str, os.PathLike)):
        return _open_path(os.fspath(value), side, trust)
    if settings_kind(value) is not None:
        return SettingsSource(f"{value['fastcheck']}()", value)
    if isinstance(value, torch.nn.Module):
        value = value.state_dict()
    if isinstance(value, torch.Tensor):
        tensor = value
        return MemorySource("a tensor", {"tensor": lambda: tensor})
    if isinstance(value, Mapping):
        tensors, values = flatten_checkpoint(value)
        if tensors:
            return MemorySource(f"{len(tensors)} tensors in memory", tensors, values)
    raise CompareError(
        explain(
            f"the {side} side cannot be compared",
            expected=f"a path ({_TAKEN}), or the same in memory",
            got=f"{type(value).__name__}: {str(value)[:80]}",
        )
    )


def _near(path: str) -> str:
    folder, name = os.path.split(os.path.abspath(path))
    try:
        near = did_you_mean(name, sorted(os.listdir(folder)))
    except OSError:
        return f"{folder} is not there either, or can't be read"
    return f"{folder} has no {name}" + (f": {near}" if near else "")


def _open_path(path: str, side: str, trust: bool) -> Source:
    if not os.path.exists(path):
        raise CompareError(
            explain(
                f"the {side} side is not there",
                expected=_TAKEN,
                got=f"{path}: no such path",
                hint=_near(path),
            )
        )
    if is_dump(path):  # before the log: each of its steps has one
        return DumpSource(path, side)
    if is_log(path):
        return LogSource(path, side)
    if is_msprobe(path):
        return MsprobeSource(path, trust)
    if path.endswith(".json"):
        settings = read_settings(path)
        if settings is not None:
            return SettingsSource(path, settings)
    elif os.path.isdir(path):
        source = CheckpointSource(path, trust)
        if source.has_tensors:
            return source
    else:
        try:
            is_checkpoint = format_of(path) is not None
        except OSError as error:
            raise CompareError(
                explain(
                    f"the {side} side can't be read",
                    expected=_TAKEN,
                    got=f"{path}: {error.strerror or error}",
                )
            ) from error
        if is_checkpoint:
            return CheckpointSource(path, trust)
    raise CompareError(
        explain(
            f"the {side} side cannot be compared",
            expected=_TAKEN,
            got=path + (", a directory with none of these" if os.path.isdir(path) else ""),
        )
    )
