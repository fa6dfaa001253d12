"""Fused multiply-add in NumPy, rounded once, for the reference: float32 and float64.

NumPy has no fma and ``math.fma`` came with Python 3.13. tests/record/test_reference.py holds both
against Fractions.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """Knuth: s = fl(a + b) and the error e, so that a + b = s + e exactly."""
    s = a + b
    b_part = s - a
    return s, (a - (s - b_part)) + (b - b_part)


def _round_to_odd(s: Array, e: Array) -> Array:
    """The float64 neighbour of s + e whose last bit is 1, or s where e = 0 (s = fl(s + e))."""
    even = (np.ascontiguousarray(s).view(np.uint64) & np.uint64(1)) == 0
    toward = np.nextafter(s, np.where(e > 0, np.inf, -np.inf))
    return np.where((e != 0) & even, toward, s)


def fma32(x: Array, y: Array, acc: Array) -> Array:
    """x*y + acc rounded once to float32, for finite float32 arrays.

    x*y has at most 48 bits and an exponent that float64 holds, so the product is exact in float64.
    The sum with acc may need more than 53 bits; rounding it to float64 to nearest and then to
    float32 would round twice and be wrong near ties. Rounded to odd it is right: a sum that is
    inexact in float64 keeps a 1 in its last place, so it is neither a float32 nor the midpoint of
    two, and it lies on the same side of that midpoint as the exact sum (Boldo and Melquiond, 2008:
    53 >= 24 + 2; float32 subnormals, with fewer bits still, are no exception).
    """
    product = x.astype(np.float64) * y.astype(np.float64)
    s, e = _two_sum(product, acc.astype(np.float64))
    with np.errstate(over="ignore"):
        rounded: Array = _round_to_odd(s, e).astype(np.float32)
    return rounded


def exact_fma64(x: float, y: float, acc: float) -> float:
    """x*y + acc rounded once to float64: exact integers, then int / int, which rounds once."""
    if math.isinf(acc):
        return acc
    nx, dx = x.as_integer_ratio()
    ny, dy = y.as_integer_ratio()
    na, da = acc.as_integer_ratio()
    numerator = nx * ny * da + na * dx * dy
    try:
        return numerator / (dx * dy * da)
    except OverflowError:
        return math.inf if numerator > 0 else -math.inf


def fma64(x: Array, y: Array, acc: Array) -> Array:
    """x*y + acc rounded once to float64, for finite x and y.

    Where all exponents are moderate: the product as p + e exactly (Dekker, with Veltkamp's
    splitting), then p + e + acc rounded once by way of round-to-odd (Boldo and Melquiond,
    "Emulation of a FMA and correctly rounded sums", 2008). Elsewhere, one at a time,
    :func:`exact_fma64`.
    """

    def moderate(v: Array) -> Array:
        size = np.abs(v)
        inside: Array = (v == 0) | ((size > 2.0**-200) & (size < 2.0**200))
        return inside

    easy = (
        moderate(x)
        & moderate(y)
        & (moderate(acc) | ((acc > 0) & (acc < 2.0**400) & (acc > 2.0**-400)))
    )
    out = np.empty(np.broadcast_shapes(x.shape, y.shape, acc.shape), np.float64)

    a, b, c = x[easy], y[easy], acc[easy]

    def split(v: Array) -> tuple[Array, Array]:
        big = v * 134217729.0  # 2^27 + 1
        high = big - (big - v)
        return high, v - high

    a_high, a_low = split(a)
    b_high, b_low = split(b)
    p = a * b
    e = a_low * b_low - (((p - a_high * b_high) - a_low * b_high) - a_high * b_low)
    u_high, u_low = _two_sum(c, e)
    t_high, t_low = _two_sum(p, u_high)
    out[easy] = t_high + _round_to_odd(*_two_sum(t_low, u_low))

    for index in np.argwhere(~easy):
        at = tuple(index)
        out[at] = exact_fma64(float(x[at]), float(y[at]), float(acc[at]))
    return out
