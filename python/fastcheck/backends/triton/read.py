"""Triton functions of the main loop: one program reads its share of a tensor, and stores a row of
partials, or the record.

A tensor is read as 32-bit words, several components to a word where they are narrower. A step is
``GROUPS`` runs of chains (docs/record-format.md, section 7): up to 16 words for each lane, one
after the other, so that the checksum's chains and the sums advance together. A program takes every
P-th step, P the number of the tensor's programs.

Counts, extremes and checksum are exact. Sums are float32 within a run; runs add up in pairs of
float32 whose second half carries the rounding of the first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastcheck.backends.portable.checksum import FINISH, MULTIPLIERS, PLACES, ROTATIONS, signed

from .components import (
    BOOL,
    FLOAT,
    INT_MAX,
    INT_MIN,
    SIGNED,
    UNSIGNED,
    classify,
    classify_integer,
    classify_wide,
    component,
    half_value,
    joined,
    scaled_parts,
    unsigned_value,
    wide_magnitude,
)
from .record import store_extremes, store_pair, store_sums, store_zeros, with_length

# Columns of partials, int32: seven counts, four halves of extremes, seven sums, two of checksum.
RANGE = tl.constexpr(7)
SUMS = tl.constexpr(11)
CHECKSUM = tl.constexpr(18)
RUN_ROWS = tl.constexpr(16)
_PLACE_A, _PLACE_B = (tl.constexpr(signed(p)) for p in PLACES)
_MULTIPLIER_A, _MULTIPLIER_B = (tl.constexpr(signed(m)) for m in MULTIPLIERS)
_ROTATION_A, _ROTATION_B = (tl.constexpr(r) for r in ROTATIONS)
_SHIFT_1, _SHIFT_2, _SHIFT_3, _SHIFT_4, _SHIFT_5 = (tl.constexpr(s) for _, s, _ in FINISH)
# The bits that a shift to the right leaves when no sign comes in.
_ROTATED_A, _ROTATED_B = (tl.constexpr((1 << r) - 1) for r in ROTATIONS)
_KEPT_1, _KEPT_2, _KEPT_3, _KEPT_4, _KEPT_5 = (
    tl.constexpr((1 << 32 - s) - 1) for _, s, _ in FINISH
)
_FACTOR_1, _FACTOR_2, _FACTOR_3, _FACTOR_4, _ = (tl.constexpr(signed(f)) for _, _, f in FINISH)


@triton.jit
def _step(
    state, word, there, MULTIPLIER: tl.constexpr, ROTATION: tl.constexpr, ROTATED: tl.constexpr
):
    upper = (state >> (32 - ROTATION)) & ROTATED
    return tl.where(there, ((state << ROTATION) | upper) * MULTIPLIER + word, state)


@triton.jit
def _mixed(state, other, SHIFT: tl.constexpr, KEPT: tl.constexpr):
    return state ^ ((other >> SHIFT) & KEPT)


@triton.jit
def _finish_chains(a, b):
    a = _mixed(a, b, _SHIFT_1, _KEPT_1) * _FACTOR_1
    b = _mixed(b, a, _SHIFT_2, _KEPT_2) * _FACTOR_2
    a = _mixed(a, b, _SHIFT_3, _KEPT_3) * _FACTOR_3
    b = _mixed(b, a, _SHIFT_4, _KEPT_4) * _FACTOR_4
    return _mixed(a, b, _SHIFT_5, _KEPT_5), b


@triton.jit
def add_exactly(total, rest, x):
    """total + x, and what rounding took off it added to rest (Knuth, TAOCP 2, 4.2.2, theorem B)."""
    after = total + x
    shadow = after - total
    return after, rest + ((total - (after - shadow)) + (x - shadow))


@triton.jit
def _sum(x):
    return tl.sum(tl.sum(x, 1), 0)


@triton.jit
def _wrapped_sum(x):
    """Modulo 2^32, with no sum leaving 32 bits: Triton's interpreter refuses such a sum."""
    return joined(_sum((x >> 16) & 0xFFFF), _sum(x & 0xFFFF))


