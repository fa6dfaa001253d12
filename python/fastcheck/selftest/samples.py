"""Tensors on which a device is checked: bits by formula, the same on every machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Callable, NamedTuple

import numpy as np
import torch

from fastcheck.record.reference import DType, finite_max_bits, pattern

#: Around the ends of a row of 64, of a run, of a tile of 4096, and of several tiles.
_SIZES = (0, 1, 63, 65, 1023, 1025, 4095, 4096, 4097, 3 * 4096 + 1000)


class Sample(NamedTuple):
    what: str
    tensor: torch.Tensor  # on the CPU


def sizes(row: DType) -> Iterator[Sample]:
    """Sizes around every limit: of any bits, and of moderate finite values."""
    for count in _SIZES:
        components = count + count % row.components
        raw = pattern("random", row.name, components, 1)
        yield _sample(row, raw, f"{count} components of any bits")
        if row.kind == "float":
            yield _sample(row, _moderate(row, components), f"{count} components of moderate size")


def special(row: DType) -> Iterator[Sample]:
    """What a comparison, a conversion or flushed subnormals would get wrong; nothing for integers,
    where every bit pattern is a value like others.
    """
    if row.kind != "float":
        return
    base = np.frombuffer(_moderate(row, 2 * 4096 + 66), f"<u{row.itemsize}")
    patterns = _special_bits(row)
    for name, bits in patterns.items():
        changed = base.copy()
        changed[[0, 4096 + 4095, -1]] = bits
        yield _sample(row, changed.tobytes(), f"{name} at 0, 8191 and 8257 of 8258")
        yield _sample(row, np.full(4098, bits, base.dtype).tobytes(), f"4098 times {name}")
    mixed = np.array(list(patterns.values()), base.dtype).tobytes() * 1000
    yield _sample(row, mixed, "all special values by turns")
    if row.exponent_bits >= 8:
        # On either side of where a tile is added up scaled: squares that overflow or vanish.
        for exponent in (-100, -41, -39, 59, 61, 100):
            raw = pattern(f"exponent:{exponent}", row.name, 4166, 4)
            yield _sample(row, raw, f"4166 components about 2^{exponent}")


def layouts(row: DType) -> Iterator[Sample]:
    """Views of other strides, offsets and alignments."""
    flat = _sample(row, pattern("random", row.name, 12000 * row.components, 5), "").tensor
    views: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "transposed": lambda x: x[:2100].view(30, 70).t(),
        "channels last": lambda x: x[:3360].view(2, 7, 12, 20).permute(0, 3, 1, 2),
        "from the second element on": lambda x: x[1:],
        "every third": lambda x: x[1::3],
        "columns": lambda x: x[: 90 * 96].view(90, 96)[:, 1:40],
        "expanded": lambda x: x[:129].view(3, 1, 43).expand(3, 50, 43),
        "no dimensions": lambda x: x[7],
        "a diagonal": lambda x: x[: 90 * 90].view(90, 90).diagonal(),
        "overlapping windows": lambda x: x[:500].unfold(0, 32, 3),
    }
    for name, view in views.items():
        yield Sample(f"{row.name}, {name}", view(flat))


def copy_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on ``device``, bytes, strides and offset as they are."""
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).to(device)
    return storage.view(tensor.dtype).as_strided(
        tensor.shape, tensor.stride(), tensor.storage_offset()
    )


def _moderate(row: DType, components: int) -> bytes:
    """Random signs and mantissas, exponents near zero."""
    return pattern(f"exponent:{-4 if row.exponent_bits > 4 else -7}", row.name, components, 2)


def _special_bits(row: DType) -> dict[str, int]:
    """By name; those of either sign with the sign in the name."""
    sign, normal = 1 << (row.exponent_bits + row.mantissa_bits), 1 << row.mantissa_bits
    largest = finite_max_bits(row)
    found = {
        "zero": 0,
        "smallest subnormal": 1,
        "largest subnormal": normal - 1,
        "smallest normal": normal,
        "largest finite": largest,
        "NaN, all bits": sign - 1,
    }
    if row.has_inf:
        found["infinity"] = largest + 1
        found["signaling NaN"] = largest + 2
        found["quiet NaN"] = largest + 1 | normal >> 1
    return {**found, **{f"-({name})": bits | sign for name, bits in found.items()}}


def _sample(row: DType, raw: bytes, what: str) -> Sample:
    dtype = getattr(torch, row.name)
    if not raw:
        return Sample(f"{row.name}, {what}", torch.empty(0, dtype=dtype))
    if row.kind == "bool":  # other bytes are no value that torch may be given
        raw = bytes(byte & 1 for byte in raw)
    return Sample(f"{row.name}, {what}", torch.frombuffer(bytearray(raw), dtype=dtype))
