"""The statistics of a record as Python numbers, and of an array of records as columns."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Union

import numpy as np

from fastcheck.record.format import COUNTS, DTYPES, NONFINITE_COUNTS, Depth, DeviceMode, extremes

Number = Union[int, float]
#: Records, or columns of them by name.
Fields = Union[np.ndarray, Mapping[str, np.ndarray]]


@dataclass(frozen=True)
class FloatFormat:
    """The range of a floating-point dtype."""

    max: float
    has_inf: bool = True

    @property
    def is_narrow(self) -> bool:
        """True if healthy training can leave the range of the format (bfloat16 has that of
        float32).
        """
        return self.max < 1e6


_FLOAT32_MAX = 3.4028234663852886e38
_FLOAT64_MAX = 1.7976931348623157e308
_SUMS = ("sum", "abs_sum", "sum_sq")

FLOAT_FORMATS = {
    "float64": FloatFormat(_FLOAT64_MAX),
    "float32": FloatFormat(_FLOAT32_MAX),
    "float16": FloatFormat(65504.0),
    "bfloat16": FloatFormat(3.3895313892515355e38),
    "float8_e4m3fn": FloatFormat(448.0, has_inf=False),
    "float8_e5m2": FloatFormat(57344.0),
    "complex64": FloatFormat(_FLOAT32_MAX),
    "complex128": FloatFormat(_FLOAT64_MAX),
}


#: The largest finite number of each dtype, by its code; NaN: not a floating-point format.
LARGEST_FINITE = np.array(
    [FLOAT_FORMATS[dtype.name].max if dtype.name in FLOAT_FORMATS else np.nan for dtype in DTYPES]
)


@dataclass(frozen=True)
class RecordStatistics:
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
    sum: float | None
    abs_sum: float | None
    sum_sq: float | None
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
        """NaN and Inf and, on a device that saturates, saturated components."""
        return self.nonfinite_count + (self.saturated_count if self.is_saturating else 0)

    @property
    def finite_count(self) -> int:
        """Finite components: of a complex tensor, two per element."""
        return self.components - self.nonfinite_count

    @property
    def l2_norm(self) -> float | None:
        """``sqrt(sum_sq)``: the norm of the finite elements."""
        return None if self.sum_sq is None or not self.sum_sq >= 0 else math.sqrt(self.sum_sq)

    @property
    def range_used(self) -> float | None:
        """abs max as a fraction of the largest number that the dtype holds."""
        if self.float_format is None or self.abs_max is None:
            return None
        return float(self.abs_max) / self.float_format.max


def statistics_of(record: np.void) -> RecordStatistics:
    """The numbers of one record (a scalar of RECORD_DTYPE). Host only, no synchronisation."""
    raw = record.tobytes()
    fields: dict[str, Any] = dict.fromkeys(("min", "max", "abs_max", "mean", "rms"))
    fields.update(zip(COUNTS, struct.unpack_from("<8q", raw)))
    fields.update(zip(_SUMS, struct.unpack_from("<3d", raw, 80)))
    fields.update(zip(("checksum", "seq", "step"), struct.unpack_from("<Qqq", raw, 104)))
    fields.update(zip(("call", "site", "flags"), struct.unpack_from("<iiI", raw, 128)))
    code, _order, depth, mode = struct.unpack_from("<4B", raw, 142)
    info = DTYPES[code]
    form = FLOAT_FORMATS.get(info.name)
    components = fields["numel"] * info.components
    finite = components - sum(fields[name] for name in NONFINITE_COUNTS)
    if depth < Depth.FULL:
        fields["checksum"] = None
    if depth < Depth.STATS:
        fields.update(dict.fromkeys(_SUMS))
    elif finite > 0:
        low, high = extremes(record)
        fields.update(min=low, max=high, abs_max=max(abs(low), abs(high)))
        fields["mean"] = fields["sum"] / finite
        if fields["sum_sq"] >= 0:
            fields["rms"] = math.sqrt(fields["sum_sq"] / finite)
    return RecordStatistics(
        dtype=info.name,
        components=components,
        float_format=form,
        has_stats=depth >= Depth.STATS,
        is_saturating=mode == DeviceMode.SATURATING and form is not None,
        **fields,
    )


_COMPONENTS = np.array([info.components for info in DTYPES])
_IS_SIGNED = np.array([info.kind == "i8" for info in DTYPES])
_IS_UNSIGNED = np.array([info.kind == "u8" for info in DTYPES])


def component_counts(records: Fields) -> np.ndarray:
    """The number of counted components of each record's tensor: two per complex element."""
    return records["numel"] * _COMPONENTS[records["dtype"]]


def extreme_values(records: Fields, field: str) -> np.ndarray:
    """``min`` or ``max`` of each record as float64, whatever type its dtype stores it in."""
    raw = np.ascontiguousarray(records[field])
    values: np.ndarray = np.where(_IS_SIGNED[records["dtype"]], raw.view("<i8"), raw)
    values = np.where(_IS_UNSIGNED[records["dtype"]], raw.view("<u8"), values)
    return values.astype(np.float64)


def statistics_columns(records: np.ndarray) -> dict[str, np.ndarray]:
    """min, max, abs_max, sum, abs_sum, sum_sq, mean, mean_abs, rms and l2_norm of each record, as
    float64 columns; NaN where the record's depth doesn't cover the field, or nothing finite is
    left.
    """
    finite = component_counts(records)
    for name in NONFINITE_COUNTS:
        finite = finite - records[name]
    known = records["depth"] >= Depth.STATS
    columns = {
        name: np.where(known & (finite > 0), extreme_values(records, name), np.nan)
        for name in ("min", "max")
    }
    columns["abs_max"] = np.fmax(np.abs(columns["min"]), np.abs(columns["max"]))
    with np.errstate(all="ignore"):
        for name in _SUMS:
            columns[name] = np.where(known, records[name], np.nan)
        columns["mean"] = columns["sum"] / finite
        columns["mean_abs"] = columns["abs_sum"] / finite
        columns["rms"] = np.sqrt(columns["sum_sq"] / finite)
        columns["l2_norm"] = np.sqrt(columns["sum_sq"])
    return columns
