"""Test tensors of ``fastcheck selftest``: bits from a formula, the same on every machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Callable, NamedTuple

import numpy as np
import torch

from fastcheck.record.format import DTYPES, DTypeInfo

from .oracle import OracleFormat, format_of

__all__ = ["Sample", "copy_to", "dtype_rows", "layouts", "special", "values"]

#: Around the ends of a row of 64, of a run, of a tile of 4096, and of several tiles.
_SIZES = (0, 1, 63, 65, 1023, 1025, 4095, 4096, 4097, 3 * 4096 + 1000)


class Sample(NamedTuple):
    what: str
    tensor: torch.Tensor  # on the CPU


def dtype_rows() -> list[DTypeInfo]:
    """The rows of the table that this torch has a dtype for."""
    return [row for row in DTYPES if hasattr(torch, row.name)]


def values(row: DTypeInfo) -> Iterator[Sample]:
    """Sizes around every limit: of any bits, and of moderate finite values."""
    for count in _SIZES:
        components = count + count % row.components
        yield _sample(row, _bits(row, components, 1), f"{count} components of any bits")
        if format_of(row) is not None:
            moderate = _moderate(row, components, 2)
            yield _sample(row, moderate, f"{count} components of moderate size")


def special(row: DTypeInfo) -> Iterator[Sample]:
    """What a comparison, a conversion or flushed subnormals would get wrong; nothing for integers,
    where every bit pattern is a value like others.
    """
    layout = format_of(row)
    if layout is None:
        return
    patterns = special_bits(layout)
    base = _moderate(row, 2 * 4096 + 66, 3)
    for name, bits in patterns.items():
        for where in (0, 4096 + 4095, 2 * 4096 + 65):
            changed = base.copy()
            changed[where] = bits
            yield _sample(row, changed, f"{name} at {where} of {base.size}")
    for name, bits in patterns.items():
        yield _sample(row, np.full(4098, bits, base.dtype), f"4098 times {name}")
    mixed = np.tile(np.array(list(patterns.values()), base.dtype), 1000)
    yield _sample(row, mixed[: mixed.size // 2 * 2], "all special values by turns")
    if layout.exponent_bits >= 8:
        # On either side of where a tile is added up scaled: squares that overflow or vanish.
        for exponent in (-100, -41, -39, 59, 61, 100):
            scaled = _moderate(row, 4096 + 70, 4, exponent)
            yield _sample(row, scaled, f"4166 components about 2^{exponent}")


def special_bits(layout: OracleFormat) -> dict[str, int]:
    """By name; those of either sign with the sign in the name."""
    smallest_normal = 1 << layout.mantissa_bits
    one_sided = {
        "zero": 0,
        "smallest subnormal": 1,
        "largest subnormal": smallest_normal - 1,
        "smallest normal": smallest_normal,
        "largest finite": layout.first_nonfinite - 1,
        "NaN, all bits": layout.sign - 1,
    }
    if layout.has_inf:
        one_sided["infinity"] = layout.first_nonfinite
        one_sided["signaling NaN"] = layout.first_nonfinite + 1
        one_sided["quiet NaN"] = layout.first_nonfinite | smallest_normal >> 1
    both = {}
    for name, bits in one_sided.items():
        both[name] = bits
        both[f"-({name})"] = bits | layout.sign
    return both


def layouts(row: DTypeInfo) -> Iterator[Sample]:
    """Views of other strides, offsets and alignments."""
    flat = _sample(row, _bits(row, 12000 * row.components, 5), "").tensor
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


# ---- bits ---------------------------------------------------------------------------------------


def _words(count: int, seed: int) -> np.ndarray:
    """splitmix64 (Vigna, public domain): the same words with every release of NumPy."""
    z = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = z ^ (z >> np.uint64(31))
    return mixed


def _bits(row: DTypeInfo, components: int, seed: int) -> np.ndarray:
    words = _words(components, seed)
    if row.name == "bool":  # other bytes are no value that torch may be given
        words &= np.uint64(1)
    return words.astype(f"<u{row.component_bytes}")


def _moderate(row: DTypeInfo, components: int, seed: int, exponent: int = -4) -> np.ndarray:
    """Random signs and mantissas, exponents from ``exponent`` to ``exponent`` + 7."""
    layout = format_of(row)
    assert layout is not None
    words = _words(components, seed)
    bias = (1 << (layout.exponent_bits - 1)) - 1
    biased = (words >> np.uint64(61)) + np.uint64(exponent + bias)
    kept = words & np.uint64(layout.sign | ((1 << layout.mantissa_bits) - 1))
    moderate: np.ndarray = (kept | biased << np.uint64(layout.mantissa_bits)).astype(
        f"<u{row.component_bytes}"
    )
    return moderate


def _sample(row: DTypeInfo, bits: np.ndarray, what: str) -> Sample:
    dtype = getattr(torch, row.name)
    if bits.size == 0:
        return Sample(f"{row.name}, {what}", torch.empty(0, dtype=dtype))
    return Sample(f"{row.name}, {what}", torch.frombuffer(bytearray(bits.tobytes()), dtype=dtype))
