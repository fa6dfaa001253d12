"""The arguments of a call: its tensors by label, and everything else as JSON can hold it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

__all__ = ["describe", "plain", "tensors_of"]

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
