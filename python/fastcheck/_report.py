"""The stop report: what OverflowDetected prints.

The order is fixed: what, where, when, the numbers, what the inputs looked like, the trend, what to
try, and where the records are. Each section is one function below; the layout is in _layout, the
advice in _advice."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from ._advice import advise
from ._layout import (
    GUTTER,
    is_logarithmic,
    paint,
    section,
    sparkline,
    stderr_is_ascii,
    table,
    to_ascii,
    wrap,
)
from ._naming import module_name, tensor_name
from ._numbers import Reading, read, spell, spell_nonfinite, spell_share
from ._record import RECORD_DTYPE, Verdict
from ._spread import spread
from ._style import place as place_of
from ._summary import summary
from ._trend import Trend

if TYPE_CHECKING:
    from ._dumped import Dumped
    from ._replay import Replay
    from ._site import Site
    from ._verdict import Event

__all__ = ["StopReport", "brief", "parts", "render", "summary"]

WIDTH = 88
_TREND_ROWS = 8
_INPUT_ROWS = 10

VERDICT_SAYS = {
    Verdict.NONE: "not judged",
    Verdict.ORIGIN: "it began here",
    Verdict.ARRIVED: "it came in from outside",
    Verdict.PROPAGATED: "carried on from an earlier tensor",
    Verdict.INTENDED: "an infinity written on purpose",
    Verdict.ABSORBED: "an overflow that no later tensor shows",
    Verdict.UNRESOLVED: "-Inf only: a mask or a log(0)",
    Verdict.SCALED: "a scaled gradient, its update skipped",
    Verdict.BENIGN: "memory that nobody wrote yet",
}


@dataclass(frozen=True)
class StopReport:
    """Everything that the stop message is made of.

    ``events``: all events of the step in device order. ``inputs``: what the culprit's module read,
    its own parameters included where known, as (site, record); ``inputs_before``: of each its
    last healthy record, where one is held. ``trend``: the records of the
    culprit's site in the last steps, oldest first, the bad one last. ``scale``: the loss scale in
    use. ``rank``: whose report it is, of ``world_size`` ranks that stop together.
    ``weights_intact``: True when it is certain that no update of this step has been applied; None
    when unknown. ``is_lost``: another rank found it, and what it had to say is gone with it.
    ``replay``: what came of running the step again at op level, if it was. ``dump``: what was
    dumped of the culprit, where that was asked for.
    ``style``: how tensors are named, ``"fastcheck"`` or ``"msprobe"``.
    """

    culprit: Event
    step: int
    events: tuple[Event, ...] = ()
    event_count: int = 1
    overflow_nums: int = 1
    inputs: tuple[tuple[Site, np.void], ...] = ()
    inputs_before: tuple[np.void | None, ...] = ()
    trend: np.ndarray = field(default_factory=lambda: np.zeros(0, RECORD_DTYPE))
    log_path: str | None = None
    scale: float | None = None
    rank: int = 0
    world_size: int = 1
    weights_intact: bool | None = None
    is_lost: bool = False
    style: str = "fastcheck"
    replay: Replay | None = None
    dump: Dumped | None = None


def render(
    report: StopReport, width: int = WIDTH, color: bool = False, ascii_only: bool | None = None
) -> str:
    """The stop report as plain text of at most ``width`` columns (a longer path or code line stays
    whole).

    ``ascii_only``: None asks whether standard error, where a traceback goes, can print more than
    ASCII."""
    if ascii_only is None:
        ascii_only = stderr_is_ascii()
    if report.is_lost:
        return "\n".join(wrap(_lost(report), width))
    body = width - GUTTER
    reading = read(report.culprit.record)
    trend = Trend.of(report.trend)
    sections = [
        ("what", _what(report, reading, body)),
        ("where", _where(report, reading, body)),
        ("replay", _replay(report, body)),
        ("when", _when(report, reading, body)),
        ("numbers", _numbers(reading, body) + _healthy(trend, body)),
        ("inputs", _inputs(report, body)),
        ("spread", spread(report.events, report.culprit, report.style, body)),
        ("trend", _trend(trend, body, ascii_only)),
        ("dump", [] if report.dump is None else report.dump.lines(body)),
        ("try", _try(report, body)),
        ("log", _log(report, body)),
    ]
    headline = wrap(_headline(report, reading), width)
    blocks = ["\n".join(paint(line, "red", color) for line in headline)]
    blocks += ["\n".join(section(label, lines, color)) for label, lines in sections if lines]
    text = "\n\n".join(blocks)
    return to_ascii(text) if ascii_only else text


def parts(report: StopReport, width: int) -> list[tuple[str, list[str]]]:
    """What of the report a summary tells: labelled lines of at most ``width`` columns."""
    reading = read(report.culprit.record)
    lines = wrap(_headline(report, reading), width)
    if report.culprit.line:
        lines += wrap(report.culprit.line, width, "line      ", " " * 10)
    lines += wrap(_verdict(report.culprit), width)
    found = [
        ("culprit", lines + _healthy(Trend.of(report.trend), width)),
        ("inputs", _inputs(report, width) if report.inputs else []),
        ("spread", spread(report.events, report.culprit, report.style, width)),
    ]
    return [(label, lines) for label, lines in found if lines]


def brief(report: StopReport, width: int = WIDTH, ascii_only: bool | None = None) -> str:
    """The report in a few lines, for a warning: headline, reason, and the first thing to try."""
    if ascii_only is None:
        ascii_only = stderr_is_ascii()
    reading = read(report.culprit.record)
    lines = wrap(_headline(report, reading), width, "", "  ")
    lines += wrap(_verdict(report.culprit), width, "  ")
    for item in advise(report)[:1]:
        lines += wrap("try: " + item.text, width, "  ")
    text = "\n".join(lines)
    return to_ascii(text) if ascii_only else text


def _lost(report: StopReport) -> str:
    return (
        f"rank {report.rank} stopped at step {report.step}, and its report was lost with it: look "
        "at what it wrote last"
    )


def _headline(report: StopReport, reading: Reading) -> str:
    site = report.culprit.site
    found = spell_nonfinite(reading)
    if site.role == "loss":
        place = f"in the loss ({site.module_type})" if site.module_type else "in the loss"
    elif site.role == "input" and not site.module:
        place = f"in {site.label}, the batch given to {module_name(site)}"
    else:
        place = f"in {place_of(site, reading.call, report.style, report.culprit.api)}"
    rank = f" on rank {report.rank}" if report.world_size > 1 else ""
    return f"{found} {place} at step {report.step}{rank}"


def _verdict(event: Event) -> str:
    verdict = Verdict(event.verdict)
    says = VERDICT_SAYS.get(verdict, "")
    reason = event.reason.strip()
    return f"{verdict.name.lower()}, {says}" + (f": {reason}" if reason else ".")


def _what(report: StopReport, reading: Reading, width: int) -> list[str]:
    share = spell_share(reading.overflow_count, reading.components)
    unit = "real and imaginary parts" if reading.components != reading.numel else "elements"
    lines = wrap(
        f"{spell_nonfinite(reading)} among {reading.components:,} {unit} ({share}).",
        width,
    )
    lines += wrap(_verdict(report.culprit), width)
    others = [event for event in report.events if not _same_place(event, report.culprit)]
    if others:
        named: list[str] = []
        for event in others:
            name = place_of(event.site, int(event.record["call"]), report.style, event.api)
            if name not in named:
                named.append(name)
        more = f" and {len(others) - 2:,} more" if len(others) > 2 else ""
        plural = "tensor is" if len(others) == 1 else "tensors are"
        lines += wrap(
            f"{len(others):,} other {plural} non-finite in this step: "
            f"{', '.join(named[:2])}{more}.",
            width,
        )
    return lines


def _same_place(event: Event, culprit: Event) -> bool:
    return event.site == culprit.site and bool(event.record["seq"] == culprit.record["seq"])


def _where(report: StopReport, reading: Reading, width: int) -> list[str]:
    site = report.culprit.site
    lines = [f"module    {module_name(site)}"]
    if site.op:
        lines.append(f"op        {site.op} #{reading.call}")
    if report.culprit.api:
        lines.append(f"API       {report.culprit.api}.{site.direction}")
    size = f"{reading.numel:,} element{'s' if reading.numel != 1 else ''}"
    lines += wrap(f"{tensor_name(site)}, {reading.dtype}, {size}", width, "tensor    ", " " * 10)
    if report.culprit.line:
        lines += wrap(report.culprit.line, width, "line      ", " " * 10)
    if report.world_size > 1:
        lines.append(f"rank      {report.rank} of {report.world_size}: all of them stop with it")
    elif report.rank:
        lines.append(f"rank      {report.rank}")
    return lines


def _replay(report: StopReport, width: int) -> list[str]:
    """What the op level saw, when the step was run again."""
    if report.replay is None:
        return []
    lines = [line for note in report.replay.notes for line in wrap(note, width)]
    if report.replay.stop is None:
        return lines or wrap(str(replace(report.replay, dump=None)), width)
    found = report.replay.stop.report
    lines += wrap(f"run again at op level: {_headline(found, read(found.culprit.record))}", width)
    if found.culprit.line:
        lines += wrap(found.culprit.line, width, "line      ", " " * 10)
    lines += wrap(_verdict(found.culprit), width)
    if found.inputs:
        lines += _inputs(found, width)
    return lines


def _when(report: StopReport, reading: Reading, width: int) -> list[str]:
    direction = {
        "forward": "in the forward pass",
        "backward": "in the backward pass",
        "optimizer": "at the optimizer's step",
    }.get(report.culprit.site.direction, report.culprit.site.direction)
    if report.culprit.site.role in ("param", "buffer"):
        direction = "when it was read"  # in forward too, once an output made us look
    when = f"step {report.step} (counted from 0), {direction}"
    if reading.call > 0 and not report.culprit.site.op:
        when += f", call {reading.call + 1} of this module in the step"
    lines = wrap(when + ".", width)
    if report.overflow_nums > 0:
        limit = (
            "overflow_nums=1: the first event stops the run."
            if report.overflow_nums == 1
            else f"overflow_nums={report.overflow_nums}: this was event {report.event_count:,}."
        )
        lines += wrap(limit, width)
    if report.weights_intact:
        lines += wrap("No weight has been updated in this step.", width)
    if report.scale is not None:
        lines += wrap(f"Loss scale {spell(report.scale)}.", width)
    return lines


def _numbers(reading: Reading, width: int) -> list[str]:
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
        (name, f"{count:,}", spell_share(count, total) if count else "") for name, count in counts
    ]
    right: list[tuple[str, str, str]] = []
    if reading.has_stats:
        used = ""
        form = reading.float_format
        if form is not None and reading.range_used is not None:
            used = (
                f"{spell_share(reading.range_used, 1)} of {reading.dtype}'s {spell(form.max)}"
                if reading.range_used > 1e-4
                else ""
            )
        right = [
            ("min", spell(reading.min), ""),
            ("max", spell(reading.max), ""),
            ("abs max", spell(reading.abs_max), used),
            ("mean", spell(reading.mean), ""),
            ("rms", spell(reading.rms), ""),
            ("saturated", f"{reading.saturated_count:,}", f"at {reading.dtype}'s largest number"),
        ]
        if not reading.saturated_count:
            right.pop()
    rows = []
    for number, cells in enumerate(left):
        rows.append([*cells, *(right[number] if number < len(right) else ("", "", ""))])
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    lines = [
        f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}    "
        f"{row[3]:<{widths[3]}}  {row[4]:>{widths[4]}}  {row[5]}".rstrip()
        for row in rows
    ]
    notes = []
    if not reading.has_stats:
        notes = wrap(
            '(record="health" keeps counts only: use record="stats" for min, max and rms)', width
        )
    elif reading.nonfinite_count:
        if reading.finite_count:
            notes = ["(min to rms are over the finite elements)"]
        else:
            notes = ["(no finite element is left)"]
    return lines + notes


def _healthy(trend: Trend, width: int) -> list[str]:
    """The same numbers of this tensor in the last step in which it was healthy."""
    if not trend.healthy or trend.healthy[-1].step >= trend.readings[-1].step:
        return []
    last = trend.healthy[-1]
    said = [f"{last.zero_count:,} zeros", f"{last.negative_count:,} negative"]
    if last.has_stats:
        named = ("min", "max", "abs_max", "mean", "rms")
        said = [*(f"{n.replace('_', ' ')} {spell(getattr(last, n))}" for n in named), *said]
    return wrap(f"step {last.step:,}, its last healthy one: {', '.join(said)}", width, "", "  ")


def _inputs(report: StopReport, width: int) -> list[str]:
    site = report.culprit.site
    if not report.inputs:
        if site.role in ("param", "buffer", "optimizer_state"):
            return wrap("none: it is stored in the model, not computed in this step.", width)
        if site.role == "input":
            return wrap("none: nothing that fastcheck observes has made this tensor.", width)
        return ["not recorded."]
    rows = []
    earlier = (*report.inputs_before, *[None] * len(report.inputs))
    has_earlier = any(record is not None for record in report.inputs_before)
    for (source, record), before in zip(report.inputs[:_INPUT_ROWS], earlier):
        reading = read(record)
        name = tensor_name(source)
        if report.style != "fastcheck" and not source.op:
            name = place_of(source, reading.call, report.style)
        elif source.module != site.module:
            name += f" of {source.module or source.module_type}"
        rows.append(
            [
                name,
                reading.dtype,
                f"{reading.nonfinite_count:,}",
                spell(reading.min),
                spell(reading.max),
                spell(reading.rms),
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
    """That of the last healthy step."""
    return "-" if record is None else spell(read(record).rms)


def _trend(trend: Trend, width: int, ascii_only: bool) -> list[str]:
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
    line = sparkline(series, bad, width=min(60, width - 20), ascii_only=ascii_only)
    usable = [value for value, is_bad in zip(series, bad) if value is not None and not is_bad]
    if usable:
        scale = " (log scale)" if is_logarithmic(usable) else ""
        lines.append(f"{trend.series_name}  {line}{scale}")
    return lines


def _try(report: StopReport, width: int) -> list[str]:
    lines: list[str] = []
    for number, item in enumerate(advise(report), start=1):
        lines += wrap(item.text, width, f"{number}. ", "   ")
        lines += [f"     {line}" for line in item.code.splitlines()]
    return lines


def _log(report: StopReport, width: int) -> list[str]:
    if report.log_path is None:
        return wrap("the records of the last steps could not be written to disk.", width)
    lines = wrap(f"{report.log_path} holds the records of the last steps. To see this step:", width)
    path = f"'{report.log_path}'" if " " in report.log_path else report.log_path
    lines.append(f"  fastcheck show {path} --step {report.step}")
    return lines
