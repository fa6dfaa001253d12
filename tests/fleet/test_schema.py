"""Records as rows: what is rounded, and how much room a row takes."""

from __future__ import annotations

import numpy as np
import pytest

from fastcheck.fleet.schema import RECORD_COLUMNS, record_table, rounded, table_bytes

pytest.importorskip("pyarrow")


def test_rounding_keeps_sixteen_significant_bits() -> None:
    rng = np.random.default_rng(3)
    values = np.exp2(rng.uniform(-120, 120, 10_000)).astype(np.float32)
    values *= rng.choice(np.float32([-1, 1]), 10_000)
    found = rounded(values)
    assert found.dtype == np.float32
    assert (found.view(np.uint32) & 0xFF == 0).all()
    apart = np.abs(found.astype(np.float64) - values) / np.abs(values.astype(np.float64))
    assert 2.0**-18 < apart.max() <= 2.0**-16
    assert (rounded(found) == found).all()


def test_what_rounding_leaves_alone() -> None:
    largest = np.finfo(np.float32).max
    values = np.array([0.0, -0.0, 1.0, -2.5, largest, -largest, np.nan], np.float32)
    found = rounded(values)
    assert (found[:4] == values[:4]).all() and np.signbit(found[1])
    # Not to an infinity, which a row never has.
    assert np.isfinite(found[4:6]).all() and found[4] > 0.9999 * largest and np.isnan(found[6])


def test_a_row_takes_at_most_twenty_bytes() -> None:
    """Of a log in which nothing repeats: five floats of noise, a checksum in two rows of five."""
    rng, count = np.random.default_rng(4), 50_000
    rows = {name: np.zeros(count, np.int64) for name in RECORD_COLUMNS}
    rows["site"] = np.repeat(rng.integers(-(1 << 62), 1 << 62, 500), 100)
    rows["rank"] = np.tile(np.arange(100), 500)
    rows["zero_count"] = rng.binomial(1000, 0.1, count) * 65
    level = np.exp2(rng.normal(0, 2, count))
    for name in ("min", "max", "mean", "mean_abs", "rms"):
        noise = rng.normal(0, 0.02, count) if name == "mean" else np.exp2(rng.normal(0, 0.1, count))
        values = (level * noise * (-1 if name == "min" else 1)).astype(np.float32)
        rows[name] = rounded(values) if name.startswith(("mean", "rms")) else values
    has_checksum = np.arange(count) % 5 < 2
    rows["checksum"] = np.where(has_checksum, rng.integers(1, 1 << 62, count), 0)
    assert table_bytes(record_table(rows)).size / count < 20
