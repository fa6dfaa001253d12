"""Triton functions that assemble the bytes of a record from 32-bit integers and float32.

A float64 is put together from its bits. The scales of ``components.py`` are undone there, in
the exponent, so that the end of float32's range is not the end of a sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .components import FLOAT, INT_MAX, INT_MIN, SIGNED, UNSIGNED, joined


@triton.jit
def store_pair(slot, cell: tl.constexpr, low, high):
    """The 64-bit ``cell`` of a record."""
    tl.store(slot + 2 * cell, low)
    tl.store(slot + 2 * cell + 1, high)


@triton.jit
def _double(x, exponent):
    """The two halves of the float64 x * 2^exponent. x is no subnormal; -0.0 becomes +0.0."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & INT_MAX
    high = (magnitude >> 3) + ((1023 - 127 + exponent) << 20)
    is_normal = magnitude >= 1 << 23
    low = tl.where(is_normal, (magnitude & 7) << 29, 0)
    return low, tl.where(is_normal, high | (bits & INT_MIN), 0)


@triton.jit
def _double_of_key(key, SIZE: tl.constexpr, MANTISSA: tl.constexpr):
    """The float64 of a float's magnitude, negated for a negative float: exact, subnormals too."""
    EXPONENT_BITS: tl.constexpr = 8 * SIZE - 1 - MANTISSA
    BIAS: tl.constexpr = (1 << (EXPONENT_BITS - 1)) - 1
    magnitude = tl.where(key < 0, -key, key)
    is_subnormal = magnitude < 1 << MANTISSA
    whole = magnitude.to(tl.float32)  # below 2^24 it is exact
    normal = ((magnitude << (23 - MANTISSA)) + ((127 - BIAS) << 23)).to(tl.float32, bitcast=True)
    x = tl.where(is_subnormal, whole, normal)
    return _double(tl.where(key < 0, -x, x), tl.where(is_subnormal, 1 - BIAS - MANTISSA, 0))


@triton.jit
def store_extremes(
    slot,
    low,
    low_second,
    high,
    high_second,
    SIZE: tl.constexpr,
    KIND: tl.constexpr,
    MANTISSA: tl.constexpr,
):
    if KIND == FLOAT:
        has_any = low <= high
        lower, upper = _double_of_key(tl.where(has_any, low, 0), SIZE, MANTISSA)
        store_pair(slot, 8, lower, tl.where(has_any, upper, 0x7FF << 20))
        lower, upper = _double_of_key(tl.where(has_any, high, 0), SIZE, MANTISSA)
        store_pair(slot, 9, lower, tl.where(has_any, upper, -(1 << 20)))
    elif SIZE == 8:
        FLIP: tl.constexpr = 0 if KIND == SIGNED else INT_MIN
        store_pair(slot, 8, low_second ^ INT_MIN, low ^ FLIP)
        store_pair(slot, 9, high_second ^ INT_MIN, high ^ FLIP)
    elif KIND == SIGNED:
        has_any = low <= high
        store_pair(slot, 8, tl.where(has_any, low, -1), tl.where(has_any, low >> 31, INT_MAX))
        store_pair(slot, 9, tl.where(has_any, high, 0), tl.where(has_any, high >> 31, INT_MIN))
    else:
        has_any = low <= high
        FLIPPED: tl.constexpr = INT_MIN if KIND == UNSIGNED and SIZE == 4 else 0
        rest = tl.where(has_any, 0, -1)
        store_pair(slot, 8, tl.where(has_any, low ^ FLIPPED, -1), rest)
        store_pair(slot, 9, tl.where(has_any, high ^ FLIPPED, 0), 0)


@triton.jit
def store_sums(
    slot,
    sum_rest,
    sum_big,
    abs_rest,
    abs_big,
    square_mid,
    square_big,
    square_low,
    SIZE: tl.constexpr,
    KIND: tl.constexpr,
    MANTISSA: tl.constexpr,
):
    """Undoes the scales of components.py. A part far below the next is left out of it."""
    if KIND == FLOAT and MANTISSA != 10:
        has_big = abs_big > 0.0
        exponent = tl.where(has_big, 84, -40)
        total = tl.where(has_big, sum_big + sum_rest * 2.0**-62 * 2.0**-62, sum_rest)
        absolute = tl.where(has_big, abs_big + abs_rest * 2.0**-62 * 2.0**-62, abs_rest)
        square = square_mid + square_low * 2.0**-90 * 2.0**-90
        square_exponent = tl.where(square_mid > 0.0, 0, -180)
        square = tl.where(square_mid > 0.0, square, square_low)
        with_mid = square_big + square_mid * 2.0**-84 * 2.0**-84
        square = tl.where(has_big, with_mid, square)
        square_exponent = tl.where(has_big, 168, square_exponent)
    else:
        exponent = 32 if SIZE == 8 else 0
        square_exponent = 64 if SIZE == 8 else 0
        total, absolute, square = sum_rest, abs_rest, square_mid
    lower, upper = _double(total, exponent)
    store_pair(slot, 10, lower, upper)
    lower, upper = _double(absolute, exponent)
    store_pair(slot, 11, lower, upper)
    lower, upper = _double(square, square_exponent)
    store_pair(slot, 12, lower, upper)


@triton.jit
def store_zeros(slot, first: tl.constexpr, stop: tl.constexpr):
    for cell in tl.static_range(first, stop):
        store_pair(slot, cell, 0, 0)


@triton.jit
def with_length(total, length):
    """Half a checksum: the sum modulo 2^32."""
    upper = ((total >> 16) & 0xFFFF) + ((length >> 16) & 0xFFFF)
    return joined(upper, (total & 0xFFFF) + (length & 0xFFFF))
