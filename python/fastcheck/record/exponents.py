"""Exponents: how many elements of a tensor are in each binade, and what that means for a format.

The 328 words are specified in ``docs/record-format.md``, section 10. Every share follows from them,
on any machine and afterwards. A limit of a format that lies within a binade gives a share between
two bounds; most limits of underflow are powers of two, whose share is exact.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from fastcheck.errors import ConfigError

from .number_formats import BlockFormat, NumberFormat, number_format

EXPONENT_BINS = 64
#: Words of the header, and where each histogram begins.
_ABS_MAX, _BOTTOM, _ELEMENTS = 5, 6, 8
_MAXIMA = {32: _ELEMENTS + EXPONENT_BINS, 16: _ELEMENTS + 2 * EXPONENT_BINS}
_BELOW = {32: _ELEMENTS + 3 * EXPONENT_BINS, 16: _ELEMENTS + 4 * EXPONENT_BINS}
EXPONENT_WORDS = _ELEMENTS + 5 * EXPONENT_BINS

# An element of NVFP4 is zero up to 1/24 of the block's maximum, if the scale were exact. Rounded to
# float8 it is off by up to 1/16, as a subnormal by up to a third.
_NVFP4_ZERO, _NVFP4_KEPT, _NVFP4_ZERO_COARSE = 6, 3, 7
# So many binades below the tensor's maximum a block's scale may be subnormal (448 * 2^-14 < 2^-5).
_NVFP4_COARSE_FROM = 14
_MX_LEAST_SCALE = -127


class Share(NamedTuple):
    """A share of a tensor's elements that are finite and not zero, from 0 to 1, between two bounds.
    They are equal where the counts decide it.
    """

    least: float
    most: float

    @property
    def is_exact(self) -> bool:
        """True if the two bounds are equal."""
        return self.least == self.most

    def __str__(self) -> str:
        if self.is_exact:
            return _percent(self.least)
        return f"{_percent(self.least)} to {_percent(self.most)}"


class Exponents:
    """The distribution of a tensor's magnitudes over binades; ``+`` adds those of another reading.

    The histograms are NumPy arrays of 64 counts (int64). Bin j of ``elements`` counts magnitudes
    in ``(2**(top - j - 1), 2**(top - j)]``; the last bin all that are smaller. Complex tensors are
    counted by their parts. Blocks are 32 or 16 components that are adjacent in the order of
    memory (row-major where the tensor is not dense): the blocks of MX formats and of NVFP4 if the
    last dimension is a multiple of their size.
    """

    __slots__ = ("words",)

    def __init__(self, words: np.ndarray) -> None:
        #: int64 (328,), as ``docs/record-format.md`` has it.
        self.words: np.ndarray = np.asarray(words, np.int64)
        if self.words.shape != (EXPONENT_WORDS,):
            raise ConfigError(
                f"counts of exponents are {EXPONENT_WORDS} words, got the shape {self.words.shape}"
            )

    @property
    def components(self) -> int:
        """All components that were read: of a complex tensor, two per element."""
        return int(self.words[0])

    @property
    def nonfinite_count(self) -> int:
        """Components that are NaN or infinite; counted in no binade."""
        return int(self.words[1])

    @property
    def zero_count(self) -> int:
        """Zeros of either sign; counted in no binade."""
        return int(self.words[2])

    @property
    def count(self) -> int:
        """Components that are finite and not zero: what every share is of."""
        return self.components - self.nonfinite_count - self.zero_count

    @property
    def abs_max(self) -> float:
        """The largest finite magnitude, exact; 0 where there is none."""
        return float(self.words[_ABS_MAX : _ABS_MAX + 1].view(np.float64)[0])

    @property
    def top(self) -> int:
        """``ceil(log2(abs_max))``: of the first bin of ``elements``."""
        return int(self.words[3])

    @property
    def bottom(self) -> int:
        """``ceil(log2)`` of the smallest magnitude that is not zero."""
        return int(self.words[_BOTTOM])

    @property
    def block_top(self) -> int:
        """``floor(log2(abs_max))``: of the first bin of ``maxima()``."""
        return int(self.words[4])

    @property
    def elements(self) -> np.ndarray:
        """The number of components in each binade: 64 counts, from the highest binade down."""
        return self._bins(_ELEMENTS)

    def maxima(self, block: int = 32) -> np.ndarray:
        """The number of blocks (of 32 or 16) that have their largest magnitude in ``[2**(block_top
        - j), 2**(block_top - j + 1))``, by j; blocks of zeros are left out.
        """
        return self._bins(_MAXIMA[_checked_block(block)])

    def below(self, block: int = 32) -> np.ndarray:
        """The number of elements that are so many binades below the maximum of their block: with
        ``m`` the largest power of two up to it, in ``(m * 2**-j, m * 2**(1 - j)]``.
        """
        return self._bins(_BELOW[_checked_block(block)])

    def _bins(self, first: int) -> np.ndarray:
        return self.words[first : first + EXPONENT_BINS]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Exponents) and bool((self.words == other.words).all())

    __hash__ = None  # type: ignore[assignment]  # the words may be written to

    def __repr__(self) -> str:
        return f"<Exponents: {self.count:,} of {self.components:,}, to 2**{self.top}>"

    def __add__(self, other: Exponents) -> Exponents:
        words = self.words + other.words
        larger, smaller = (self, other) if self.abs_max >= other.abs_max else (other, self)
        words[3:_ELEMENTS] = larger.words[3:_ELEMENTS]
        if smaller.abs_max > 0:
            words[_BOTTOM] = min(self.bottom, other.bottom)
            for first in (_ELEMENTS, *_MAXIMA.values()):
                place = 3 if first == _ELEMENTS else 4
                shift = min(int(larger.words[place] - smaller.words[place]), EXPONENT_BINS - 1)
                moved = np.zeros(EXPONENT_BINS, np.int64)
                bins = smaller._bins(first)
                moved[shift:] = bins[: EXPONENT_BINS - shift]
                moved[-1] += bins[EXPONENT_BINS - shift :].sum()
                words[first : first + EXPONENT_BINS] = larger._bins(first) + moved
        return Exponents(words)

    # Shares

    def share_above(self, format: str, scale: float = 1.0) -> Share:
        """The share that overflows when each element times ``scale`` is rounded to ``format``
        (``"float16"``, ``"bfloat16"``, ``"float8_e4m3fn"``, ``"float8_e5m2"``); of a block format
        (``"mxfp8_e4m3"``, ``"mxfp8_e5m2"``, ``"mxfp4"``, ``"nvfp4"``) the share that is clipped.

        Not more than 0 where ``abs_max`` fits. Otherwise the limit lies within a binade, and the
        bounds differ by what is in it.

        Raises:
            ConfigError: an unknown format, a scale that is not above 0, or a scale for a block
                format, which has scales of its own.
        """
        target = number_format(format)
        _check_scale(target, scale)
        if isinstance(target, BlockFormat):
            if target.scale_format is not None:
                return self._share(0, 0)
            # Between the last number of a format and the end of its binade.
            return self._share(0, int(self.below(target.block)[0]))
        limit = target.overflow_from / scale
        if self.abs_max < limit or (self.abs_max == limit and not target.ties_overflow):
            return self._share(0, 0)
        lower, upper = self._limits()
        is_above = lower >= limit
        least = max(int(self.elements[is_above].sum()), 1)
        return self._share(least, int(self.elements[upper >= limit].sum()))

    def share_below(self, format: str, scale: float = 1.0) -> Share:
        """The share that becomes zero when each element times ``scale`` is rounded to ``format``.
        Exact for a ``scale`` that is a power of two, and for MX formats; errors as of
        share_above().
        """
        target = number_format(format)
        _check_scale(target, scale)
        if isinstance(target, BlockFormat):
            return self._below_in_blocks(target)
        return self._share(*self._up_to(math.ldexp(1.0, target.zero_exponent) / scale))

    def share_subnormal(self, format: str, scale: float = 1.0) -> Share:
        """The share up to the smallest normal number of ``format`` that does not become zero: it
        loses some of its bits, but for that number itself. Not of block formats.
        """
        target = number_format(format)
        if isinstance(target, BlockFormat):
            raise ConfigError(f"elements of {target.name}, a block format, have no fixed range")
        _check_scale(target, scale)
        small = self._up_to(math.ldexp(1.0, target.least_exponent) / scale)
        lost = self._up_to(math.ldexp(1.0, target.zero_exponent) / scale)
        return self._share(max(small[0] - lost[1], 0), small[1] - lost[0])

    def _up_to(self, limit: float) -> tuple[int, int]:
        """The number of magnitudes of at most ``limit``: at least, and at most."""
        lower, upper = self._limits()
        least, most = self.elements[upper <= limit].sum(), self.elements[lower < limit].sum()
        return int(least), int(most)

    def _below_in_blocks(self, target: BlockFormat) -> Share:
        below, maxima = self.below(target.block), self.maxima(target.block)
        places = np.arange(EXPONENT_BINS)
        if target.scale_format is not None:
            coarse = int(maxima[_NVFP4_COARSE_FROM:].sum())
            sure = _NVFP4_ZERO_COARSE if coarse else _NVFP4_ZERO
            least = int(below[places >= sure].sum())
            most = int(below[places > _NVFP4_KEPT].sum()) + coarse * target.block
            return self._share(least, most)
        element = target.element
        # The block's maximum is in the last binade of the element's format.
        last = math.frexp(element.largest)[1] - 1
        lost = int(below[places >= last + 1 - element.zero_exponent].sum())
        # The scale of these blocks would have to be smaller than it can be; it is not known for
        # those in the last bin.
        is_tiny = self.block_top - places - last < _MX_LEAST_SCALE
        tiny = int(maxima[:-1][is_tiny[:-1]].sum() + maxima[-1])
        return self._share(lost, lost + tiny * target.block)

    def _limits(self) -> tuple[np.ndarray, np.ndarray]:
        """The limits of the elements' bins: what all are above, and up to where they go."""
        with np.errstate(over="ignore", under="ignore"):
            upper = np.ldexp(1.0, self.top - np.arange(EXPONENT_BINS))
            lower = upper / 2
            lower[-1] = np.ldexp(1.0, min(self.bottom, self.top - EXPONENT_BINS + 1) - 1)
        return lower, upper

    def _share(self, least: int, most: int) -> Share:
        whole = self.count
        return Share(least / whole, min(most, whole) / whole) if whole else Share(0.0, 0.0)


def _checked_block(block: int) -> int:
    if block in _MAXIMA:
        return block
    raise ConfigError(f"blocks have 32 or 16 elements, got {block!r}")


def _check_scale(target: NumberFormat | BlockFormat, scale: float) -> None:
    is_number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    if not is_number or not 0 < scale < math.inf:
        raise ConfigError(f"scale must be a number above 0, got {scale!r}")
    if isinstance(target, BlockFormat) and scale != 1:
        raise ConfigError(f"{target.name} has scales of its own: scale must be 1, got {scale!r}")


def _percent(share: float) -> str:
    percent = 100 * share
    if 0 < percent < 0.01:
        return "<0.01 %"
    return f"{percent:.3g} %"
