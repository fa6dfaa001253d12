"""Advice on the format that a tensor may be stored in, from the exponents of its readings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

from fastcheck.errors import ConfigError, as_list, printable

from .exponents import EXPONENT_WORDS, Exponents, Share
from .format import DTYPES
from .number_formats import NUMBER_FORMATS, number_format
from .site import Site

#: Tried in this order; what is not narrower than the tensor's own dtype is left out.
CANDIDATES = ("float8_e4m3fn", "float8_e5m2", "mxfp8_e4m3", "float16", "bfloat16")
_BITS = {dtype.name: 8 * dtype.component_bytes for dtype in DTYPES if dtype.kind == "f8"}


@dataclass(frozen=True)
class PrecisionAdvice:
    """The formats that the readings of one tensor allow. Only its range is judged, not rounding.

    ``format`` is the narrowest format that loses at most the tolerated share, ``dtype`` itself
    where there is none. ``scale``: the power of two to multiply by before rounding; 1 for bfloat16
    and for formats that scale blocks by themselves. ``lost``: the share of elements, of those that
    are not zero, that becomes zero there. ``because`` gives what rules out the narrower formats.
    ``readings``: how many were added up in ``exponents``; ``is_scaled``: they carried a loss scale.
    """

    site: Optional[Site]
    dtype: str
    format: str
    scale: float
    lost: Share
    because: str
    readings: int
    is_scaled: bool
    exponents: Exponents

    @property
    def goes_down(self) -> bool:
        """True if a format narrower than the tensor's dtype will do."""
        return self.format != self.dtype

    @property
    def text(self) -> str:
        """A line, without the site."""
        if not self.goes_down:
            return f"stays {self.dtype}: {self.because}"
        scale = "" if self.scale == 1 else f" at scale 2^{math.frexp(self.scale)[1] - 1}"
        with_loss_scale = " of the scaled gradient" if self.is_scaled and scale else ""
        why = f" ({self.because})" if self.because else ""
        return (
            f"{self.dtype} to {self.format}{scale}{with_loss_scale}: {self.lost} become zero{why}"
        )

    def __str__(self) -> str:
        return printable(self.text if self.site is None else f"{self.site}: {self.text}")

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, ready for JSON, without the exponents."""
        site = None if self.site is None else self.site.to_dict()
        fields = {**vars(self), "site": site, "lost": list(self.lost), "text": self.text}
        del fields["exponents"]
        return fields


def advice_from_lines(lines: Iterable[Mapping[str, Any]]) -> list[PrecisionAdvice]:
    """The advice from the lines of a log, each with its Site; a site of several ranks is added up.
    Anything that is no such line is left out.
    """
    advice: dict[Site, PrecisionAdvice] = {}
    for line in lines:
        try:
            words = np.zeros(EXPONENT_WORDS, np.int64)
            for place, count in line["words"].items():
                words[int(place)] = count
            site, dtype, exponents = line["site"], str(line["dtype"]), Exponents(words)
            readings, is_scaled = int(line["readings"]), bool(line["is_scaled"])
            before = advice.get(site)
            if before is not None:
                exponents, readings = before.exponents + exponents, before.readings + readings
                is_scaled = is_scaled or before.is_scaled
            advice[site] = advise(
                exponents, dtype, 0.001, site=site, readings=readings, is_scaled=is_scaled
            )
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError):
            continue
    return list(advice.values())


def check_tolerance(tolerance: float) -> None:
    """ConfigError if it is no share from 0 to below 1."""
    is_number = isinstance(tolerance, (int, float)) and not isinstance(tolerance, bool)
    if not is_number or not 0 <= tolerance < 1:
        raise ConfigError(f"tolerance must be a share from 0 to below 1, got {tolerance!r}")


def candidates(formats: Optional[Sequence[str]]) -> tuple[str, ...]:
    """The names of these formats, in their order; CANDIDATES for None. ConfigError if a name is
    unknown, or none is given.
    """
    if formats is None:
        return CANDIDATES
    names = [] if isinstance(formats, str) else as_list(formats)
    if not names:
        raise ConfigError(f"formats must be names of number formats, got {formats!r}")
    return tuple(number_format(name).name for name in names)


def advise(
    exponents: Exponents,
    dtype: str,
    tolerance: float,
    *,
    formats: Sequence[str] = CANDIDATES,
    site: Optional[Site] = None,
    readings: int = 1,
    is_scaled: bool = False,
) -> PrecisionAdvice:
    """The first of ``formats`` that is narrower than ``dtype``, in which nothing overflows at a
    scale that leaves a factor of two above the largest magnitude, and in which at most
    ``tolerance`` of the elements become zero.
    """
    chosen, scale, lost, because = dtype, 1.0, Share(0.0, 0.0), ""
    if exponents.nonfinite_count:
        count = exponents.nonfinite_count
        because = f"{count:,} element{'s were' if count != 1 else ' was'} NaN or infinite"
    elif not exponents.count:
        because = "only zeros were read"
    else:
        ruled_out = []
        for name in formats:
            if number_format(name).bits > 0.75 * _BITS[dtype]:
                continue
            at = _scale_for(exponents, name, tolerance)
            share = exponents.share_below(name, at)
            if share.most <= tolerance:
                chosen, scale, lost = name, at, share
                break
            ruled_out.append(f"{name}: {share}")
        if ruled_out:
            because = "at their best scale become zero in " + ", ".join(ruled_out)
        elif chosen == dtype:
            because = "it is the narrowest already"
    return PrecisionAdvice(
        site, dtype, chosen, scale, lost, because, readings, is_scaled, exponents
    )


def _scale_for(exponents: Exponents, name: str, tolerance: float) -> float:
    """1 where it will do in a format of 16 bits, or where the format has scales of its own; else
    the largest power of two that leaves a factor of two.
    """
    form = NUMBER_FORMATS.get(name)
    if form is None:
        return 1.0
    room = form.largest / exponents.abs_max
    is_wide = form.bits == 16
    if is_wide and room >= 2 and exponents.share_below(name).most <= tolerance:
        return 1.0
    if math.isinf(room):
        room = math.ldexp(1.0, 1000)
    return math.ldexp(1.0, math.frexp(room)[1] - 2)
