"""Reads the weights of a model: their checksums as text, by the dtypes that they may be cast to."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from fastcheck.comparison.relation import dtype_name
from fastcheck.errors import ConfigError, UnsupportedTensorError
from fastcheck.statistics.functions import checksums, stats
from fastcheck.statistics.stats import Stats
from fastcheck.utils.grouping import grouped
from fastcheck.utils.torch.readable import unreadable_reason
from fastcheck.utils.torch.sharding import kept_parts, part_of

#: Larger tensors are read in so many parts, which tell where a tensor is half written.
_PARTS = 4
_MANY = 4096
#: The digits of a checksum, and those that are kept of a part's.
DIGITS, OF_PART = 16, 6
#: Tensors are read so many bytes at a time: what a cast of them takes.
_BATCH_BYTES = 1 << 28
#: Formats that weights are cast to on their way.
CASTS = (torch.bfloat16, torch.float16)


def state_of(
    model: object,
    refused: str = "there are no weights to read",
    kinds: tuple[type, ...] = (torch.Tensor,),
) -> dict[str, Any]:
    """The tensors of a module or a state_dict, or what else is of these kinds. ``refused``: the
    text of the ConfigError where there is none.
    """
    given = model.state_dict() if isinstance(model, torch.nn.Module) else model
    pairs = given.items() if isinstance(given, Mapping) else ()
    state = {str(key): value for key, value in pairs if isinstance(value, kinds)}
    if not state:
        expected = "a torch.nn.Module with parameters or buffers, or its state_dict()"
        raise ConfigError(refused, expected=expected, got=type(model).__name__)
    return state


def own_parts(model: object) -> dict[str, torch.Tensor]:
    """The tensors; of a DTensor, unless that is a part of a sum, and of a parameter under ZeRO 3
    what this rank has of it.
    """
    state = state_of(model)
    parts = {name: part_of(tensor) for name, tensor in state.items()}
    own = {name: part.data if part else state[name] for name, part in parts.items()}
    return {**own, **kept_parts(model)} if isinstance(model, torch.nn.Module) else own


def place_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """The place of a tensor's elements: that of a tied weight is the same."""
    is_lazy = tensor.is_conj(), tensor.is_neg()
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), is_lazy


def split_readable(
    state: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors that can be read, and the reasons why others can't be, by name."""
    reasons = {name: unreadable_reason(tensor) for name, tensor in state.items()}
    readable = {name: state[name].detach() for name, why in reasons.items() if why is None}
    return readable, {name: why for name, why in reasons.items() if why is not None}


def read_all(state: Mapping[str, torch.Tensor]) -> tuple[dict[str, Stats], dict[str, str]]:
    """Each tensor's statistics, read and waited for in one call for each device; and why others
    can't be read.
    """
    tensors, unread = split_readable(state)
    statistics: dict[str, Stats] = {}
    for keys in grouped(tensors, lambda key: tensors[key].device).values():
        try:
            statistics.update(zip(keys, stats([tensors[k] for k in keys], order="logical")))
        except UnsupportedTensorError as error:
            unread.update(dict.fromkeys(keys, str(error)))
    return {key: statistics[key] for key in state if key in statistics}, unread


def _formats(tensor: torch.Tensor) -> Sequence[torch.dtype]:
    """The dtypes to try for a tensor, its own first."""
    is_wide = tensor.dtype in (torch.float32, torch.float64)
    return (tensor.dtype, *(CASTS if is_wide else ()))


def slices_of(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    if tensor.numel() < _MANY or tensor.shape[0] < _PARTS:
        return [tensor]
    return tensor.tensor_split(_PARTS)


def checksum_text(tensor: torch.Tensor) -> str:
    return checksum_texts([tensor])[0]


def checksum_texts(tensors: Sequence[torch.Tensor]) -> list[str]:
    """The checksum of each tensor as text; all are read in one call."""
    sums = iter(_checksums(part for tensor in tensors for part in slices_of(tensor)))
    return [_text([next(sums) for _ in slices_of(tensor)]) for tensor in tensors]


def _text(sums: Sequence[int]) -> str:
    """The checksum of a tensor's parts in hexadecimal, and behind it the last digits of each
    part's, where it has several. No change of a single one leaves it as it is.
    """
    whole = sums[0]
    for number in sums[1:]:
        whole = ((whole << 13 | whole >> 51) * 0x9E3779B97F4A7C15 + number) % 2**64
    digits = (f"{number:016x}"[-OF_PART:] for number in sums)
    return f"{whole:016x}" + ("".join(digits) if len(sums) > 1 else "")


def texts_by_dtype(tensors: Collection[torch.Tensor]) -> list[dict[str, str]]:
    """The checksums of each tensor, by the dtypes to try for it."""
    casts = (tensor.to(dtype) for tensor in tensors for dtype in _formats(tensor))
    sums = iter(_checksums(part for cast in casts for part in slices_of(cast)))
    return [
        {
            dtype_name(dtype): _text([next(sums) for _ in slices_of(tensor)])
            for dtype in _formats(tensor)
        }
        for tensor in tensors
    ]


def _checksums(slices: Iterable[torch.Tensor]) -> list[int]:
    """Reads tensors of any devices as they are made, and waits at the end."""
    read: list[tuple[list[int], torch.Tensor]] = []
    places: dict[torch.device, list[int]] = {}
    held: dict[int, torch.Tensor] = {}

    def read_held() -> None:
        for own in places.values():
            read.append((own, checksums([held[place] for place in own], True)))
        places.clear()
        held.clear()

    count, size = 0, 0
    for count, part in enumerate(slices, 1):
        places.setdefault(part.device, []).append(count - 1)
        held[count - 1] = part
        size += part.nbytes
        if size > _BATCH_BYTES:
            read_held()
            size = 0
    read_held()
    found = [0] * count
    for own, sums in read:
        for place, number in zip(own, sums.tolist()):
            found[place] = number % 2**64
    return found
