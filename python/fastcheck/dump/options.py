"""The options of a Dumper, checked once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import NamedTuple, Optional, Union

import torch

from fastcheck.dump.storage.shards import MEMORY_BYTES
from fastcheck.errors import ConfigError, as_list, check_bool, choice, plain
from fastcheck.record.format import DEPTHS, MAX_STEP, ORDERS, Depth
from fastcheck.utils.text.numbers import parse_bytes

#: The levels of a dump, and what it records at each.
LEVELS = {"op": "operators", "module": "modules", "api": "API calls"}

Models = Union[torch.nn.Module, Iterable[torch.nn.Module], None]


class Options(NamedTuple):
    step: int
    tensors: bool = False
    level: str = "op"
    depth: int = int(Depth.FULL)
    is_logical: bool = False
    has_reference: bool = False
    memory_bytes: int = MEMORY_BYTES
    overwrite: bool = False


def check_options(
    *,
    step: int,
    tensors: bool,
    reference: Optional[str],
    level: str,
    record: str,
    order: str,
    memory: Union[str, int],
    overwrite: bool,
) -> Options:
    """Checks the options. Raises ConfigError for the first that can't be used."""
    step, memory = plain(step), plain(memory)
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= MAX_STEP:
        raise ConfigError(f"step must be an int from 0 to {MAX_STEP}, got {step!r}")
    tensors, overwrite = check_bool("tensors", tensors), check_bool("overwrite", overwrite)
    choice("level", level, tuple(LEVELS))
    choice("record", record, DEPTHS)
    choice("order", order, ORDERS)
    if reference is not None:
        choice("reference", reference, ("cpu",))
    if reference is not None and level != "op":
        raise ConfigError('reference= runs operators again, and is for level="op"')
    if tensors and record != "full":
        raise ConfigError(
            'tensors=True needs record="full": its checksums tell a value that is written already'
        )
    size = None
    with contextlib.suppress(ConfigError):
        size = parse_bytes(memory)
    if size is None:
        raise ConfigError(
            'memory= must be 65536 bytes or more, a number or a text such as "256MiB", got '
            f"{memory!r}"
        )
    return Options(
        step=step,
        tensors=tensors,
        level=level,
        depth=int(DEPTHS[record]),
        is_logical=order == "logical",
        has_reference=reference is not None,
        memory_bytes=size,
        overwrite=overwrite,
    )


def check_models(given: Models) -> list[torch.nn.Module]:
    """``model=`` as a list. Raises ConfigError for anything that is not a module."""
    models = [given] if isinstance(given, torch.nn.Module) else as_list(given)
    models = [] if given is None else models
    for model in models:
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(
                f"model must be a torch.nn.Module, or several, got a {type(model).__name__}"
            )
    return models
