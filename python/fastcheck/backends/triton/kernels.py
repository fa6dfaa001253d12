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

from fastcheck.record.format import RECORD_BYTES

from .components import INT_MAX, INT_MIN, joined
from .read import CHECKSUM, RANGE, SUMS, add_exactly, read
from .record import store_extremes, store_pair, store_sums, store_zeros, with_length

#: The columns of partials (read.py).
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
    partials,
    slot,
    stride,
    count,  # rows of partials
    numel_low,
    numel_high,
    length_a,
    length_b,
    SIZE: tl.constexpr,
    KIND: tl.constexpr,
    MANTISSA: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
    words,
    tail,
    slot,
    body,
    tail_count,
    components,
    seed_a,
    seed_b,
    rows,
    numel_low,
    numel_high,
    length_a,
    length_b,
    SIZE: tl.constexpr,
    KIND: tl.constexpr,
    MANTISSA: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUPS: tl.constexpr,
):
    store_pair(slot, 0, numel_low, numel_high)
    read(
        words,
        tail,
        slot,
        0,
        length_a,
        length_b,
        body,
        tail_count,
        components,
        seed_a,
        seed_b,
        rows,
        0,
        1,
        SIZE,
        KIND,
        MANTISSA,
        DEPTH,
        GROUPS,
        False,
    )


@triton.jit(do_not_specialize=[*_SIZES, "stride", "first_row"])
def part_kernel(
    words,
    tail,
    partials,  # a column is ``stride`` long; a program's row is first_row + its number
    stride,
    first_row,
    body,
    tail_count,
    components,
    seed_a,
    seed_b,
    rows,
    SIZE: tl.constexpr,
    KIND: tl.constexpr,
    MANTISSA: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUPS: tl.constexpr,
):
    read(
        words,
        tail,
        partials + first_row + tl.program_id(0),
        stride,
        0,
        0,
        body,
        tail_count,
        components,
        seed_a,
        seed_b,
        rows,
        tl.program_id(0),
        tl.num_programs(0),
        SIZE,
        KIND,
        MANTISSA,
        DEPTH,
        GROUPS,
        True,
    )


@triton.jit(do_not_specialize=["stride", "seed_a", "seed_b"])
def part_list_kernel(
    addresses,  # int64, of each tensor, divisible by 4
    owners,  # of each program, the tensor that it reads of
    shapes,  # SHAPE_FIELDS for each tensor
    partials,
    stride,
    seed_a,
    seed_b,
    SIZE: tl.constexpr,
    KIND: tl.constexpr,
    MANTISSA: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUPS: tl.constexpr,
):
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
    read(
        words,
        tail,
        partials + tl.program_id(0),
        stride,
        0,
        0,
        body,
        tail_count,
        tl.load(shape + 2),
        seed_a,
        seed_b,
        tl.load(shape + 3),
        tl.program_id(0) - tl.load(shape + 4),
        tl.load(shape + 5),
        SIZE,
        KIND,
        MANTISSA,
        DEPTH,
        GROUPS,
        True,
    )


@triton.jit(do_not_specialize=["stride"])
def fold_list_kernel(
    shapes,  # SHAPE_FIELDS for each tensor, a program each
    partials,
    slots,
    stride,
    SIZE: tl.constexpr,
    KIND: tl.constexpr,
    MANTISSA: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    shape = shapes + tl.program_id(0) * _FIELDS
    fold_kernel(
        partials + tl.load(shape + 4),
        slots + tl.load(shape + 10) * _SLOT_WORDS,
        stride,
        tl.load(shape + 5),
        tl.load(shape + 6),
        tl.load(shape + 7),
        tl.load(shape + 8),
        tl.load(shape + 9),
        SIZE,
        KIND,
        MANTISSA,
        DEPTH,
        BLOCK,
    )
