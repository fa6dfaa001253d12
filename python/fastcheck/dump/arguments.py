"""The arguments of a call, and what it returns: its tensors by label, and everything else as JSON
can hold it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Callable

import torch

if TYPE_CHECKING:
    from .op_info import OpInfo

__all__ = ["describe", "inputs_of", "others_of", "outputs_of", "plain", "replaced", "tensors_of"]

_MAX_ITEMS = 64
_MAX_DEPTH = 6
_MAX_TEXT = 200


def tensors_of(value: Any, label: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of an op's argument or result: itself, or those in a list or tuple."""
    if isinstance(value, torch.Tensor):
        yield label, value
    elif isinstance(value, (list, tuple)):
        for position, item in enumerate(value):
            yield from tensors_of(item, f"{label}[{position}]")


def inputs_of(info: OpInfo, args: Any, kwargs: Any) -> list[tuple[int, str, torch.Tensor]]:
    """Of an operator: (place in the schema, label, tensor)."""
    found = []
    for place, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            found.append((place, info.arguments[place], value))
        elif isinstance(value, (list, tuple)):
            for label, tensor in tensors_of(value, info.arguments[place]):
                found.append((place, label, tensor))
    for name, value in kwargs.items():
        for label, tensor in tensors_of(value, name):
            found.append((info.position.get(name, len(args)), label, tensor))
    return found


def outputs_of(info: OpInfo, args: Any, kwargs: Any, result: Any) -> list[torch.Tensor]:
    """What an operator has written in place, and what it has returned beside that."""
    found = []
    if info.written:
        found = [t for place, _, t in inputs_of(info, args, kwargs) if place in info.written]
    written = {id(tensor) for tensor in found}
    found += [tensor for _, tensor in tensors_of(result, "") if id(tensor) not in written]
    return found


def others_of(info: OpInfo, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of an operator that are no tensors."""
    named = [(info.arguments[place], value) for place, value in enumerate(args)]
    named += list(kwargs.items())
    return {
        name: plain(value)
        for name, value in named
        if not isinstance(value, torch.Tensor)
        and not (
            isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value)
        )
    }


def replaced(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """An operator's arguments with ``function`` of each of their tensors in its place."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple):
        return tuple(replaced(item, function) for item in value)
    if isinstance(value, list):
        return [replaced(item, function) for item in value]
    if isinstance(value, dict):
        return {key: replaced(item, function) for key, item in value.items()}
    return value


def describe(tensor: torch.Tensor) -> dict[str, Any]:
    """What the index says of a tensor beside its record."""
    made: dict[str, Any] = {
        "dtype": str(tensor.dtype)[6:],
        "shape": list(tensor.shape),
    }
    if tensor.layout is torch.strided and not tensor.is_contiguous():
        made["stride"] = list(tensor.stride())
    elif tensor.layout is not torch.strided:
        made["layout"] = str(tensor.layout)[6:]
    if not tensor.is_cpu:
        made["device"] = str(tensor.device)
    if tensor.requires_grad:
        made["requires_grad"] = True
    return made


def plain(value: Any, depth: int = 0) -> Any:
    """``value`` without tensors, which are listed by themselves; what is long is cut short."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return value if len(value) <= _MAX_TEXT else value[:_MAX_TEXT] + "..."
    if isinstance(value, torch.Tensor):
        return "a tensor"
    if depth < _MAX_DEPTH and isinstance(value, (list, tuple)):
        items = [plain(item, depth + 1) for item in value[:_MAX_ITEMS]]
        return items if len(value) <= _MAX_ITEMS else [*items, f"... {len(value)} in all"]
    if depth < _MAX_DEPTH and isinstance(value, Mapping):
        return {str(key): plain(item, depth + 1) for key, item in list(value.items())[:_MAX_ITEMS]}
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return str(value).replace("torch.", "")
    if isinstance(value, complex):
        return str(value)
    # Not repr(): a configuration object's may be long, or hold an address, which no two runs share.
    return type(value).__name__
