"""Reads safetensors files: a length, a JSON header, and bytes, all checked before they are used.
Nothing in one is ever executed, and a tensor is mapped from disk only when it is asked for.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..._errors import CompareError, explain

__all__ = ["Entry", "load_entry", "read_header"]

_LONGEST_HEADER = 100_000_000  # what the format's own reader allows

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": getattr(torch, "float8_e4m3fn", None),
    "F8_E5M2": getattr(torch, "float8_e5m2", None),
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": getattr(torch, "uint64", None),
    "U32": getattr(torch, "uint32", None),
    "U16": getattr(torch, "uint16", None),
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies in its file. ``dtype`` None: one that torch doesn't have."""

    path: str
    dtype_name: str
    dtype: Any
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(path: str) -> dict[str, Entry]:
    """The tensors of the file by name. CompareError when it isn't a whole safetensors file."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        head = file.read(8)
        length = int.from_bytes(head, "little")
        if len(head) < 8 or length > min(size - 8, _LONGEST_HEADER):
            raise _damaged(path, f"{size:,} bytes that begin with a header of {length:,}")
        raw = file.read(length)
    try:
        header = json.loads(raw)
    except ValueError as error:
        raise _damaged(path, f"a header that is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise _damaged(path, "a header that is not a JSON object")
    first = 8 + length
    return {
        name: _entry(path, name, value, first, size)
        for name, value in header.items()
        if name != "__metadata__"
    }


def _entry(path: str, name: str, value: Any, first: int, size: int) -> Entry:
    try:
        dtype_name = str(value["dtype"])
        shape = tuple(int(length) for length in value["shape"])
        start, end = (first + int(offset) for offset in value["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, f"a header without the place of {name!r}") from error
    dtype = _DTYPES.get(dtype_name)
    wrong = not first <= start <= end or min(shape, default=0) < 0
    if dtype is not None:
        wrong = (
            wrong or end - start != math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
        )
    if wrong:
        raise _damaged(path, f"{name!r}, {dtype_name} {list(shape)}, in {end - start:,} bytes")
    if end > size:
        raise _damaged(path, f"{name!r}, which would end at byte {end:,} of {size:,}: cut short")
    return Entry(path, dtype_name, dtype, shape, start, end)


def load_entry(entry: Entry) -> torch.Tensor:
    """The tensor, mapped from the file (copy on write)."""
    if entry.start == entry.end:
        return torch.empty(entry.shape, dtype=entry.dtype)
    raw = np.memmap(
        entry.path, np.uint8, mode="c", offset=entry.start, shape=(entry.end - entry.start,)
    )
    flat = torch.from_numpy(raw)
    if entry.start % torch.empty(0, dtype=entry.dtype).element_size():
        flat = flat.clone()  # a view needs its alignment
    return flat.view(entry.dtype).view(entry.shape)


def _damaged(path: str, came: str) -> CompareError:
    return CompareError(
        explain(
            "this is not a whole safetensors file",
            expected="a header length, a JSON header, and the bytes of every tensor in it",
            came=f"{path}: {came}",
            do="copy or write the file again",
        )
    )
