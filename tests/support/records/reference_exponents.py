"""The exponent counts of a tensor, computed slowly from docs/record-format.md, section 10, alone.

exponent_words(tensor) -> a list of 328 ints
"""

from __future__ import annotations

import math
import struct

import torch

from support.records.reference import bit_patterns, classify, decode, dtype_of, traversal

BINS = 64
ELEMENTS, MAXIMA_32, MAXIMA_16, BELOW_32, BELOW_16 = (8 + BINS * part for part in range(5))
WORDS = 8 + 5 * BINS


def floor_log2(x: float) -> int:
    return math.frexp(x)[1] - 1


def ceil_log2(x: float) -> int:
    mantissa, exponent = math.frexp(x)
    return exponent - 1 if mantissa == 0.5 else exponent


def exponent_words(tensor: torch.Tensor, order: str = "storage") -> list[int]:
    """The words of the traversal's components."""
    raw, _ = traversal(tensor, order)
    dtype = dtype_of(tensor)
    bits = bit_patterns(raw, dtype)
    values, classes = decode(bits, dtype), classify(bits, dtype)
    is_finite = ~(classes["nan"] | classes["posinf"] | classes["neginf"])
    return words_of_values(
        [abs(float(x)) if ok else math.nan for x, ok in zip(values, is_finite, strict=True)]
    )


def words_of_values(magnitudes: list[float]) -> list[int]:
    """The same of magnitudes, NaN for what is not finite."""
    words = [0] * WORDS
    words[0] = len(magnitudes)
    words[1] = sum(map(math.isnan, magnitudes))
    words[2] = magnitudes.count(0.0)
    finite = [0.0 if math.isnan(x) else x for x in magnitudes]
    largest = max(finite, default=0.0)
    if largest == 0:
        return words
    words[3], words[4] = ceil_log2(largest), floor_log2(largest)
    (words[5],) = struct.unpack("<q", struct.pack("<d", largest))
    words[6] = ceil_log2(min(filter(None, finite)))
    for x in filter(None, finite):
        words[ELEMENTS + min(words[3] - ceil_log2(x), BINS - 1)] += 1
    for size, maxima, below in ((32, MAXIMA_32, BELOW_32), (16, MAXIMA_16, BELOW_16)):
        for start in range(0, len(finite), size):
            block = finite[start : start + size]
            if max(block) == 0:
                continue
            top = floor_log2(max(block))
            words[maxima + min(words[4] - top, BINS - 1)] += 1
            for x in filter(None, block):
                words[below + min(top + 1 - ceil_log2(x), BINS - 1)] += 1
    return words
