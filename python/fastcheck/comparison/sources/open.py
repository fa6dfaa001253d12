"""Opens anything that compare() takes as one side."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, Optional

import torch

from fastcheck.comparison.block import Kind, Phase, Source
from fastcheck.errors import CompareError
from fastcheck.utils.reading import read_json, why_missing
from fastcheck.utils.text.numbers import counted

from .checkpoint import CheckpointSource, MemorySource, RanksSource, rank_files
from .dump import DumpSource, is_dump
from .files import flatten_checkpoint
from .formats import format_of
from .log import LogSource, is_log
from .msprobe import MsprobeSource, is_msprobe

_KINDS = {kind.value: kind for kind in (Kind.ENVIRONMENT, Kind.INVENTORY)}
# No result of these is as long; a JSON of another kind may be, and is not read whole.
_MAX_BYTES = 256 * 1024 * 1024


def settings_kind(value: object) -> Optional[Kind]:
    """The kind that a dictionary's "fastcheck" entry names."""
    kind = value.get("fastcheck") if isinstance(value, Mapping) else None
    return _KINDS.get(kind) if isinstance(kind, str) else None


def read_settings(path: str) -> Optional[dict[str, Any]]:
    """The dictionary in a JSON file that environment() or inventory() made; None when it is
    anything else.
    """
    try:
        settings = read_json(path, _MAX_BYTES)
    except (OSError, ValueError):
        return None
    return settings if settings_kind(settings) is not None else None


class SettingsSource(Source):
    """A result of environment() or inventory(): it has no tensors."""

    def __init__(self, title: str, value: Mapping[str, Any]) -> None:
        kind = settings_kind(value)
        assert kind is not None
        if value.get("format", 1) != 1:
            raise CompareError(
                f"this {kind.value} is of another format",
                expected="format 1",
                got=f"{title}, format {value['format']}",
                hint="if a newer fastcheck wrote it, read it with that one",
            )
        self.title = title
        self.kind = kind
        self.notes: list[str] = []
        # The same form as the other side's, whichever of them went through a file.
        plain = json.loads(json.dumps(dict(value), default=str))
        phase = Phase.ENVIRONMENT if kind is Kind.ENVIRONMENT else Phase.HYPERPARAMETERS
        self.settings: dict[Phase, Any] = {phase: plain}


_TAKEN = (
    "a record log, a dump, a checkpoint (torch, safetensors, NumPy, or a directory of them), an "
    "msprobe dump, or the JSON of environment() or inventory()"
)


def open_source(value: Any, side: str, trust: bool) -> Source:
    """``value``: a path, or in memory a tensor, a state_dict, or what environment() and inventory()
    return; a list of checkpoints has one of each rank. ``side``: how messages call it. CompareError
    when it is none of these.
    """
    if isinstance(value, (str, os.PathLike)):
        return _open_path(os.fspath(value), side, trust)
    if settings_kind(value) is not None:
        return SettingsSource(f"{value['fastcheck']}()", value)
    if isinstance(value, (list, tuple)) and value:
        ranks = [open_source(item, side, trust) for item in value]
        checkpoints = [source for source in ranks if isinstance(source, MemorySource)]
        if len(checkpoints) == len(ranks):
            return RanksSource(f"{len(ranks)} ranks: {ranks[0].title}, ...", checkpoints)
    if isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
        value = value.state_dict()
    if isinstance(value, torch.Tensor):
        tensor = value
        return MemorySource("a tensor", {"tensor": lambda: tensor})
    if isinstance(value, Mapping):
        tensors, values = flatten_checkpoint(value)
        if tensors:
            return MemorySource(f"{counted(len(tensors), 'tensor')} in memory", tensors, values)
    raise CompareError(
        f"the {side} side cannot be compared",
        expected=f"a path ({_TAKEN}), or the same in memory",
        got=f"{type(value).__name__}: {str(value)[:80]}",
        hint="give torch.as_tensor(x) for numbers or an array; {'name': tensor} for several",
    )


def _open_path(path: str, side: str, trust: bool) -> Source:
    if not os.path.exists(path):
        raise CompareError(
            f"the {side} side is not there",
            expected=_TAKEN,
            got=f"{path}: no such path",
            hint=why_missing(path),
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
        if ranks := rank_files(path):
            return RanksSource(path, [CheckpointSource(file, trust) for file in ranks])
        source = CheckpointSource(path, trust)
        if source.tensors:
            return source
    else:
        try:
            is_checkpoint = format_of(path) is not None
        except OSError as error:
            raise CompareError(
                f"the {side} side can't be read",
                expected=_TAKEN,
                got=f"{path}: {error.strerror or error}",
            ) from error
        if is_checkpoint:
            return CheckpointSource(path, trust)
    raise CompareError(
        f"the {side} side cannot be compared",
        expected=_TAKEN,
        got=path + (", a directory with none of these" if os.path.isdir(path) else ""),
    )
