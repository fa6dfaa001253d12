"""The records that are held in memory: how many."""

from __future__ import annotations

import numpy as np

from fastcheck.log.history import History
from fastcheck.types import RECORD_DTYPE, DeviceMode, Verdict


def step_without_end(verdict_at: slice) -> History:
    """600 records of one step, where 100 are held. ``verdict_at``: which of them have a verdict."""
    history = History(steps=2, max_step_records=100)
    every = np.zeros(600, RECORD_DTYPE)
    every["seq"] = np.arange(600)
    every["flags"][verdict_at] = int(Verdict.ORIGIN) << 8
    for records in np.split(every, 20):
        history.add(records)
        if history.is_full:
            history.drop_oldest()
    assert history.dropped_records == 600 - len(history.all())
    return history


def test_a_step_that_never_ends_is_bounded() -> None:
    history = step_without_end(slice(37, 38))
    assert len(history.all()) <= 101
    assert history.find(37) is not None  # the event stays
    assert history.find(36) is None
    assert history.take_unlogged()["seq"].tolist() == list(range(600))


def test_records_with_a_verdict_are_bounded_too() -> None:
    history = step_without_end(slice(None))
    held = history.all()
    assert 50 <= len(held) <= 100
    assert history.find(599) is not None and history.find(int(held["seq"][0])) is not None
    assert history.find(0) is None


def test_what_a_device_has_saturated_is_no_last_finite_record() -> None:
    history = History(steps=5)
    records = np.zeros(3, RECORD_DTYPE)
    records["seq"] = records["step"] = range(3)
    records["saturated_count"][1] = 1
    records["device_mode"][1] = int(DeviceMode.SATURATING)
    history.add(records)
    last = history.last_finite(records[2])
    assert last is not None and last["step"] == 0
    assert history.last_finite_step(0) == 2
    records["device_mode"][1] = int(DeviceMode.IEEE)
    last = history.last_finite(records[2])
    assert last is not None and last["step"] == 1


def test_records_by_their_numbers_whether_or_not_some_are_missing() -> None:
    history, numbers = History(steps=2), [0, 1, 2, 5, 6, 9, 10, 11, 12, 15]
    records = np.zeros(len(numbers), RECORD_DTYPE)
    records["seq"] = numbers
    for piece in np.split(records, [5]):
        history.add(piece)
    for first in range(17):
        for stop in range(first, 18):
            expected = [number for number in numbers if first <= number < stop]
            assert history.between(first, stop)["seq"].tolist() == expected
