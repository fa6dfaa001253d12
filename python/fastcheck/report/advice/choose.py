"""Chooses what to try from the culprit's record, role, verdict and trend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Callable

from fastcheck.record.format import Verdict
from fastcheck.record.statistics import statistics_of
from fastcheck.report.trend import Trend
from fastcheck.utils.text.numbers import format_number

from .activations import (
    arrived,
    diverged,
    fills_its_format,
    nan_from_finite,
    negative_infinity,
    out_of_range,
)
from .case import Advice, Case
from .stored import collective, gradient, gradient_norm, loss, stored

if TYPE_CHECKING:
    from fastcheck.report.stop_report import StopReport

__all__ = ["Advice", "advise"]

MOST = 6


def advise(report: StopReport) -> list[Advice]:
    """At most six things to try, the most likely to help first. Never empty."""
    event = report.culprit
    case = Case(
        site=event.site,
        reading=statistics_of(event.record),
        verdict=Verdict(event.verdict),
        step=report.step,
        trend=Trend.of(report.trend),
        inputs=tuple((site, statistics_of(record)) for site, record in report.inputs),
        scale=report.scale,
        log_path=report.log_path,
        inputs_before=tuple(
            None if record is None else statistics_of(record) for record in report.inputs_before
        ),
        learning_rates=report.learning_rates,
        left_out_by=report.left_out_by,
    )
    found: list[Advice] = [*_saturating(case), *_broken_weight(case)]
    for item in _rules(case)(case):
        if item not in found:
            found.append(item)
    closer = [] if report.replay is not None else list(_closer(case))
    return [*found[: MOST - 1 - len(closer)], *closer, _go_on(case)]


def _rules(case: Case) -> Callable[[Case], Iterator[Advice]]:
    role = case.site.role
    if case.verdict is Verdict.PROPAGATED:
        return _propagated
    if role == "output" and case.broken_weight is not None:
        return _nothing_else
    if role in ("param", "buffer", "optimizer_state"):
        return stored
    if role == "loss":
        return loss
    if role == "collective":
        return collective
    if role == "grad_norm":
        return gradient_norm
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
        'This tensor only carries on what an earlier one held (Stop(count="all") counts those '
        "too). Look at the first non-finite tensor of the step, not at this one."
    )


def _broken_weight(case: Case) -> Iterator[Advice]:
    """The records show that the weights went first: the module does what it always did."""
    if case.broken_weight is None:
        return
    site, now, before = case.broken_weight
    yield Advice(
        f"An update since step {before.step:,} took the largest number of {site.key} from "
        f"{format_number(before.abs_max)} to {format_number(now.abs_max)}, before this overflow: "
        f"lower the learning rate{case.rates}, or warm up for longer.",
    )
    yield Advice(
        "Look at the gradients of that step, too: one that is far too large does the same at a "
        "healthy learning rate. Clip it.",
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
    )


def _nothing_else(case: Case) -> Iterator[Advice]:
    yield from ()


def _saturating(case: Case) -> Iterator[Advice]:
    if case.reading.overflow_count > case.reading.nonfinite_count:
        yield Advice(
            "This device saturates: its largest number stands for an infinity and 0 for a NaN, so "
            "that more may be wrong than the values show. Atlas A2 and A3 give Inf and NaN where "
            "INF_NAN_MODE_FORCE_DISABLE is not set."
        )


def _closer(case: Case) -> Iterator[Advice]:
    """Suggests how to find the operator and the line within a module."""
    is_computed = case.site.role in ("output", "input", "grad_input", "grad_output", "param_grad")
    is_module = bool(case.site.module) or case.site.role != "input"
    if case.verdict is Verdict.ORIGIN and is_computed and is_module and not case.site.op:
        yield Advice(
            'For the operator and the line run it again with install(..., level="op"), or train by '
            "monitor.run(step, batch) with install(..., stop=fastcheck.Stop(replay=True))."
        )


def _go_on(case: Case) -> Advice:
    return Advice("To record and go on instead of stopping: install(..., overflow_nums=-1).")
