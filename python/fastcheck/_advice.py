"""What to try: chooses the advice that fits the record, its role and verdict, and the trend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Callable

from ._advice_case import Advice, Case
from ._advice_forward import (
    arrived,
    diverged,
    fills_its_format,
    nan_from_finite,
    negative_infinity,
    out_of_range,
)
from ._advice_state import collective, gradient, loss, stored
from ._numbers import read
from ._record import Verdict
from ._trend import Trend

if TYPE_CHECKING:
    from ._report import StopReport

__all__ = ["Advice", "advise"]

MOST = 5


def advise(report: StopReport) -> list[Advice]:
    """At most five things to try, the most likely to help first. Never empty."""
    event = report.culprit
    case = Case(
        site=event.site,
        reading=read(event.record),
        verdict=Verdict(event.verdict),
        step=report.step,
        trend=Trend.of(report.trend),
        inputs=tuple((site, read(record)) for site, record in report.inputs),
        scale=report.scale,
        log_path=report.log_path,
    )
    found: list[Advice] = list(_saturating(case))
    for item in _rules(case)(case):
        if item not in found:
            found.append(item)
    return [*found[: MOST - 1], _go_on(case)]


def _rules(case: Case) -> Callable[[Case], Iterator[Advice]]:
    role = case.site.role
    if case.verdict is Verdict.PROPAGATED:
        return _propagated
    if role in ("param", "buffer", "optimizer_state"):
        return stored
    if role == "loss":
        return loss
    if role == "collective":
        return collective
    if role in ("param_grad", "grad_input", "grad_output"):
        return gradient
    if case.verdict is Verdict.ARRIVED or role == "input":
        return arrived
    full = fills_its_format(case)
    if case.only_neginf and not full:
        return negative_infinity
    if case.is_narrow and (full or case.overflows_to_nan or case.reading.inf_count):
        return out_of_range
    if case.has_nan and not full:
        return nan_from_finite
    return diverged


def _propagated(case: Case) -> Iterator[Advice]:
    yield Advice(
        'This tensor only carries on what an earlier one held (count="all" counts those too). '
        "Look at the first non-finite tensor of the step, not at this one."
    )


def _saturating(case: Case) -> Iterator[Advice]:
    if case.reading.overflow_count > case.reading.nonfinite_count:
        yield Advice(
            "This device saturates: its largest number stands for an infinity and 0 for a NaN, so "
            "that more may be wrong than the values show. Atlas A2 and A3 give Inf and NaN where "
            "INF_NAN_MODE_FORCE_DISABLE is not set."
        )


def _go_on(case: Case) -> Advice:
    return Advice("To record and go on instead of stopping: install(..., overflow_nums=-1).")
