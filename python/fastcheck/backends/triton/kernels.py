"""The Triton kernels that write records.

``whole_kernel`` is one program that reads a tensor and writes its slot. Of a larger tensor
``part_kernel`` writes a row of partials for each program, and ``fold_kernel``, one program, folds
the rows into the slot. Of a list ``part_list_kernel`` writes such rows for all tensors of a dtype,
and ``fold_list_kernel`` has a program for each. No atomics; offsets are 32-bit, so that a launch
reads less than 2^31 components of a tensor.

Importing this needs triton; nothing imports it before a tensor is to be read with it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastcheck.backends.portable.checksum import FINISH, MULTIPLIERS, PLACES, ROTATIONS, signed
from fastcheck.record.format import RECORD_BYTES

# ---- components ----------------------------------------------------------------------------------
#
# Triton functions for one component: its class and its float32 value, from its bits.
#
# Everything is 32-bit integers and float32: no float64 or 64-bit vectors, no comparison of floats.
# float32's range doesn't fit its own squares, so formats of that range are summed apart by
# magnitude, each part scaled by a power of two in the exponent's own bits. No operand is ever
# subnormal: a device may flush those.
#
# ====  =====================  ==============================
# part  magnitudes             scale in the sums, and squared
# ====  =====================  ==============================
# big   2^42 and above         2^-84, 2^-84
# mid   2^-48 to below 2^42    2^40, 1
# low   below 2^-48            2^40, 2^90
# ====  =====================  ==============================

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


# ---- the bytes of a record -----------------------------------------------------------------------
#
# Triton functions that assemble the bytes of a record from 32-bit integers and float32.
#
# A float64 is put together from its bits. The scales of the sums are undone there, in
# the exponent, so that the end of float32's range is not the end of a sum.


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
    slot, low, low_second, high, high_second,
    SIZE: tl.constexpr, KIND: tl.constexpr, MANTISSA: tl.constexpr,
):  # fmt: skip
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
    slot, sum_rest, sum_big, abs_rest, abs_big, square_mid, square_big, square_low,
    SIZE: tl.constexpr, KIND: tl.constexpr, MANTISSA: tl.constexpr,
):  # fmt: skip
    """Undoes the scales of the sums. A part far below the next is left out of it."""
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


# ---- the main loop -------------------------------------------------------------------------------
#
# Triton functions of the main loop: one program reads its share of a tensor, and stores a row of
# partials, or the record.
#
# A tensor is read as 32-bit words, several components to a word where they are narrower. A step is
# ``GROUPS`` runs of chains (docs/record-format.md, section 7): up to 16 words for each lane, one
# after the other, so that the checksum's chains and the sums advance together. A program takes
# every P-th step, P the number of the tensor's programs.
#
# Counts, extremes and checksum are exact. Sums are float32 within a run; runs add up in pairs of
# float32 whose second half carries the rounding of the first.

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
    words, tail,
    out,  # a row of partials, or the record, of which all but numel is stored
    column,  # from one partial of the row to the next
    length_a, length_b,  # of the record
    body,  # whole words
    tail_count,  # components behind them
    components,
    seed_a, seed_b,  # of the first chain
    rows,  # of the longest chain
    first_step,  # of this program
    stride,  # to its next one
    SIZE: tl.constexpr, KIND: tl.constexpr, MANTISSA: tl.constexpr, DEPTH: tl.constexpr,
    GROUPS: tl.constexpr, IS_PART: tl.constexpr,
):  # fmt: skip
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
                out, all_rest, all_big, absolute_rest, absolute_big,
                squares_mid, squares_big, squares_low, SIZE, KIND, MANTISSA,
            )  # fmt: skip
    if DEPTH >= 3:
        a, b = _wrapped_sum(total_a), _wrapped_sum(total_b)
        if IS_PART:
            tl.store(out + CHECKSUM * column, a)
            tl.store(out + (CHECKSUM + 1) * column, b)
        else:
            store_pair(out, 13, with_length(a, length_a), with_length(b, length_b))
    elif not IS_PART:
        store_zeros(out, 8 if DEPTH < 2 else 13, 14)


# ---- the kernels ---------------------------------------------------------------------------------

#: The columns of partials.
COLUMNS = 20

#: Sizes vary from tensor to tensor: no kernel is compiled again for a size that is 1, or even.
_SIZES = ["tail", "body", "tail_count", "components", "seed_a", "seed_b", "rows"]
_NUMBERS = ["numel_low", "numel_high", "length_a", "length_b"]


@triton.jit
def _folded_halves(partials, stride, count, column: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of the lower and of the upper 16 bits. Below 2^47 in all, nothing passes 2^31."""
    place = tl.arange(0, BLOCK)
    lower = tl.zeros([BLOCK], tl.int32)
    upper = tl.zeros([BLOCK], tl.int32)
    for first in range(0, count, BLOCK):
        x = tl.load(partials + column * stride + first + place, mask=first + place < count, other=0)
        lower += x & 0xFFFF
        upper += ((x >> 16) & 0xFFFF) + (lower >> 16)
        lower &= 0xFFFF
    return tl.sum(upper, 0), tl.sum(lower, 0)


