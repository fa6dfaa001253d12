"""The trend of one tensor over the last steps, for every course that abs max can take."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fastcheck.report.trend import Trend
from support.records import record_builder as build
from support.reports import text_of


def course(*abs_max: float) -> list[object]:
    return [
        build.record(high=value, low=-value, rms=value / 2, step=step, seq=step)
        for step, value in enumerate(abs_max)
    ]


def test_a_tensor_that_became_zero() -> None:
    trend = Trend.of(build.records(*course(2.0, 0.5, 0.0)))
    assert trend.growth == 0 and not trend.has_grown and not trend.has_jumped
    assert trend.sentence() == "abs max fell to 0 in 2 steps, from 2 (step 0) to 0 (step 2)."


def test_growth_within_a_step_counts_readings() -> None:
    """A closure is evaluated several times."""
    records = [build.record(high=value, step=3, seq=n) for n, value in enumerate((2.0, 4.0, 80.0))]
    text = "abs max grew 40 times in 3 readings, from 2 (step 3) to 80 (step 3)."
    assert Trend.of(build.records(*records)).sentence() == text


def test_a_tensor_that_was_zero() -> None:
    assert Trend.of(build.records(*course(0.0, 3.0))).sentence() == "abs max was 3 at step 1."


@given(st.lists(st.floats(0, 2.0**120, width=32), min_size=1, max_size=12))
def test_every_course_has_a_sentence_and_a_report(values: list[float]) -> None:
    before = course(*values)
    assert Trend.of(build.records(*before)).sentence().endswith(".")
    report = build.report(before=before)  # type: ignore[arg-type]  # wrong on purpose
    assert "trend" in text_of(report)
