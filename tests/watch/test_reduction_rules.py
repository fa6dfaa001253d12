"""Tests of the rules for gradients before and after their reduction over the ranks."""

from __future__ import annotations

import numpy as np
import pytest

from fastcheck.watch.reduction_rules import ReductionRules


def usual(rules: ReductionRules, count: int = 20, middle: float = 1.5) -> None:
    """Readings of several parameters that vary by ten percent."""
    random = np.random.default_rng(0)
    for at in range(count):
        assert rules.add(at % 4, middle * float(np.exp(random.normal(0, 0.1)))) == []


@pytest.mark.parametrize(("ratio", "size"), [(12.0, "larger"), (0.1, "smaller")])
def test_a_ratio_out_of_its_range(ratio: float, size: str) -> None:
    rules = ReductionRules()
    usual(rules)
    ((site, reading, text),) = rules.add(2, ratio)
    assert (site, reading.value, reading.is_warning) == (2, ratio, False)
    assert 1.4 < reading.reference < 1.6
    assert (reading.score > 6) is (size == "larger")
    assert f"it is {size} here than on the others" in text
    # It has not entered the range.
    assert len(rules.add(3, ratio)) == 1
    assert rules.ratios[2] == rules.ratios[3] == ratio


def test_a_factor_of_less_than_two_is_none() -> None:
    rules = ReductionRules()
    usual(rules)
    assert rules.add(0, 2.8) == []


def test_before_there_are_enough_readings() -> None:
    rules = ReductionRules()
    usual(rules, 15)
    assert rules.add(0, 100.0) == []


def test_the_same_norm_in_eight_readings_in_a_row() -> None:
    rules = ReductionRules()
    usual(rules, 4)
    found = [rules.add(at, 1.0 + 1e-6 * (at % 2)) for at in range(20)]
    assert [len(one) for one in found] == [0] * 7 + [1] + [0] * 12
    assert found[7][0].reading.is_warning
    usual(rules, 1)
    assert [len(rules.add(0, 1.0)) for _ in range(8)] == [0] * 7 + [1]


@pytest.mark.parametrize("ratio", [0.0, float("nan"), float("inf")])
def test_what_is_no_ratio_is_left_out(ratio: float) -> None:
    rules = ReductionRules()
    for at in range(7):
        rules.add(at, 1.0)
    assert rules.add(9, ratio) == [] and 9 not in rules.ratios
    assert len(rules.add(7, 1.0)) == 1


def test_the_same_ratio_where_gradients_are_summed() -> None:
    rules = ReductionRules()
    usual(rules, 20, middle=0.5)
    found = [rules.add(at % 3, 0.25 + 1e-7 * (at % 2)) for at in range(20)]
    assert [len(one) for one in found] == [0] * 7 + [1] + [0] * 12
    ((_, reading, text),) = found[7]
    assert (round(reading.value, 5), reading.is_warning) == (0.25, True)
    assert "multiplies its norm by 4," in text and "no_sync()" not in text
    assert "this rank alone" in text