@triton.jit
def _folded_sum(partials, stride, count, column: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    rest = tl.zeros([BLOCK], tl.float32)
    for first in range(0, count, BLOCK):
        x = tl.load(partials + column * stride + first + place, mask=first + place < count, other=0)
        total, rest = add_exactly(total, rest, x.to(tl.float32, bitcast=True))
    return tl.sum(total + rest, 0)


@triton.jit
def _folded_extreme(
    partials, stride, count, column: tl.constexpr, IS_LOW: tl.constexpr, BLOCK: tl.constexpr
):
    """The smallest or largest pair of column and the column behind it."""
    NOTHING: tl.constexpr = INT_MAX if IS_LOW else INT_MIN
    place = tl.arange(0, BLOCK)
    best = tl.zeros([BLOCK], tl.int32) + NOTHING
    best_second = tl.zeros([BLOCK], tl.int32) + NOTHING
    for first in range(0, count, BLOCK):
        at = partials + column * stride + first + place
        x = tl.load(at, mask=first + place < count, other=NOTHING)
        second = tl.load(at + stride, mask=first + place < count, other=NOTHING)
        if IS_LOW:
            better = (x < best) | ((x == best) & (second < best_second))
        else:
            better = (x > best) | ((x == best) & (second > best_second))
        best = tl.where(better, x, best)
        best_second = tl.where(better, second, best_second)
    if IS_LOW:
        first_half = tl.min(best, 0)
        second_half = tl.min(tl.where(best == first_half, best_second, NOTHING), 0)
    else:
        first_half = tl.max(best, 0)
        second_half = tl.max(tl.where(best == first_half, best_second, NOTHING), 0)
    return first_half, second_half


@triton.jit(do_not_specialize=["stride", "count", *_NUMBERS])
def fold_kernel(
    partials, slot, stride,
    count,  # rows of partials
    numel_low, numel_high, length_a, length_b,
    SIZE: tl.constexpr, KIND: tl.constexpr, MANTISSA: tl.constexpr, DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    store_pair(slot, 0, numel_low, numel_high)
    for k in tl.static_range(7):
        upper, lower = _folded_halves(partials, stride, count, k, BLOCK)
        store_pair(slot, k + 1, joined(upper, lower), (upper + (lower >> 16)) >> 16)
    if DEPTH >= 2:
        low, low_second = _folded_extreme(partials, stride, count, RANGE, True, BLOCK)
        high, high_second = _folded_extreme(partials, stride, count, RANGE + 2, False, BLOCK)
        store_extremes(slot, low, low_second, high, high_second, SIZE, KIND, MANTISSA)
        store_sums(
            slot,
            _folded_sum(partials, stride, count, SUMS, BLOCK),
            _folded_sum(partials, stride, count, SUMS + 1, BLOCK),
            _folded_sum(partials, stride, count, SUMS + 2, BLOCK),
            _folded_sum(partials, stride, count, SUMS + 3, BLOCK),
            _folded_sum(partials, stride, count, SUMS + 4, BLOCK),
            _folded_sum(partials, stride, count, SUMS + 5, BLOCK),
            _folded_sum(partials, stride, count, SUMS + 6, BLOCK),
            SIZE,
            KIND,
            MANTISSA,
        )
    else:
        store_zeros(slot, 8, 13)
    if DEPTH >= 3:
        upper, lower = _folded_halves(partials, stride, count, CHECKSUM, BLOCK)
        a = with_length(joined(upper, lower), length_a)
        upper, lower = _folded_halves(partials, stride, count, CHECKSUM + 1, BLOCK)
        store_pair(slot, 13, a, with_length(joined(upper, lower), length_b))
    else:
        store_zeros(slot, 13, 14)


#: int32 of a list's table for each tensor: body, tail_count, components, rows (see read()), the
#: first row of partials, their count, the halves of numel, the lengths' terms, the slot.
SHAPE_FIELDS = 11
_FIELDS = tl.constexpr(SHAPE_FIELDS)
_SLOT_WORDS = tl.constexpr(RECORD_BYTES // 4)


@triton.jit(do_not_specialize=[*_SIZES, *_NUMBERS])
def whole_kernel(
    words, tail, slot, body, tail_count, components, seed_a, seed_b, rows,
    numel_low, numel_high, length_a, length_b,
    SIZE: tl.constexpr, KIND: tl.constexpr, MANTISSA: tl.constexpr, DEPTH: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    store_pair(slot, 0, numel_low, numel_high)
    read(
        words, tail, slot, 0, length_a, length_b,
        body, tail_count, components, seed_a, seed_b, rows, 0, 1,
        SIZE, KIND, MANTISSA, DEPTH, GROUPS, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=[*_SIZES, "stride", "first_row"])
def part_kernel(
    words, tail,
    partials,  # a column is ``stride`` long; a program's row is first_row + its number
    stride, first_row,
    body, tail_count, components, seed_a, seed_b, rows,
    SIZE: tl.constexpr, KIND: tl.constexpr, MANTISSA: tl.constexpr, DEPTH: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    read(
        words, tail, partials + first_row + program, stride, 0, 0,
        body, tail_count, components, seed_a, seed_b, rows, program, tl.num_programs(0),
        SIZE, KIND, MANTISSA, DEPTH, GROUPS, True,
    )  # fmt: skip


@triton.jit(do_not_specialize=["stride", "seed_a", "seed_b"])
def part_list_kernel(
    addresses,  # int64, of each tensor, divisible by 4
    owners,  # of each program, the tensor that it reads of
    shapes,  # SHAPE_FIELDS for each tensor
    partials, stride, seed_a, seed_b,
    SIZE: tl.constexpr, KIND: tl.constexpr, MANTISSA: tl.constexpr, DEPTH: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    TAIL: tl.constexpr = tl.int8 if SIZE == 1 else (tl.int16 if SIZE == 2 else tl.int32)
    owner = tl.load(owners + tl.program_id(0))
    address = tl.load(addresses + owner)
    shape = shapes + owner * _FIELDS
    body = tl.load(shape)
    tail_count = tl.load(shape + 1)
    # Without components behind the last word, what is read in their place is the first component.
    behind = tl.where(tail_count > 0, body, 0)
    words = address.to(tl.pointer_type(tl.int32))
    tail = address.to(tl.pointer_type(TAIL)) + behind * (4 // SIZE if SIZE < 4 else 1)
    first_step = tl.program_id(0) - tl.load(shape + 4)
    read(
        words, tail, partials + tl.program_id(0), stride, 0, 0,
        body, tail_count, tl.load(shape + 2), seed_a, seed_b, tl.load(shape + 3),
        first_step, tl.load(shape + 5), SIZE, KIND, MANTISSA, DEPTH, GROUPS, True,
    )  # fmt: skip


@triton.jit(do_not_specialize=["stride"])
def fold_list_kernel(
    shapes,  # SHAPE_FIELDS for each tensor, a program each
    partials, slots, stride,
    SIZE: tl.constexpr, KIND: tl.constexpr, MANTISSA: tl.constexpr, DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    shape = shapes + tl.program_id(0) * _FIELDS
    fold_kernel(
        partials + tl.load(shape + 4), slots + tl.load(shape + 10) * _SLOT_WORDS, stride,
        tl.load(shape + 5), tl.load(shape + 6), tl.load(shape + 7), tl.load(shape + 8),
        tl.load(shape + 9), SIZE, KIND, MANTISSA, DEPTH, BLOCK,
    )  # fmt: skip
