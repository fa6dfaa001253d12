"""Weights that are spread over ranks: what this rank holds of each, and where that lies in the
whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

import torch

from fastcheck.utils.torch.sharding import is_part, local

__all__ = [
    "Entries",
    "Part",
    "held_weights",
    "is_spread",
    "merged",
    "part_of",
    "slice_of",
]

# Of each key what a seal keeps of it.
Entries = dict[str, dict[str, Any]]


class Part(NamedTuple):
    """``data`` is what a rank holds of a tensor of ``numel`` elements: those that begin at
    ``offsets`` and have the shape ``sizes``.
    """

    data: torch.Tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    numel: int


def part_of(tensor: torch.Tensor) -> Optional[Part]:
    """This rank's part of a DTensor; None of any other tensor, and of partial sums. No
    communication.
    """
    chunks = getattr(tensor, "__create_chunk_list__", None)  # as DCP asks for them
    placements: Sequence[Any] = getattr(tensor, "placements", ())
    if chunks is None or any(one.is_partial() for one in placements):
        return None
    (chunk,) = chunks()
    return Part(local(tensor), tuple(chunk.offsets), tuple(chunk.sizes), tensor.numel())


def is_spread(weights: Union[torch.nn.Module, Mapping[str, Any]]) -> bool:
    """Whether this rank holds parts of weights: FSDP1, FSDP2 or another DTensor, ZeRO 3."""
    if isinstance(weights, Mapping):
        return any(isinstance(one, torch.Tensor) and is_part(one) for one in weights.values())
    return any(is_part(one) or hasattr(one, "ds_tensor") for one in weights.parameters()) or any(
        hasattr(module, "_fsdp_wrapped_module") for module in weights.modules()
    )


def held_weights(weights: Union[torch.nn.Module, Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """What this rank holds of the weights and of the buffers that a checkpoint keeps, by name. No
    communication: the state_dict of some wrappers gathers.
    """
    if isinstance(weights, Mapping):
        return {k: local(v) for k, v in weights.items() if isinstance(v, torch.Tensor)}
    if not is_spread(weights):
        return dict(weights.state_dict())
    found = {name: local(parameter) for name, parameter in weights.named_parameters()}
    for path, module in weights.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"{path}.{name}" if path else name] = local(buffer)
    return found


def merged(ranks: Sequence[Entries]) -> tuple[Entries, dict[str, str]]:
    """What the ranks have read, together; and why keys are left out. Parts that several ranks hold
    count once.
    """
    tensors: Entries = {}
    for entries in ranks:
        for key, entry in entries.items():
            known = tensors.setdefault(key, entry)
            if known is entry or "parts" not in known or "parts" not in entry:
                continue
            places = {_place(part) for part in known["parts"]}
            new = [part for part in entry["parts"] if _place(part) not in places]
            if new:
                tensors[key] = {
                    **known,
                    "parts": [*known["parts"], *new],
                    **{name: known[name] + entry[name] for name in ("nan", "inf")},
                }
    left_out = {}
    for key, entry in tensors.items():
        held = sum(math.prod(part["sizes"]) for part in entry.get("parts", ()))
        if "parts" in entry and held != entry["numel"]:
            left_out[key] = (
                f"these ranks hold {held:,} of its {entry['numel']:,} elements; every rank that "
                "holds a part has to call seal(together=True)"
            )
    return {key: entry for key, entry in tensors.items() if key not in left_out}, left_out


def slice_of(tensor: torch.Tensor, part: Mapping[str, Any]) -> Optional[torch.Tensor]:
    """What a sealed part is of the whole ``tensor``; None if there is no such part in it."""
    offsets, sizes = part["offsets"], part["sizes"]
    ends = [start + size for start, size in zip(offsets, sizes)]
    if len(sizes) != tensor.dim() or any(e > n for e, n in zip(ends, tensor.shape)):
        return None
    return tensor[tuple(map(slice, offsets, ends))]


def _place(part: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(part["offsets"]), tuple(part["sizes"])
