"""The tables of a stop report: the culprit's statistics, its inputs, and its trend."""

from __future__ import annotations

import numpy as np

from fastcheck.record.statistics import RecordStatistics, statistics_of
from fastcheck.utils.names.style import tensor_place
from fastcheck.utils.text.layout import is_logarithmic, sparkline, table, wrap
from fastcheck.utils.text.numbers import format_number, format_share

from .stop_report import StopReport
from .trend import Trend

__all__ = ["input_lines", "last_healthy_lines", "statistics_lines", "trend_lines"]

_TREND_ROWS = 8
_INPUT_ROWS = 10


def statistics_lines(reading: RecordStatistics, width: int) -> list[str]:
    total = reading.components
    counts = [
        ("NaN", reading.nan_count),
        ("+Inf", reading.posinf_count),
        ("-Inf", reading.neginf_count),
        ("finite", reading.finite_count),
        ("zeros", reading.zero_count),
        ("subnormal", reading.subnormal_count),
        ("negative", reading.negative_count),
    ]
    left = [
        (name, f"{count:,}", format_share(count, total) if count else "") for name, count in counts
    ]
    right: list[tuple[str, str, str]] = []
    if reading.has_stats:
        used = ""
        form = reading.float_format
        if form is not None and reading.range_used is not None:
            share, largest = format_share(reading.range_used, 1), format_number(form.max)
            if reading.range_used > 1e-4:
                used = f"{share} of {reading.dtype}'s {largest}"
        right = [
            ("min", format_number(reading.min), ""),
            ("max", format_number(reading.max), ""),
            ("abs max", format_number(reading.abs_max), used),
            ("mean", format_number(reading.mean), ""),
            ("rms", format_number(reading.rms), ""),
            ("saturated", f"{reading.saturated_count:,}", f"at {reading.dtype}'s largest number"),
        ]
        if not reading.saturated_count:
            right.pop()
    beside, numbers = _in_columns(left, ">"), _in_columns(right, "<")
    lines = [f"{one}    {other}" for one, other in zip(beside, numbers)] + beside[len(numbers) :]
    if max(len(line.rstrip()) for line in lines) > width:
        lines = beside + _in_columns([(name, number, "") for name, number, _ in right], "<")
        lines += [
            line for name, _, note in right if note for line in wrap(f"{name}: {note}", width)
        ]
    lines = [line.rstrip() for line in lines]
    notes = []
    if not reading.has_stats:
        notes = wrap(
            '(record="health" keeps counts only: use record="stats" for min, max and rms)', width
        )
    elif reading.nonfinite_count:
        if reading.finite_count:
            notes = wrap("(min to rms are over the finite elements)", width)
        else:
            notes = ["(no finite element is left)"]
    return lines + notes


def _in_columns(rows: list[tuple[str, str, str]], side: str) -> list[str]:
    """Lines of one width. ``side``: to which the last cells are aligned."""
    name, number, note = (max((len(row[n]) for row in rows), default=0) for n in range(3))
    return [f"{a:<{name}}  {b:>{number}}  {c:{side}{note}}" for a, b, c in rows]


def last_healthy_lines(trend: Trend, width: int) -> list[str]:
    """The statistics of the last record of this tensor without an overflow."""
    if not trend.healthy or trend.healthy[-1].step >= trend.readings[-1].step:
        return []
    last = trend.healthy[-1]
    numbers = [f"{last.zero_count:,} zeros", f"{last.negative_count:,} negative"]
    if last.has_stats:
        named = ("min", "max", "abs_max", "mean", "rms")
        numbers = [
            *(f"{n.replace('_', ' ')} {format_number(getattr(last, n))}" for n in named),
            *numbers,
        ]
    return wrap(f"step {last.step:,}, its last healthy one: {', '.join(numbers)}", width, "", "  ")


def input_lines(report: StopReport, width: int) -> list[str]:
    site = report.culprit.site
    if not report.inputs:
        if site.role in ("param", "buffer", "optimizer_state"):
            return wrap("none: it is stored in the model, not computed in this step.", width)
        if site.role == "input":
            return wrap(
                "none: no module or operator that fastcheck observes made this tensor.", width
            )
        return ["not recorded."]
    rows = []
    earlier = (*report.inputs_before, *[None] * len(report.inputs))
    has_earlier = any(record is not None for record in report.inputs_before)
    for (source, record), before in zip(report.inputs[:_INPUT_ROWS], earlier):
        reading = statistics_of(record)
        name = source.tensor_name
        if report.style != "fastcheck" and not source.op:
            name = tensor_place(source, reading.call, report.style)
        elif source.module != site.module and not source.is_stored:
            name += f" of {source.module or source.module_type}"
        rows.append(
            [
                name,
                reading.dtype,
                f"{reading.nonfinite_count:,}",
                format_number(reading.min),
                format_number(reading.max),
                format_number(reading.rms),
                *([_rms_before(before)] if has_earlier else []),
            ]
        )
    header = ["tensor", "dtype", "NaN+Inf", "min", "max", "rms"]
    lines = table([*header, *(["rms before"] if has_earlier else [])], rows, left=2, width=width)
    hidden = len(report.inputs) - _INPUT_ROWS
    if hidden > 0:
        lines.append(f"and {hidden} more")
    return lines


def _rms_before(record: np.void | None) -> str:
    """The rms of the last healthy record."""
    return "-" if record is None else format_number(statistics_of(record).rms)


def trend_lines(trend: Trend, width: int, ascii_only: bool) -> list[str]:
    if len(trend.readings) < 2:
        return ["no earlier record of this tensor."]
    lines = wrap(trend.sentence(), width)
    repeated = len({reading.step for reading in trend.readings}) < len(trend.readings)
    header = ["step", *(["call"] if repeated else []), *trend.columns, ""]
    rows = []
    last = trend.readings[-1]
    previous: int | None = None
    for index in trend.picks(_TREND_ROWS):
        reading = trend.readings[index]
        if previous is not None and index > previous + 1:
            rows.append(["…", *([""] * (len(header) - 1))])
        previous = index
        rows.append(
            [
                f"{reading.step:,}",
                *([str(reading.call)] if repeated else []),
                *trend.cells(reading),
                "<- here" if reading is last else "",
            ]
        )
    lines += table(header, rows, left=0, width=width, note=1)
    series = trend.series()
    bad = [reading.overflow_count > 0 for reading in trend.readings]
    room = width - len(trend.series_name) - len("   (log scale)")
    line = sparkline(series, bad, width=min(60, room), ascii_only=ascii_only)
    usable = [value for value, is_bad in zip(series, bad) if value is not None and not is_bad]
    if usable:
        scale = " (log scale)" if is_logarithmic(usable) else ""
        lines.append(f"{trend.series_name}  {line}{scale}")
    return lines
