"""One record as Python numbers, and how fastcheck spells numbers for people and for JSON.

Unpacks the bytes of a record at once: field by field, NumPy scalars cost ten times as much.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any, Union

import numpy as np

from ._record import DTYPES, Depth, DeviceMode, extremes

Number = Union[int, float]


@dataclass(frozen=True)
class FloatFormat:
    """What advice and percentages need to know about a floating-point dtype."""

    max: float
    has_inf: bool = True

    @property
    def is_narrow(self) -> bool:
        """Healthy training can outgrow it (bfloat16 reaches as far as float32)."""
        return self.max < 1e6


_FLOAT32_MAX = 3.4028234663852886e38
_FLOAT64_MAX = 1.7976931348623157e308

#: By dtype code.
DTYPE_NAMES = tuple(info.name for info in DTYPES)
_FLOAT_FORMATS = {
    "float64": FloatFormat(_FLOAT64_MAX),
    "float32": FloatFormat(_FLOAT32_MAX),
    "float16": FloatFormat(65504.0),
    "bfloat16": FloatFormat(3.3895313892515355e38),
    "float8_e4m3fn": FloatFormat(448.0, has_inf=False),
    "float8_e5m2": FloatFormat(57344.0),
    "complex64": FloatFormat(_FLOAT32_MAX),
    "complex128": FloatFormat(_FLOAT64_MAX),
}


@dataclass(frozen=True)
class Reading:
    """A record's numbers. None where the record's depth doesn't cover a field, or nothing finite is
    left.
    """

    dtype: str
    numel: int
    components: int
    nan_count: int
    posinf_count: int
    neginf_count: int
    zero_count: int
    subnormal_count: int
    negative_count: int
    saturated_count: int
    min: Number | None
    max: Number | None
    abs_max: Number | None
    mean: float | None
    rms: float | None
    checksum: int | None
    float_format: FloatFormat | None
    has_stats: bool
    step: int
    call: int
    site: int
    seq: int
    flags: int
    #: The device leaves its largest number where an infinity belongs.
    is_saturating: bool = False

    @property
    def inf_count(self) -> int:
        return self.posinf_count + self.neginf_count

    @property
    def nonfinite_count(self) -> int:
        return self.nan_count + self.inf_count

    @property
    def overflow_count(self) -> int:
        """What shows an overflow: NaN and Inf, and what saturated on a device that does that."""
        return self.nonfinite_count + (self.saturated_count if self.is_saturating else 0)

    @property
    def finite_count(self) -> int:
        return self.components - self.nonfinite_count

    @property
    def range_used(self) -> float | None:
        """abs max as a fraction of the largest number that the dtype holds."""
        if self.float_format is None or self.abs_max is None:
            return None
        return float(self.abs_max) / self.float_format.max


def read(record: np.void) -> Reading:
    """The numbers of one record (a scalar of RECORD_DTYPE). Host only, no synchronisation."""
    raw = record.tobytes()
    numel, nan, posinf, neginf, zero, subnormal, negative, saturated = struct.unpack_from(
        "<8q", raw
    )
    total, _abs_total, sum_sq = struct.unpack_from("<3d", raw, 80)
    checksum, seq, step = struct.unpack_from("<Qqq", raw, 104)
    call, site, flags = struct.unpack_from("<iiI", raw, 128)
    code, _order, depth, mode = struct.unpack_from("<4B", raw, 142)
    info = DTYPES[code]
    float_format = _FLOAT_FORMATS.get(info.name)
    components = numel * info.components
    finite = components - nan - posinf - neginf
    has_stats = depth >= Depth.STATS
    low: Number | None = None
    high: Number | None = None
    mean: float | None = None
    rms: float | None = None
    if has_stats and finite > 0:
        low, high = extremes(record)
        mean = total / finite
        rms = math.sqrt(sum_sq / finite) if sum_sq >= 0 else None
    abs_max = None if low is None or high is None else max(abs(low), abs(high))
    return Reading(
        dtype=info.name,
        numel=numel,
        components=components,
        nan_count=nan,
        posinf_count=posinf,
        neginf_count=neginf,
        zero_count=zero,
        subnormal_count=subnormal,
        negative_count=negative,
        saturated_count=saturated,
        min=low,
        max=high,
        abs_max=abs_max,
        mean=mean,
        rms=rms,
        checksum=checksum if depth >= Depth.FULL else None,
        float_format=float_format,
        has_stats=has_stats,
        step=step,
        call=call,
        site=site,
        seq=seq,
        flags=flags,
        is_saturating=mode == DeviceMode.SATURATING and float_format is not None,
    )


def spell(value: Number | None) -> str:
    """A number in at most ten characters, with enough digits to see a trend: 65,504 · 0.0312 ·
    1.20e+38.
    """
    if value is None:
        return "-"
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    magnitude = abs(value)
    if value == 0:
        return "0"
    if magnitude >= 1e7 or magnitude < 1e-3:
        return f"{value:.2e}"
    if isinstance(value, int) or magnitude >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def spell_share(part: float, whole: float) -> str:
    """``part`` of ``whole`` in per cent; never rounds something to 0 % or less than everything to
    100 %.
    """
    if whole <= 0:
        return "-"
    percent = 100.0 * part / whole
    if 0 < percent < 0.01:
        return "<0.01 %"
    if 99.99 < percent < 100:
        return ">99.99 %"
    few_digits = percent == 0 or 10 <= percent < 99 or percent >= 100
    return f"{percent:.0f} %" if few_digits else f"{percent:.2f} %"


def spell_nonfinite(reading: Reading) -> str:
    """``12 NaN and 4 +Inf``; ``no NaN or Inf`` when there is none. On a device that saturates also
    ``3 saturated``.
    """
    parts = [
        f"{count:,} {name}"
        for count, name in (
            (reading.nan_count, "NaN"),
            (reading.posinf_count, "+Inf"),
            (reading.neginf_count, "-Inf"),
            (reading.overflow_count - reading.nonfinite_count, "saturated"),
        )
        if count
    ]
    if not parts:
        return "no NaN or Inf"
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def to_json(value: Any) -> Any:
    """``value`` with what strict JSON can't hold spelt as strings: "nan", "inf", "-inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, np.generic):
        return to_json(value.item())
    return value
