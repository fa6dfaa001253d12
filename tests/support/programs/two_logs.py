"""A pair of logs that part at one step, made without training."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from fastcheck.record.format import RECORD_DTYPE
from support.programs import synthetic_logs


def write(directory: Path, sites: int, steps: int, parts_at: int, site: int) -> tuple[Path, Path]:
    """``actual`` and ``reference``: from step ``parts_at`` on all values of ``site`` are 1.5 times
    those of the reference, and the loss is twice its own.
    """
    reference, actual = directory / "reference", directory / "actual"
    synthetic_logs.write(reference, sites, steps, event_step=-1)
    shutil.copytree(reference, actual)
    for path in actual.glob("records-rank0-*.bin"):
        records = np.fromfile(path, RECORD_DTYPE)
        later = records["step"] >= parts_at
        scale(records, later & (records["site"] == site), 1.5)
        scale(records, later & (records["numel"] == 1) & (records["max"] < 100), 2.0)
        path.write_bytes(records.tobytes())
    return actual, reference


def scale(records: np.ndarray, which: np.ndarray, factor: float) -> None:
    """Multiplies the values of these records."""
    for name in ("min", "max", "sum", "abs_sum"):
        records[name][which] *= factor
    records["sum_sq"][which] *= factor**2
    records["checksum"][which] ^= 1
