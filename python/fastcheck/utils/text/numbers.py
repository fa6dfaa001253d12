"""Formats numbers for text and JSON, parses sizes in bytes, unpacks a record to Python numbers.

Unpacks the bytes of a record at once: field by field, NumPy scalars cost ten times as much.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from fastcheck.errors import ConfigError
from fastcheck.record.statistics import Number, RecordStatistics

LEAST_LIMIT_BYTES = 64 * 1024


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS.update({"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40})


def parse_bytes(value: str | int | None) -> int | None:
    """``"1GB"``, ``"500 MB"``, ``"2GiB"`` or a number of bytes; None is no limit. ConfigError when
    it is none of these.
    """
    size: int | None = None
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if match and match.group(2).upper() in _UNITS:
            size = int(float(match.group(1)) * _UNITS[match.group(2).upper()])
    if size is None or size < LEAST_LIMIT_BYTES:
        raise ConfigError(
            "limit is not a size that fastcheck can use",
            expected='65536 bytes or more: a number, a text ("512MiB"), or None',
            got=repr(value),
            hint='limit="1GB"',
        )
    return size


def format_bytes(size: float) -> str:
    """``512 B``, ``188 KB``, ``1.9 GB``: powers of 1000, as disks have them."""
    number, unit = float(size), "B"
    for larger in ("KB", "MB", "GB", "TB"):
        if abs(number) < 999.5:
            break
        number, unit = number / 1000, larger
    few = abs(number) >= 9.95 or unit == "B"
    return f"{number:.0f} {unit}" if few else f"{number:.1f} {unit}"


def format_number(value: Number | None) -> str:
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


def format_fields(reading: RecordStatistics, *fields: str) -> list[str]:
    """Fields of a record as the cells of a table."""
    return [_field(reading, name) for name in fields]


def _field(reading: RecordStatistics, name: str) -> str:
    value = getattr(reading, name)
    is_count = name.endswith("_count") or name in ("numel", "step")
    return f"{value:,}" if is_count else value if name == "dtype" else format_number(value)


def and_more(hidden: int, what: str = "more") -> list[str]:
    """The last line of a list that leaves ``hidden`` things out; none where it has all. Of words in
    brackets the first are those for one.
    """
    return [f"and {hidden:,} {worded(what, hidden)}"] if hidden > 0 else []


def worded(text: str, count: int) -> str:
    """The text with those words in brackets that fit the count: ``"step[|s]"``."""
    return re.sub(r"\[([^|\]]*)\|([^\]]*)\]", r"\1" if count == 1 else r"\2", text)


def format_share(part: float, whole: float) -> str:
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


def format_nonfinite(reading: RecordStatistics) -> str:
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
    return enumerated(parts) if parts else "no NaN or Inf"


def enumerated(names: Sequence[str]) -> str:
    """``a``; ``a, b and c``."""
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def to_json(value: Any) -> Any:
    """``value`` for strict JSON: non-finite floats become the strings "nan", "inf" and "-inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, np.generic):
        return to_json(value.item())
    return value


def format_steps(steps: Sequence[int]) -> str:
    """``steps``: ascending."""
    if not steps:
        return "no steps"
    if len(steps) == 1:
        return f"step {steps[0]:,}"
    if steps[-1] - steps[0] >= len(steps):
        return f"{len(steps):,} steps from {steps[0]:,} to {steps[-1]:,}"
    return f"steps {steps[0]:,} to {steps[-1]:,}"


def format_shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) if shape else "scalar"


def counted(number: int, noun: str) -> str:
    """``"1 rank"`` or ``"1,024 ranks"``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
