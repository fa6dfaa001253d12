"""The bit patterns of each dtype's classes (NaN, zero, ...), as intervals of integers.

Read as signed integers of the component's width, the patterns of every class form a few intervals.
Counting, for each boundary between intervals, the components at or above it therefore gives all
counts of a record as differences, whatever the dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fastcheck.record.format import COUNTS, DTYPES, DTypeInfo, Order
from fastcheck.record.statistics import FLOAT_FORMATS

#: 64-bit cells of the value fields: counts, min, max, three sums, checksum.
VALUE_CELLS = 14
#: Components of a tile, the unit of the checksum.
TILE = 4096

STORAGE, LOGICAL = int(Order.STORAGE), int(Order.LOGICAL)

#: Signed integers by component bytes: what bits are read as.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

#: Mantissa bits of the floating-point dtypes, by name; for a complex dtype those of its parts.
MANTISSA_BITS = {
    name: -round(math.log2(torch.finfo(getattr(torch, name)).eps)) for name in FLOAT_FORMATS
}
_COMPONENT_DTYPES = {"complex64": "float32", "complex128": "float64"}


@dataclass(frozen=True)
class Format:
    """A dtype. ``boundaries`` ascend; ``weights[i][k]`` is what one component at or above
    boundary k adds to count i.
    """

    info: DTypeInfo
    dtype: torch.dtype  # of a component
    bits: torch.dtype
    is_float: bool
    largest: int  # floats: bit pattern of the largest finite magnitude
    boundaries: tuple[int, ...]
    weights: tuple[tuple[int, ...], ...]

    @property
    def lowest(self) -> int:
        """The smallest signed integer of the width; as a float pattern, the sign bit alone."""
        return -(1 << (8 * self.info.component_bytes - 1))

    def cell(self, value: float) -> int:
        """The 64 bits of a ``min`` or ``max`` of this dtype, as a signed integer."""
        if self.info.kind == "f8":
            host = torch.tensor([value], dtype=torch.float64).view(torch.int64)
            return int(host[0])
        return int(value) - (1 << 64) if value >= 1 << 63 else int(value)

    def empty_cells(self, depth_has_stats: bool) -> list[int]:
        """The value cells of a tensor without elements, checksum left out."""
        cells = [0] * VALUE_CELLS
        if depth_has_stats:
            limits = {
                "f8": (float("inf"), float("-inf")),
                "i8": ((1 << 63) - 1, -(1 << 63)),
                "u8": ((1 << 64) - 1, 0),
            }
            low, high = limits[self.info.kind]
            cells[8:10] = [self.cell(low), self.cell(high)]
        return cells


_Intervals = list[tuple[int, Sequence[str]]]  # first pattern of an interval, its counts


def _float_intervals(lowest: int, mantissa_bits: int, largest: int, has_inf: bool) -> _Intervals:
    intervals: _Intervals = []
    for start, infinity, sign in ((lowest, "neginf", ["negative"]), (0, "posinf", [])):
        intervals += [
            (start, ["zero"]),
            (start + 1, ["subnormal", *sign]),
            (start + (1 << mantissa_bits), sign),
            (start + largest, ["saturated", *sign]),
        ]
        if has_inf:
            intervals.append((start + largest + 1, [infinity]))
        intervals.append((start + largest + (2 if has_inf else 1), ["nan"]))
    return intervals


def _integer_intervals(name: str, lowest: int) -> _Intervals:
    if name == "bool":
        return [(lowest, []), (0, ["zero"]), (1, [])]
    if name.startswith("u"):  # -1 is the pattern of the largest value
        return [(lowest, []), (-1, ["saturated"]), (0, ["zero"]), (1, [])]
    return [
        (lowest, ["saturated", "negative"]),
        (lowest + 1, ["negative"]),
        (0, ["zero"]),
        (1, []),
        (-1 - lowest, ["saturated"]),
    ]


def _weights(intervals: _Intervals, components: int) -> tuple[tuple[int, ...], ...]:
    """A component of interval k is at or above the boundaries 0 to k: the weights telescope."""
    rows = [[0] * len(intervals) for _ in range(VALUE_CELLS)]
    for k, (_, classes) in enumerate(intervals):
        for name in classes:
            row = rows[COUNTS.index(f"{name}_count")]
            row[k] += 1
            if k + 1 < len(intervals):
                row[k + 1] -= 1
    if components == 1:
        rows[0][0] = 1  # every component is above the lowest boundary; pairs are set by the host
    return tuple(map(tuple, rows))


def _format(info: DTypeInfo) -> Format:
    lowest = -(1 << (8 * info.component_bytes - 1))
    mantissa_bits = MANTISSA_BITS.get(info.name)
    largest = 0
    if mantissa_bits is None:
        intervals = _integer_intervals(info.name, lowest)
    else:
        has_inf = FLOAT_FORMATS[info.name].has_inf
        all_ones = -1 - lowest
        largest = all_ones - (1 << mantissa_bits) if has_inf else all_ones - 1
        intervals = _float_intervals(lowest, mantissa_bits, largest, has_inf)
    return Format(
        info=info,
        dtype=getattr(torch, _COMPONENT_DTYPES.get(info.name, info.name)),
        bits=_BITS[info.component_bytes],
        is_float=mantissa_bits is not None,
        largest=largest,
        boundaries=tuple(start for start, _ in intervals),
        weights=_weights(intervals, info.components),
    )


#: Formats by the tensor's dtype. Old versions of torch lack some.
FORMATS: dict[torch.dtype, Format] = {
    getattr(torch, info.name): _format(info) for info in DTYPES if hasattr(torch, info.name)
}