@triton.jit
def _smallest(high, low):
    """The smallest of pairs, the halves compared one after the other."""
    first = tl.min(tl.min(high, 1), 0)
    return first, tl.min(tl.min(tl.where(high == first, low, INT_MAX), 1), 0)


@triton.jit
def _largest(high, low):
    first = tl.max(tl.max(high, 1), 0)
    return first, tl.max(tl.max(tl.where(high == first, low, INT_MIN), 1), 0)


@triton.jit
def _tail_word(tail, tail_count, SIZE: tl.constexpr):
    """The components behind the last whole word. A component is read even when there is none, from
    memory that the caller provides: triton-ascend reads a single element whatever its mask.
    """
    MASK: tl.constexpr = (1 << (8 * SIZE)) - 1
    word = 0
    for k in tl.static_range(4 // SIZE - 1):
        component = tl.load(tail + tl.where(k < tail_count, k, 0)).to(tl.int32) & MASK
        word |= tl.where(k < tail_count, component << (8 * SIZE * k), 0)
    return word


# ---- a program's part ----------------------------------------------------------------------------


@triton.jit
def _store_count(out, number: tl.constexpr, column, counts, IS_PART: tl.constexpr):
    if IS_PART:
        tl.store(out + number * column, _sum(counts))
    else:
        store_pair(out, number + 1, _sum(counts), 0)


@triton.jit
def _store_float(place, x):
    tl.store(place, x.to(tl.int32, bitcast=True))


@triton.jit
def read(
    words,
    tail,
    out,  # a row of partials, or the record, of which all but numel is stored
    column,  # from one partial of the row to the next
    length_a,  # of the record
    length_b,
    body,  # whole words
    tail_count,  # components behind them
    components,
    seed_a,  # of the first chain
    seed_b,
    rows,  # of the longest chain
    first_step,  # of this program
    stride,  # to its next one
    SIZE: tl.constexpr,
    KIND: tl.constexpr,
    MANTISSA: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUPS: tl.constexpr,
    IS_PART: tl.constexpr,
):
    WIDTH: tl.constexpr = 16 * SIZE  # words of a row of 64 components
    LANES: tl.constexpr = 64 if SIZE == 8 else WIDTH
    STRIDE: tl.constexpr = WIDTH // LANES
    PER_WORD: tl.constexpr = 1 if SIZE >= 4 else 4 // SIZE
    SCALED: tl.constexpr = KIND == FLOAT and MANTISSA != 10
    group = tl.arange(0, GROUPS)[:, None]
    lane = tl.arange(0, LANES)[None, :] * STRIDE
    place = group * (RUN_ROWS * WIDTH) + lane
    chain = group * WIDTH + lane
    nothing = tl.zeros([GROUPS, LANES], tl.int32)
    none = tl.zeros([GROUPS, LANES], tl.float32)
    last = 0
    count = body
    if SIZE < 4:
        last = _tail_word(tail, tail_count, SIZE)
        count = body + tl.where(tail_count > 0, 1, 0)

    nan, posinf, neginf, zero = nothing, nothing, nothing, nothing
    subnormal, negative_count, saturated = nothing, nothing, nothing
    # The halves of a 64-bit extreme; of the others the first alone.
    low, low_second = nothing + INT_MAX, nothing + INT_MAX
    high, high_second = nothing + INT_MIN, nothing + INT_MIN
    sum_rest, sum_rest_off, sum_big, sum_big_off = none, none, none, none
    abs_rest, abs_rest_off, abs_big, abs_big_off = none, none, none, none
    square_mid, square_mid_off, square_big, square_big_off = none, none, none, none
    square_low, square_low_off = none, none
    total_a, total_b = nothing, nothing

    steps = tl.cdiv(count, GROUPS * RUN_ROWS * WIDTH)
    for step in range(first_step, steps, stride):
        first = step * (GROUPS * RUN_ROWS * WIDTH)
        number = step * (GROUPS * WIDTH) + chain
        a = number * _PLACE_A + seed_a
        b = number * _PLACE_B + seed_b
        a_second = a + _PLACE_A
        b_second = b + _PLACE_B
        common, rare = nothing, nothing
        run_rest, run_big, run_abs_rest, run_abs_big = none, none, none, none
        run_mid, run_square_big, run_low = none, none, none
        for row in range(rows):
            index = first + place + row * WIDTH
            there = index < count
            word = tl.load(words + index, mask=index < body, other=0)
            if SIZE < 4:
                word = tl.where(index == body, last, word)
            if DEPTH >= 3:
                a = _step(a, word, there, _MULTIPLIER_A, _ROTATION_A, _ROTATED_A)
                b = _step(b, word, there, _MULTIPLIER_B, _ROTATION_B, _ROTATED_B)
            if SIZE == 8:
                upper = tl.load(words + index + 1, mask=index < body, other=0)
                if DEPTH >= 3:
                    a_second = _step(a_second, upper, there, _MULTIPLIER_A, _ROTATION_A, _ROTATED_A)
                    b_second = _step(b_second, upper, there, _MULTIPLIER_B, _ROTATION_B, _ROTATED_B)
                common = classify_wide(word, upper, there, common, KIND)
                if DEPTH >= 2:
                    key = upper if KIND == SIGNED else upper ^ INT_MIN
                    second = word ^ INT_MIN
                    less = (key < low) | ((key == low) & (second < low_second))
                    more = (key > high) | ((key == high) & (second > high_second))
                    low = tl.where(there & less, key, low)
                    low_second = tl.where(there & less, second, low_second)
                    high = tl.where(there & more, key, high)
                    high_second = tl.where(there & more, second, high_second)
                    x = wide_magnitude(word, upper, KIND)
                    run_abs_rest += x
                    run_mid += x * x
                    if KIND == SIGNED:
                        x = tl.where(upper < 0, -x, x)
                    run_rest += x
            else:
                for k in tl.static_range(PER_WORD):
                    inside = there if PER_WORD == 1 else index * PER_WORD + k < components
                    value = component(word, k, SIZE, KIND)
                    included = inside
                    key = value
                    if KIND == FLOAT:
                        common, rare, magnitude, negative, finite = classify(
                            value, inside, common, rare, SIZE, MANTISSA
                        )
                        key = tl.where(negative, -magnitude, magnitude)
                        included = inside & finite
                    else:
                        common = classify_integer(value, inside, common, SIZE, KIND)
                        if KIND == BOOL:
                            key = tl.where(value != 0, 1, 0)
                        elif KIND == UNSIGNED and SIZE == 4:
                            key = value ^ INT_MIN
                    if DEPTH >= 2:
                        low = tl.minimum(low, tl.where(included, key, INT_MAX))
                        high = tl.maximum(high, tl.where(included, key, INT_MIN))
                        if SCALED:
                            big, rest, signed_big, signed_rest, mid, small = scaled_parts(
                                magnitude, negative, MANTISSA
                            )
                            run_abs_big += big
                            run_abs_rest += rest
                            run_big += signed_big
                            run_rest += signed_rest
                            run_square_big += big * big
                            run_mid += mid * mid
                            run_low += small * small
                        elif KIND == FLOAT:
                            x = half_value(magnitude, finite)
                            run_abs_rest += x
                            run_rest += tl.where(negative, -x, x)
                            run_mid += x * x
                        elif KIND == UNSIGNED and SIZE == 4:
                            x = unsigned_value(value)
                            run_abs_rest += x
                            run_rest += x
                            run_mid += x * x
                        else:
                            x = key.to(tl.float32)
                            run_abs_rest += tl.abs(x)
                            run_rest += x
                            run_mid += x * x
        zero += common & 0xFF
        saturated += (common >> 16) & 0xFF
        negative_count += (common >> 24) & 0xFF
        if KIND == FLOAT:
            subnormal += (common >> 8) & 0xFF
            nan += rare & 0xFF
            posinf += (rare >> 8) & 0xFF
            neginf += (rare >> 16) & 0xFF
        if DEPTH >= 2:
            sum_rest, sum_rest_off = add_exactly(sum_rest, sum_rest_off, run_rest)
            abs_rest, abs_rest_off = add_exactly(abs_rest, abs_rest_off, run_abs_rest)
            square_mid, square_mid_off = add_exactly(square_mid, square_mid_off, run_mid)
            if SCALED:
                sum_big, sum_big_off = add_exactly(sum_big, sum_big_off, run_big)
                abs_big, abs_big_off = add_exactly(abs_big, abs_big_off, run_abs_big)
                square_big, square_big_off = add_exactly(square_big, square_big_off, run_square_big)
                square_low, square_low_off = add_exactly(square_low, square_low_off, run_low)
        if DEPTH >= 3:
            exists = first + place < count  # chains without a word have no term
            a, b = _finish_chains(a, b)
            total_a += tl.where(exists, a, 0)
            total_b += tl.where(exists, b, 0)
            if SIZE == 8:
                a_second, b_second = _finish_chains(a_second, b_second)
                total_a += tl.where(exists, a_second, 0)
                total_b += tl.where(exists, b_second, 0)
    _store_count(out, 0, column, nan, IS_PART)
    _store_count(out, 1, column, posinf, IS_PART)
    _store_count(out, 2, column, neginf, IS_PART)
    _store_count(out, 3, column, zero, IS_PART)
    _store_count(out, 4, column, subnormal, IS_PART)
    _store_count(out, 5, column, negative_count, IS_PART)
    _store_count(out, 6, column, saturated, IS_PART)
    if DEPTH >= 2:
        if SIZE == 8:
            low_key, low_key_second = _smallest(low, low_second)
            high_key, high_key_second = _largest(high, high_second)
        else:
            low_key, low_key_second = tl.min(tl.min(low, 1), 0), 0
            high_key, high_key_second = tl.max(tl.max(high, 1), 0), 0
        all_rest, all_big = _sum(sum_rest + sum_rest_off), _sum(sum_big + sum_big_off)
        absolute_rest, absolute_big = _sum(abs_rest + abs_rest_off), _sum(abs_big + abs_big_off)
        squares_mid = _sum(square_mid + square_mid_off)
        squares_big = _sum(square_big + square_big_off)
        squares_low = _sum(square_low + square_low_off)
        if IS_PART:
            ends, sums = out + RANGE * column, out + SUMS * column
            tl.store(ends, low_key)
            tl.store(ends + column, low_key_second)
            tl.store(ends + 2 * column, high_key)
            tl.store(ends + 3 * column, high_key_second)
            _store_float(sums, all_rest)
            _store_float(sums + column, all_big)
            _store_float(sums + 2 * column, absolute_rest)
            _store_float(sums + 3 * column, absolute_big)
            _store_float(sums + 4 * column, squares_mid)
            _store_float(sums + 5 * column, squares_big)
            _store_float(sums + 6 * column, squares_low)
        else:
            store_extremes(
                out, low_key, low_key_second, high_key, high_key_second, SIZE, KIND, MANTISSA
            )
            store_sums(
                out,
                all_rest,
                all_big,
                absolute_rest,
                absolute_big,
                squares_mid,
                squares_big,
                squares_low,
                SIZE,
                KIND,
                MANTISSA,
            )
    if DEPTH >= 3:
        a, b = _wrapped_sum(total_a), _wrapped_sum(total_b)
        if IS_PART:
            tl.store(out + CHECKSUM * column, a)
            tl.store(out + (CHECKSUM + 1) * column, b)
        else:
            store_pair(out, 13, with_length(a, length_a), with_length(b, length_b))
    elif not IS_PART:
        store_zeros(out, 8 if DEPTH < 2 else 13, 14)
