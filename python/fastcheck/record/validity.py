"""Checks which records of a file are possible: a damaged one must not size or index anything."""

from __future__ import annotations

import numpy as np

from fastcheck.record.format import (
    COUNTS,
    DTYPES,
    NONFINITE_COUNTS,
    RECORD_VERSION,
    VERDICT_MASK,
    VERDICT_SHIFT,
    Depth,
    DeviceMode,
    Order,
    Verdict,
)
from fastcheck.record.site import MAX_SITES

# More than any memory holds; below it the sums of counts do not overflow.
_MAX_NUMEL = 1 << 60
_COMPONENTS = np.array([info.components for info in DTYPES])


def is_valid(records: np.ndarray) -> np.ndarray:
    """Which of these records can have been written by this version, as a boolean array.

    Checked are the fields that index or size something, and that the counts fit each other. A
    flipped bit of a value or a checksum can't be told from another value.
    """
    valid: np.ndarray = records["version"] == RECORD_VERSION
    codes = records["dtype"]
    valid &= codes < len(DTYPES)
    valid &= (records["depth"] >= min(Depth)) & (records["depth"] <= max(Depth))
    valid &= records["order"] <= max(Order)
    valid &= records["device_mode"] <= max(DeviceMode)
    valid &= ((records["flags"] & VERDICT_MASK) >> VERDICT_SHIFT) <= max(Verdict)
    valid &= (records["site"] >= 0) & (records["site"] < MAX_SITES)
    valid &= records["call"] >= 0
    numel = records["numel"]
    valid &= (numel >= 0) & (numel <= _MAX_NUMEL)
    components = np.where(valid, numel, 0) * _COMPONENTS[np.where(valid, codes, 0)]
    for name in COUNTS[1:]:
        valid &= (records[name] >= 0) & (records[name] <= components)
    bad = np.zeros(len(records), np.int64)
    for name in NONFINITE_COUNTS:
        bad += np.where(valid, records[name], 0)
    valid &= bad <= components
    return valid
