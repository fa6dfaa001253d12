"""The number formats that a tensor may be stored in, and where each rounds to zero or overflows.

float16 and bfloat16: IEEE 754 and its upper half. float8_e4m3fn and float8_e5m2: Open Compute
Project, OFP8 rev. 1.0. MXFP8 and MXFP4: OCP Microscaling Formats (MX) v1.0. NVFP4: blocks of 16
float4 with a scale in float8_e4m3fn, and one scale of the tensor in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Optional, Union

from fastcheck.errors import ConfigError, choice


@dataclass(frozen=True)
class NumberFormat:
    """A format whose elements stand alone.

    ``overflow_from``: the magnitude from which on rounding to nearest gives more than ``largest``;
    that magnitude itself, which lies half-way, too if ``ties_overflow``.
    """

    name: str
    bits: int
    mantissa_bits: int
    #: The exponent of the smallest normal number.
    least_exponent: int
    largest: float
    overflow_from: float
    ties_overflow: bool

    @property
    def zero_exponent(self) -> int:
        """Magnitudes up to 2 to this are rounded to zero: half the smallest subnormal, which lies
        half-way to zero, and goes to the even neighbour.
        """
        return self.least_exponent - self.mantissa_bits - 1


@dataclass(frozen=True)
class BlockFormat:
    """A format in which ``block`` adjacent elements share a scale.

    MX: the scale is the power of two that brings the block's largest magnitude into the last binade
    of ``element``. NVFP4 (``scale_format``): the scale is that maximum through ``element.largest``,
    rounded to float8, after a scale of the tensor that makes the largest of them 448.
    """

    name: str
    bits: float
    block: int
    element: NumberFormat
    scale_format: Optional[NumberFormat] = None


_FLOAT4 = NumberFormat("float4_e2m1", 4, 1, 0, 6.0, 7.0, True)
_E4M3 = NumberFormat("float8_e4m3fn", 8, 3, -6, 448.0, 464.0, False)
_BFLOAT16 = (2 - 2.0**-7) * 2.0**127, (2 - 2.0**-8) * 2.0**127
_E5M2 = NumberFormat("float8_e5m2", 8, 2, -14, 57344.0, 61440.0, True)

#: The formats by name.
NUMBER_FORMATS: Mapping[str, NumberFormat] = {
    entry.name: entry
    for entry in (
        _E4M3,
        _E5M2,
        NumberFormat("float16", 16, 10, -14, 65504.0, 65520.0, True),
        NumberFormat("bfloat16", 16, 7, -126, _BFLOAT16[0], _BFLOAT16[1], True),
    )
}

BLOCK_FORMATS: Mapping[str, BlockFormat] = {
    entry.name: entry
    for entry in (
        BlockFormat("mxfp8_e4m3", 8.25, 32, _E4M3),
        BlockFormat("mxfp8_e5m2", 8.25, 32, _E5M2),
        BlockFormat("mxfp4", 4.25, 32, _FLOAT4),
        BlockFormat("nvfp4", 4.5, 16, _FLOAT4, _E4M3),
    )
}

_ALIASES = {
    "fp16": "float16",
    "bf16": "bfloat16",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "mxfp8": "mxfp8_e4m3",
}


def number_format(name: str) -> Union[NumberFormat, BlockFormat]:
    """The format of this name or alias (``"e4m3"``, ``"bf16"``, ``"mxfp8"``).

    Raises:
        ConfigError: there is no such format.
    """
    if not isinstance(name, str):
        raise ConfigError(f'format is not a name, such as "float16" or "mxfp8": {name!r}')
    known: dict[str, Union[NumberFormat, BlockFormat]] = {**NUMBER_FORMATS, **BLOCK_FORMATS}
    return known[choice("format", _ALIASES.get(name, name), known)]
