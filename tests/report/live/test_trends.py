"""The last steps of each site, held to a plain walk over the records."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fastcheck.record.format import DTYPES, RECORD_DTYPE
from fastcheck.record.statistics import FLOAT_FORMATS, statistics_of
from fastcheck.report.live.trends import STEPS, SiteTrends
from support.records import record_builder as build


def some_records(steps: int, seed: int = 0) -> np.ndarray:
    """Some sites are read twice in a step, some in every third step, one not before step 5."""
    random = np.random.default_rng(seed)
    made: list[np.void] = []
    for step in range(steps):
        for site in [0, 1, 1, 2, *([3] if step % 3 == 0 else []), *([9] if step >= 5 else [])]:
            high = float(np.exp(random.normal(0, 3)))
            bad = {"nan_count": 2} if random.random() < 0.05 else {}
            dtype = ("float16", "float32", "int64", "float16")[site % 4]
            extremes = (-3, int(high)) if dtype == "int64" else (-high / 2, high)
            record = build.record(dtype, 100, *extremes, site=site, step=step, **bad)
            made.append(record)
    return build.records(*made)


@pytest.mark.parametrize("piece", [1, 5, 64, 10_000])
def test_the_last_steps_are_those_of_the_records(piece: int) -> None:
    records = some_records(50)
    trends = SiteTrends()
    for start in range(0, len(records), piece):
        trends.add(records[start : start + piece])
    assert trends.step == 49
    headroom = trends.headroom()
    for site in (0, 1, 2, 3, 9):
        mine = [statistics_of(one) for one in records[records["site"] == site]]
        by_step: dict[int, list[float]] = {}
        bad: dict[int, bool] = {}
        for reading in mine:
            assert reading.abs_max is not None
            by_step.setdefault(reading.step, []).append(float(reading.abs_max))
            bad[reading.step] = bad.get(reading.step, False) or reading.nonfinite_count > 0
        window = range(50 - STEPS, 50)
        expected = [max(by_step[step]) if step in by_step else None for step in window]
        assert trends.series(site) == (expected, [bad.get(step, False) for step in window])
        last = max(by_step)
        assert trends.level[site] == max(by_step[last])
        assert trends.last[site].tobytes() == records[records["site"] == site][-1].tobytes()
        if mine[0].dtype == "int64":
            assert bad[last] or math.isnan(headroom[site])
        elif bad[last]:
            assert headroom[site] == -math.inf
        else:
            limit = FLOAT_FORMATS[mine[0].dtype].max
            assert headroom[site] == pytest.approx(math.log2(limit / max(by_step[last])))
    assert trends.seen.tolist()[:10] == [n in (0, 1, 2, 3, 9) for n in range(10)]


def test_steps_that_were_left_out_are_empty() -> None:
    trends = SiteTrends()
    trends.add(build.records(build.record(step=3, site=0)))
    trends.add(build.records(build.record(step=6, site=0, high=4.0)))
    assert trends.series(0)[0][-4:] == [1.0, None, None, 4.0]
    trends.add(build.records(build.record(step=10_000, site=0)))
    assert trends.series(0)[0] == [*[None] * (STEPS - 1), 1.0]


def test_of_several_calls_in_a_step_the_largest_counts() -> None:
    trends = SiteTrends()
    trends.add(build.records(build.record(high=8.0), build.record(high=2.0)))
    trends.add(build.records(build.record(high=4.0)))
    assert trends.level[0] == 8.0 and trends.series(0)[0][-1] == 8.0
    assert trends.last["max"][0] == 4.0


def test_what_has_no_numbers_has_no_headroom() -> None:
    trends = SiteTrends()
    zeros = build.record(site=0, low=0.0, high=0.0)
    counts = build.record(site=1, depth=1)
    nothing = build.record(site=2, numel=4, nan_count=4)
    trends.add(build.records(zeros, counts, nothing))
    bits = trends.headroom()
    assert bits[0] == math.inf and math.isnan(bits[1]) and bits[2] == -math.inf
    assert trends.series(2) == ([None] * STEPS, [*[False] * (STEPS - 1), True])


def test_a_device_that_saturates_overflows_without_infinities() -> None:
    trends = SiteTrends()
    trends.add(build.records(build.record("float16", device_mode=1, saturated_count=3)))
    assert trends.is_bad[0] and trends.headroom()[0] == -math.inf


def test_all_sites_that_a_log_can_have() -> None:
    records = np.zeros(2, RECORD_DTYPE)
    records["version"], records["dtype"], records["depth"], records["numel"] = 1, 1, 3, 1
    records["site"] = [65535, 0]
    trends = SiteTrends()
    trends.add(records)
    assert trends.seen[65535] and int(trends.seen.sum()) == 2
    assert DTYPES[int(trends.last["dtype"][65535])].name == "float32"
