"""Bit patterns at the edges of each dtype."""

from __future__ import annotations

from support.records.reference import DTYPES


def special_codes(dtype: str) -> list[int]:
    """Bit patterns at the edges of every class, both signs."""
    row = DTYPES[dtype]
    width = 8 * row.itemsize
    one = 1 << row.mantissa_bits
    all_ones = (1 << (width - 1)) - 1
    exponent_field = all_ones - (one - 1)
    quiet = one >> 1
    magnitudes = [
        0,
        1,
        2,
        one - 1,
        one,
        one + 1,
        exponent_field - 1,
        exponent_field,
        exponent_field + 1,
    ]
    magnitudes += [
        exponent_field + quiet,
        exponent_field + quiet - 1,
        exponent_field | 1 << 1,
        all_ones - 1,
        all_ones,
    ]
    magnitudes += [exponent_field - one, exponent_field - one - 1, one << 1, (one << 1) - 1]
    return sorted({m | s for m in magnitudes for s in (0, 1 << (width - 1))})
