"""The checksum (docs/record-format.md, section 7) in 32-bit ATen operations, all chains at once.

A chain takes its 16 words one after the other; what is parallel are the chains of all tiles and
both halves. int32 wraps as the specification's unsigned integers do, and a shift to the right
masks what the sign brings in.
"""

from __future__ import annotations

import functools
from typing import Optional

import torch

from .constants import constant

_MASK32 = (1 << 32) - 1
_RUN_ROWS = 16


def signed(value: int) -> int:
    """The int32 of the same 32 bits."""
    value &= _MASK32
    return value - (1 << 32) if value >> 31 else value


# Constants of the halves a and b.
_S = (0x243F6A88, 0x13198A2E)
PLACES = (0x9E3779B1, 0xC2B2AE3D)
_Q = (0x85EBCA77, 0x27D4EB2F)
MULTIPLIERS = (0xCC9E2D51, 0x9E3779B9)
ROTATIONS = (13, 19)
# The finish of a chain: which half changes, the shift of the other, the factor.
FINISH = (
    (0, 15, 0x85EBCA6B),
    (1, 13, 0xC2B2AE35),
    (0, 16, 0x27D4EB2F),
    (1, 14, 0x9E3779B1),
    (0, 15, 1),
)


def row_words(component_bytes: int) -> int:
    """32-bit words in a row of 64 components."""
    return 16 * component_bytes


def words_of(bits: torch.Tensor, component_bytes: int) -> torch.Tensor:
    """int32 (tiles, 4, 16, W) of flat bits that fill whole tiles; a view where alignment allows."""
    if bits.storage_offset() * component_bytes % 4 != 0:
        bits = bits.clone()
    return bits.view(torch.int32).view(-1, 4, 16, row_words(component_bytes))


def rows_of(words: int, width: int) -> int:
    """Word-rows that any chain of ``words`` words in rows of ``width`` has."""
    return min(_RUN_ROWS, -(-words // width))


def length_terms(size_bytes: int) -> tuple[int, int]:
    """The terms that the length adds to either half."""
    terms = []
    for s, p, q in zip(_S, PLACES, _Q):
        h = s ^ (((size_bytes & _MASK32) * q + (size_bytes >> 32) * p + 1) & _MASK32)
        h ^= h >> 16
        h = h * 0x85EBCA6B & _MASK32
        h ^= h >> 13
        h = h * 0xC2B2AE35 & _MASK32
        terms.append(h ^ h >> 16)
    return terms[0], terms[1]


def empty() -> int:
    """The checksum of no bytes, as a signed 64-bit integer."""
    a, b = length_terms(0)
    return signed(b) * (1 << 32) + a


@functools.cache
def _halves(values: tuple[int, int], device: torch.device) -> torch.Tensor:
    """int32 (2, 1, 1, 1)."""
    return constant(tuple(map(signed, values)), torch.int32, device).view(2, 1, 1, 1)


def seeds(origin: int) -> tuple[int, int]:
    """The state of chain ``origin`` before its first word, as int32. Chain origin + k, of the same
    upper half, starts at PLACES * k more.
    """
    low, high = origin & _MASK32, origin >> 32
    a, b = (signed(s + low * p + high * q) for s, p, q in zip(_S, PLACES, _Q))
    return a, b


def start(numbers: torch.Tensor, origin: int) -> torch.Tensor:
    """int32 (2, tiles, 4, W): the state of each chain before its first word.

    The number of a chain is ``origin`` plus its place in ``numbers``, int32 (tiles, 4, W); all of
    them have the upper 32 bits of ``origin``.
    """
    state = numbers.mul(_halves(PLACES, numbers.device))
    for half, seed in enumerate(seeds(origin)):
        state[half].add_(seed)
    return state


def chain_sums(
    words: torch.Tensor, state: torch.Tensor, there: Optional[torch.Tensor], rows: int
) -> torch.Tensor:
    """int64 (2, tiles): the terms of each tile's chains added up, to be taken modulo 2^32.

    Args:
        words: int32 (tiles, 4, 16, W).
        state: of :func:`start`.
        there: bool (k, 4, 16, W), which words of the last k tiles exist; None when all do.
        rows: of :func:`rows_of`, the longest chain.
    """
    device = words.device
    left, right = (
        _halves(ROTATIONS, device),
        _halves((32 - ROTATIONS[0], 32 - ROTATIONS[1]), device),
    )
    low = _halves(((1 << ROTATIONS[0]) - 1, (1 << ROTATIONS[1]) - 1), device)
    factor = _halves(MULTIPLIERS, device)
    for row in range(rows):
        rotated = state.bitwise_right_shift(right).bitwise_and_(low)
        rotated.bitwise_or_(state.bitwise_left_shift(left))
        after = torch.addcmul(words[:, :, row], rotated, factor)
        if there is not None:
            ended = after[:, -there.shape[0] :]
            before = state[:, -there.shape[0] :]
            torch.where(there[:, :, row], ended, before, out=ended)
        state = after
    for half, shift, multiplier in FINISH:
        mixed = state[1 - half].bitwise_right_shift(shift).bitwise_and_((1 << (32 - shift)) - 1)
        state[half].bitwise_xor_(mixed)
        if multiplier != 1:
            state[half].mul_(signed(multiplier))
    if there is not None:  # chains without a word
        state[:, -there.shape[0] :].mul_(there[:, :, 0])
    return state.flatten(2).sum(-1)


def join(totals: torch.Tensor) -> torch.Tensor:
    """int64 (...): the checksums of int64 (2, ...) totals of the halves."""
    return totals[0].bitwise_and(_MASK32).bitwise_or_(totals[1].bitwise_left_shift(32))
