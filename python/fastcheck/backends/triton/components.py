"""Triton functions for one component: its class and its float32 value, from its bits.

Everything is 32-bit integers and float32: no float64 or 64-bit vectors, no comparison of floats.
float32's range doesn't fit its own squares, so formats of that range are summed apart by magnitude,
each part scaled by a power of two in the exponent's own bits. No operand is ever subnormal: a
device may flush those.

====  =====================  ==============================
part  magnitudes             scale in the sums, and squared
====  =====================  ==============================
big   2^42 and above         2^-84, 2^-84
mid   2^-48 to below 2^42    2^40, 1
low   below 2^-48            2^40, 2^90
====  =====================  ==============================
"""

from __future__ import annotations

import triton
import triton.language as tl

# Kinds of components.
FLOAT = tl.constexpr(0)
SIGNED = tl.constexpr(1)
UNSIGNED = tl.constexpr(2)
BOOL = tl.constexpr(3)

INT_MAX = tl.constexpr((1 << 31) - 1)
INT_MIN = tl.constexpr(-(1 << 31))


@triton.jit
def component(word, k: tl.constexpr, SIZE: tl.constexpr, KIND: tl.constexpr):
    """Component k of a word: an integer's value (uint32: its bits), a float's bits, in 32 bits."""
    BITS: tl.constexpr = 8 * SIZE
    if SIZE >= 4:
        value = word
    elif KIND == SIGNED:
        value = (word << (32 - BITS * (k + 1))) >> (32 - BITS)
    else:
        value = (word >> (BITS * k)) & ((1 << BITS) - 1)
    return value


@triton.jit
def unsigned_value(word):
    """float32 of 32 bits without a sign, rounded once: not every device converts such."""
    upper = ((word >> 16) & 0xFFFF).to(tl.float32)
    return upper * 65536.0 + (word & 0xFFFF).to(tl.float32)


@triton.jit
def classify(bits, inside, common, rare, SIZE: tl.constexpr, MANTISSA: tl.constexpr):
    """Adds a float to two packs of counters of a byte each: zero, subnormal, saturated and
    negative; NaN, +inf and -inf. Returns them, the magnitude, and two masks.
    """
    SIGN_SHIFT: tl.constexpr = 8 * SIZE - 1
    MIN_NORMAL: tl.constexpr = 1 << MANTISSA
    INFINITY: tl.constexpr = (1 << SIGN_SHIFT) - MIN_NORMAL
    magnitude = bits & ((1 << SIGN_SHIFT) - 1)
    negative = ((bits >> SIGN_SHIFT) & 1) != 0
    finite = magnitude < INFINITY
    nonzero = tl.where(magnitude < MIN_NORMAL, 1 << 8, 0)
    nonzero += tl.where(magnitude == INFINITY - 1, 1 << 16, 0)
    nonzero += tl.where(negative, 1 << 24, 0)
    common += tl.where(inside & finite, tl.where(magnitude == 0, 1, nonzero), 0)
    infinite = tl.where(negative, 1 << 16, 1 << 8)
    rare += tl.where(finite, 0, tl.where(magnitude > INFINITY, 1, infinite))
    return common, rare, magnitude, negative, finite


@triton.jit
def classify_integer(value, inside, common, SIZE: tl.constexpr, KIND: tl.constexpr):
    """The same for an integer of up to 32 bits."""
    common += tl.where(inside & (value == 0), 1, 0)
    if KIND == SIGNED:
        LARGEST: tl.constexpr = (1 << (8 * SIZE - 1)) - 1
        at_end = (value == LARGEST) | (value == -LARGEST - 1)
        common += tl.where(inside & at_end, 1 << 16, 0)
        common += tl.where(inside & (value < 0), 1 << 24, 0)
    elif KIND == UNSIGNED:
        LARGEST_BITS: tl.constexpr = -1 if SIZE == 4 else (1 << (8 * SIZE)) - 1
        common += tl.where(inside & (value == LARGEST_BITS), 1 << 16, 0)
    return common


@triton.jit
def classify_wide(low, high, inside, common, KIND: tl.constexpr):
    """The same for 64 bits in two words."""
    common += tl.where(inside & ((low | high) == 0), 1, 0)
    if KIND == SIGNED:
        at_end = ((low == -1) & (high == INT_MAX)) | ((low == 0) & (high == INT_MIN))
        common += tl.where(inside & at_end, 1 << 16, 0)
        common += tl.where(inside & (high < 0), 1 << 24, 0)
    else:
        common += tl.where(inside & ((low & high) == -1), 1 << 16, 0)
    return common


@triton.jit
def scaled_parts(magnitude, negative, MANTISSA: tl.constexpr):
    """A float of float32's range: |x| and x of the big part and of the other two together, and
    what is squared of all three. Zero in the parts that it doesn't belong to, and when not finite.
    """
    wide = magnitude << (23 - MANTISSA)
    is_big = wide >= (127 + 42) << 23
    is_low = wide < (127 - 48) << 23
    is_finite_big = is_big & (wide < 255 << 23)
    big = tl.where(is_finite_big, wide - (84 << 23), 0).to(tl.float32, bitcast=True)
    rest_bits = tl.where(is_big, 0, wide)
    normal = (rest_bits + (40 << 23)).to(tl.float32, bitcast=True)
    subnormal = rest_bits.to(tl.float32) * 2.0**-109
    rest = tl.where(rest_bits < 1 << 23, subnormal, normal)
    mid = tl.where(is_low, 0, rest_bits).to(tl.float32, bitcast=True)
    low = tl.where(is_low, rest, 0.0) * 2.0**50
    signed_big = tl.where(negative, -big, big)
    signed_rest = tl.where(negative, -rest, rest)
    return big, rest, signed_big, signed_rest, mid, low


@triton.jit
def half_value(magnitude, finite):
    """|x| of a float16; no intermediate is subnormal."""
    kept = tl.where(finite, magnitude, 0)
    normal = ((kept << 13) + (112 << 23)).to(tl.float32, bitcast=True)
    return tl.where(kept < 1 << 10, kept.to(tl.float32) * 2.0**-24, normal)


@triton.jit
def wide_magnitude(low, high, KIND: tl.constexpr):
    """|x| * 2^-32 of a 64-bit integer; -2^63 too, whose magnitude fits no int64."""
    if KIND == SIGNED:
        negative = high < 0
        high = tl.where(negative, ~high + tl.where(low == 0, 1, 0), high)
        low = tl.where(negative, -low, low)
    return unsigned_value(high) + unsigned_value(low) * 2.0**-32


@triton.jit
def joined(upper, lower):
    """upper * 2^16 + lower modulo 2^32, both of them sums of 16-bit halves."""
    return ((upper + (lower >> 16)) << 16) | (lower & 0xFFFF)
