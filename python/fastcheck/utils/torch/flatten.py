"""Finds the tensors in nested inputs or outputs of a module, with a label such as ``output[0]``,
and puts others in their place.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Optional

import torch

# Containers can hold themselves; what is nested deeper than this is not looked at.
_MAX_DEPTH = 8


def flatten(value: Any, label: str) -> list[tuple[str, torch.Tensor]]:
    """All tensors in ``value``, in order, as (label, tensor).

    Looks into tuples, lists, named tuples, mappings (Hugging Face's ModelOutput is one) and
    dataclasses, nested; anything else that is not a tensor is skipped. ``label`` names ``value``
    itself: ``output`` gives ``output``, ``output[0]``, ``output.logits``, ``output['a b']``.
    """
    if type(value) is torch.Tensor or isinstance(value, torch.Tensor):
        return [(label, value)]
    tensors: list[tuple[str, torch.Tensor]] = []
    _collect(value, label, tensors, 0)
    return tensors


def flatten_arguments(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[tuple[str, torch.Tensor]]:
    """The tensors among a call's arguments: ``input[0]`` for a positional argument, ``input.mask``
    for a keyword.
    """
    if len(args) == 1 and not kwargs and type(args[0]) is torch.Tensor:  # most modules
        return [("input[0]", args[0])]
    tensors: list[tuple[str, torch.Tensor]] = []
    for position, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            tensors.append((f"input[{position}]", value))
        elif value is not None:
            _collect(value, f"input[{position}]", tensors, 0)
    for name, value in kwargs.items():
        if value is not None:
            _collect(value, f"input.{name}", tensors, 0)
    return tensors


def arguments_labelled(
    tensors: Sequence[tuple[str, torch.Tensor]],
) -> Optional[tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]]:
    """The positional and keyword arguments that flatten_arguments() has made these of; None: some
    came from within others, or after one that is no tensor.
    """
    args: list[torch.Tensor] = []
    kwargs: dict[str, torch.Tensor] = {}
    for label, tensor in tensors:
        name = label.removeprefix("input.")
        if label == f"input[{len(args)}]":
            args.append(tensor)
        elif name != label and name.isidentifier():
            kwargs[name] = tensor
        else:
            return None
    return tuple(args), kwargs


def _collect(value: Any, label: str, tensors: list[tuple[str, torch.Tensor]], depth: int) -> None:
    if isinstance(value, torch.Tensor):
        tensors.append((label, value))
        return
    if depth == _MAX_DEPTH:
        return
    if isinstance(value, (tuple, list)):
        names = getattr(value, "_fields", None)
        for position, item in enumerate(value):
            part = f"{label}.{names[position]}" if names else f"{label}[{position}]"
            _collect(item, part, tensors, depth + 1)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            part = f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]"
            _collect(item, label + part, tensors, depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            item = getattr(value, field.name, None)
            _collect(item, f"{label}.{field.name}", tensors, depth + 1)


def map_tensors(
    value: Any,
    change: Callable[[torch.Tensor], Any],
    other: Callable[[Any], Any] = lambda part: part,
    depth: int = 0,
) -> Any:
    """``value`` with ``change(tensor)`` in place of each tensor that flatten() finds in it, in that
    order, and ``other(part)`` in place of each part that holds none. What holds tensors is copied.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    tensors: list[tuple[str, torch.Tensor]] = []
    _collect(value, "", tensors, depth)
    if not tensors:
        return other(value)

    def inner(part: Any) -> Any:
        return map_tensors(part, change, other, depth + 1)

    if isinstance(value, tuple):
        items = map(inner, value)
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    changed: Any = copy.copy(value)
    if isinstance(value, list):
        changed[:] = map(inner, value)
    elif isinstance(value, Mapping):
        if not isinstance(value, dict):  # the copy shares the dict that has the items
            own = {k: copy.copy(v) for k, v in vars(value).items() if isinstance(v, dict)}
            vars(changed).update(own)
        for name in value:
            changed[name] = inner(value[name])
    else:
        for field in dataclasses.fields(value):  # of a frozen dataclass too
            object.__setattr__(changed, field.name, inner(getattr(value, field.name, None)))
    return changed
