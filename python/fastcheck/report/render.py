"""Renders the stop report as text.

The order of the sections is fixed: what, where, why, replay, when, numbers, inputs, spread, trend,
dump, noticed, try, log. Each section is one function below; ``utils/text/layout.py`` lays the text
out, and ``report/advice`` chooses what to try. The text of a stop has what fits 25 lines;
``fastcheck show`` and the page have the numbers, the spread and the trend as well.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fastcheck.errors import printable
from fastcheck.record.event import GIVEN_INSTEAD
from fastcheck.record.format import Verdict
from fastcheck.record.site import OUTSIDE, module_name
from fastcheck.record.statistics import RecordStatistics, statistics_of
from fastcheck.report.advice.choose import advise, named_weights
from fastcheck.utils.names.style import tensor_place
from fastcheck.utils.text.layout import (
    GUTTER,
    for_stderr,
    is_logarithmic,
    line_width,
    section,
    sparkline,
    table,
    wrap,
)
from fastcheck.utils.text.numbers import (
    and_more,
    counted,
    format_fields,
    format_nonfinite,
    format_number,
    format_share,
)

from .spread import spread
from .stop_report import StopReport
from .trend import Trend

if TYPE_CHECKING:
    from fastcheck.record.event import Event


_TREND_ROWS = 8
_INPUT_ROWS = 10
#: Most lines of the text of a stop.
_MOST_LINES = 25
_OPERAND_ROWS = 4


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
    lines = [f"{line}    {other}" for line, other in zip(beside, numbers)] + beside[len(numbers) :]
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
    return wrap(f"step {last.step:,}, the last healthy step: {', '.join(numbers)}", width, "", "  ")


def input_lines(report: StopReport, width: int, most: int = _INPUT_ROWS) -> list[str]:
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
    for (source, record), before in zip(report.inputs[:most], earlier):
        reading = statistics_of(record)
        name = source.tensor_name
        if report.style != "fastcheck" and not source.op:
            name = tensor_place(source, reading.call, report.style)
        elif source.module != site.module and not source.is_stored:
            name += f" of {source.module or source.module_type}"
        fields = format_fields(reading, "dtype", "numel", "nonfinite_count", "min", "max", "rms")
        # The rms of the last healthy record.
        rms = "-" if before is None else format_number(statistics_of(before).rms)
        rows.append([name, *fields, *([rms] if has_earlier else [])])
    header = ["tensor", "dtype", "elements", "NaN+Inf", "min", "max", "rms"]
    lines = table([*header, *(["rms before"] if has_earlier else [])], rows, left=2, width=width)
    return lines + and_more(len(report.inputs) - most)


def trend_lines(trend: Trend, width: int) -> list[str]:
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
    line = sparkline(series, bad, width=min(60, room))
    usable = [value for value, is_bad in zip(series, bad) if value is not None and not is_bad]
    if usable:
        scale = " (log scale)" if is_logarithmic(usable) else ""
        lines.append(f"{trend.series_name}  {line}{scale}")
    return lines


WIDTH = 88

VERDICT_TEXTS = {
    Verdict.NONE: "not judged",
    Verdict.ORIGIN: "it began here",
    Verdict.ARRIVED: "it came from outside",
    Verdict.PROPAGATED: "it follows from an earlier tensor",
    Verdict.INTENDED: "an infinity written on purpose",
    Verdict.ABSORBED: "no later tensor shows it",
    Verdict.UNRESOLVED: "undecided: nothing has shown that it does harm",
    Verdict.SCALED: "a scaled gradient whose update was skipped",
    Verdict.BENIGN: "an output that may hold any value",
}


def render(report: StopReport, width: int | None = None, ascii_only: bool | None = None) -> str:
    """The stop report as plain text of at most ``width`` columns (a longer path or code line stays
    whole), in about 25 lines: more only where a reason or a path is long. ``width``: None: 88, or
    what the environment's COLUMNS asks for. ``ascii_only``: of for_stderr().
    """
    width = line_width(WIDTH) if width is None else width
    if report.is_lost:
        lost = (
            f"rank {report.rank} stopped at step {report.step}; its report did not reach this "
            f"rank. See the log and the output of rank {report.rank}"
        )
        return "\n".join(wrap(lost, width))
    head = wrap(headline(report), width)
    sections = _short_sections(report, width - GUTTER, _MOST_LINES - len(head) - 1)
    blocks = ["\n".join(section(label, lines)) for label, lines in sections]
    return for_stderr("\n".join([*head, "", *blocks]), ascii_only)


def headline(report: StopReport) -> str:
    """The first line of a report: the values, the place and the step."""
    return printable(_headline(report, statistics_of(report.culprit.record)))


def report_sections(report: StopReport, body: int) -> list[tuple[str, list[str]]]:
    """The sections of a page that have lines of at most ``body`` columns, with their labels; what
    to try is not among them.
    """
    reading = statistics_of(report.culprit.record)
    trend = Trend.of(report.trend)
    sections = [
        (
            "what",
            _counts(reading, body) + wrap(_verdict_text(report.culprit, report.world_size), body),
        ),
        ("where", _where(report, reading, body)),
        ("replay", _replay_lines(report, body)),
        ("when", _when(report, reading, body)),
        ("numbers", statistics_lines(reading, body) + last_healthy_lines(trend, body)),
        ("inputs", input_lines(report, body) if report.inputs or not report.made_by else []),
        ("spread", spread(report.events, report.culprit, report.style, body)),
        ("trend", trend_lines(trend, body)),
        ("dump", [] if report.dump is None else report.dump.lines(body)),
        ("log", [] if report.log_path is None else _log(report, body, has_page=True)),
    ]
    return [(label, list(map(printable, lines))) for label, lines in sections if lines]


def _short_sections(report: StopReport, body: int, room: int) -> list[tuple[str, list[str]]]:
    """The sections of a stop's text: as many things to try as fit into ``room`` lines, one at
    least.
    """
    reading = statistics_of(report.culprit.record)
    trend = Trend.of(report.trend)
    what = _counts(reading, body) + wrap(_verdict_text(report.culprit, report.world_size), body)
    is_told = trend.has_grown or trend.has_jumped
    history = wrap(trend.sentence(), body) if is_told else []
    sections: list[tuple[str, list[str]]] = []
    tries: list[str] = []
    told = f"{report.noticed}." if report.noticed else ""
    # Rows of inputs, the page's line, the trend, and what was noticed but for its first sentence,
    # go, in this order, where there is no room.
    for rows, has_page, has_history, noticed in (
        (4, True, True, told),
        (2, True, True, told),
        (2, False, True, told),
        (2, False, False, told),
        (2, False, False, re.sub(r"\. .*", ".", told)),
        (2, False, False, ""),
    ):
        is_known = report.made_by is not None or report.replay is not None
        inputs = input_lines(report, body, rows) if report.inputs and not is_known else []
        sections = [
            ("what", [*what, *history] if has_history else what),
            ("where", _where(report, reading, body)),
            ("why", made_by_lines(report, body)),
            ("replay", _replay_lines(report, body)),
            ("when", _when(report, reading, body)),
            ("inputs", inputs),
            ("dump", [] if report.dump is None else report.dump.lines(body)),
            ("noticed", wrap(noticed, body) if noticed else []),
            ("log", _log(report, body, has_page)),
        ]
        left = room - sum(len(lines) for _, lines in sections)
        tries = _advice_lines(report, body, left)
        if len(tries) <= left:
            break
    sections.insert(-1, ("try", tries))
    return [(label, list(map(printable, lines))) for label, lines in sections if lines]


def _when(report: StopReport, reading: RecordStatistics, width: int) -> list[str]:
    lines = wrap(_when_text(report, reading), width) + _batch_lines(report, width)
    if report.overflow_nums > 1:
        number = f"overflow_nums={report.overflow_nums}: this was event {report.event_count:,}."
        lines += wrap(number, width)
    texts = [_updated_text(report), _weights_text(report)]
    texts += [] if report.scale is None else [f"Loss scale {format_number(report.scale)}."]
    lines += wrap(" ".join(text for text in texts if text), width)
    if report.outlier is not None:
        outlier, step = report.outlier, report.outlier.step
        now, before = format_number(outlier.now), f"at most {format_number(outlier.before)}"
        at = "reaches {} in this step" if step == report.step else f"reached {{}} in step {step:,}"
        text = f"{at.format(now)}; in the {outlier.steps} steps before it was"
        if outlier.has_grown:
            first = f"in the first {outlier.steps} steps that are known"
            text = f"has grown: it reaches {now}, and {first}"
        lines += wrap(f"{outlier.label} of the model {text} {before}.", width)
    return lines


def _log(report: StopReport, width: int, has_page: bool) -> list[str]:
    if report.log_path is None:
        return wrap("The records of the last steps could not be written to disk.", width)
    path = f"'{report.log_path}'" if " " in report.log_path else report.log_path
    lines = [f"fastcheck show {path} --step {report.step}"]
    if report.page is not None and has_page:
        lines += wrap(f"In a browser: {report.page}", width)
    return lines


def parts(report: StopReport, width: int, whole: bool = False) -> list[tuple[str, list[str]]]:
    """The sections of the report that a summary shows: labelled lines of at most ``width``
    columns. ``whole``: with the numbers and the trend.
    """
    reading = statistics_of(report.culprit.record)
    lines = wrap(_headline(report, reading), width)
    if report.culprit.line:
        lines += wrap(report.culprit.line, width, "line      ", " " * 10)
    lines += wrap(_verdict_text(report.culprit, report.world_size), width) + _batch_lines(
        report, width
    )
    sections = [
        ("culprit", lines + last_healthy_lines(Trend.of(report.trend), width)),
        ("numbers", statistics_lines(reading, width) if whole else []),
        ("inputs", input_lines(report, width) if report.inputs else []),
        ("why", made_by_lines(report, width)),
        ("spread", spread(report.events, report.culprit, report.style, width)),
        ("trend", trend_lines(Trend.of(report.trend), width) if whole else []),
    ]
    return [(label, list(map(printable, lines))) for label, lines in sections if lines]


def brief(report: StopReport, ascii_only: bool | None = None) -> str:
    """The report in a few lines, for a warning: headline, reason, and the first thing to try."""
    width = line_width(WIDTH)
    reading = statistics_of(report.culprit.record)
    lines = wrap(_headline(report, reading), width, "", "  ")
    lines += wrap(_verdict_text(report.culprit, report.world_size), width, "  ")
    for item in advise(report)[:1]:
        lines += wrap("try: " + item.text, width, "  ")
    return for_stderr(printable("\n".join(lines), keep="\n"), ascii_only)


def _headline(report: StopReport, reading: RecordStatistics) -> str:
    site = report.culprit.site
    counts = format_nonfinite(reading)
    if site.role == "loss":
        where = f"in the loss ({site.module_type})" if site.module_type else "in the loss"
    elif site.role == "grad_norm":
        where = f"in the {site.label}"
    elif site.role == "input" and not (site.module or site.op) and module_name(site) != OUTSIDE:
        where = f"in {site.label}, the batch given to {module_name(site)}"
    else:
        where = f"in {tensor_place(site, reading.call, report.style, report.culprit.api)}"
    rank = f" on rank {report.rank}" if report.world_size > 1 else ""
    return f"{counts} {where} at step {report.step}{rank}"


def _verdict_text(event: Event, world_size: int) -> str:
    verdict = Verdict(event.verdict)
    text = VERDICT_TEXTS.get(verdict, "")
    reason = event.reason.strip()
    is_stored = event.site.role in ("param", "buffer", "optimizer_state")
    if verdict is Verdict.ARRIVED and is_stored and not reason.startswith(GIVEN_INSTEAD):
        text = "it is stored in the model"
    is_of_module = event.site.role == "output" and not event.site.op
    if verdict is Verdict.ORIGIN and is_of_module and world_size > 1:
        text = "it began here, as far as this rank has read"  # a collective may have brought it
    return f"{verdict.name.lower()}, {text}" + (f": {reason}" if reason else ".")


def _counts(reading: RecordStatistics, width: int) -> list[str]:
    if reading.components == 1:
        return [f"{format_nonfinite(reading)}, the only element."]
    share = format_share(reading.overflow_count, reading.components)
    unit = "real and imaginary parts" if reading.components != reading.numel else "elements"
    text = f"{format_nonfinite(reading)} among {reading.components:,} {unit} ({share})."
    return wrap(text, width)


def _where(report: StopReport, reading: RecordStatistics, width: int) -> list[str]:
    site = report.culprit.site
    lines = [f"module    {module_name(site)}"]
    if site.op:
        lines += wrap(f"{site.op} #{reading.call}", width, "op        ", " " * 10)
    if report.culprit.api:
        lines.append(f"API       {report.culprit.api}.{site.direction}")
    size = counted(reading.numel, "element")
    lines += wrap(f"{site.tensor_name}, {reading.dtype}, {size}", width, "tensor    ", " " * 10)
    if report.culprit.line:
        lines += wrap(report.culprit.line, width, "line      ", " " * 10)
    if site.role in ("param", "optimizer_state") and report.learning_rates:
        rates = ", ".join(f"{n}, lr {format_number(rate)}" for n, rate in report.learning_rates)
        lines += wrap(rates, width, "optimizer ", " " * 10)
    if report.world_size > 1:
        together = f"{report.rank} of {report.world_size}: all ranks stop together"
        lines += wrap(together, width, "rank      ", " " * 10)
    elif report.rank:
        lines.append(f"rank      {report.rank}")
    return lines


def made_by_lines(report: StopReport, width: int) -> list[str]:
    """The lines on the operator that made the culprit's values, with its inputs."""
    made = report.made_by
    if made is None:
        return []
    lines = wrap(made.how, width)
    rows = []
    results = [] if made.result is None else [("its result", made.result)]
    for name, record in (*made.inputs[:_OPERAND_ROWS], *results):
        fields = ("dtype", "numel", "nonfinite_count", "zero_count", "min", "max")
        rows.append([name, *format_fields(statistics_of(record), *fields)])
    if rows:
        header = ["tensor", "dtype", "elements", "NaN+Inf", "zeros", "min", "max"]
        lines += table(header, rows, left=2, width=width)
    if made.line and made.line != report.culprit.line:
        lines += wrap(made.line, width, "line      ", " " * 10)
    if made.variable:
        lines += wrap(made.variable, width, "variable  ", " " * 10)
    for number, place in enumerate(made.written):
        head = " " * 10 if number else "line      "
        lines += wrap(f"{'or' if number else 'perhaps'} {place}", width, head, " " * 10)[:2]
    return lines


def _replay_lines(report: StopReport, width: int) -> list[str]:
    """The result of running the step again at op level."""
    if report.replay is None:
        return []
    lines = [line for note in report.replay.remarks for line in wrap(note, width)]
    rerun = report.replay.report
    if rerun is None:
        return lines
    lines += wrap(
        f"run again at op level: {_headline(rerun, statistics_of(rerun.culprit.record))}", width
    )
    if rerun.culprit.line:
        lines += wrap(rerun.culprit.line, width, "line      ", " " * 10)
    lines += wrap(_verdict_text(rerun.culprit, 1), width)
    if rerun.inputs:
        lines += input_lines(rerun, width)
    return lines


def _when_text(report: StopReport, reading: RecordStatistics) -> str:
    site = report.culprit.site
    direction = {
        "forward": "in the forward pass",
        "backward": "in the backward pass",
        "optimizer": "at the optimizer's step",
    }.get(site.direction, site.direction)
    if site.role in ("param", "buffer"):
        # Read in forward as well, after a non-finite output.
        direction = "when it was read"
    elif site.op and site.direction == "forward" and module_name(site) == OUTSIDE:
        direction = "outside of backward()"  # the loss, data, or an update of the program's own
    when = f"step {report.step} (counted from 0), {direction}"
    if reading.call > 0 and not site.op:
        when += f", call {reading.call + 1} of this module in the step"
    return when + "."


def _updated_text(report: StopReport) -> str:
    before = [step for step in report.updated_since if step < report.culprit.step]
    if before:
        single = f"The update of step {before[0]:,} was"
        many = f"The updates of steps {before[0]:,} to {before[-1]:,} were"
        since = ", and none since" if report.weights_intact else ""
        return (
            f"{single if len(before) == 1 else many} applied after it was last read finite{since}."
        )
    if report.weights_intact is None:
        return ""
    if report.weights_intact:
        return "No optimizer has updated a weight in this step."
    why = f": {report.why_updated}" if report.why_updated else ""
    return f"The weights have been updated in this step{why}."


def _weights_text(report: StopReport) -> str:
    """The updates since the culprit, and what the weights hold now, where they were read."""
    since = [step for step in report.updated_since if step >= report.culprit.step]
    broken, texts = report.broken_weights, []
    if len(since) > 1:
        texts.append(
            f"{len(since)} updates were applied from then on, in steps {since[0]:,} to "
            f"{since[-1]:,}."
        )
    if broken:
        texts.append(f"{named_weights(broken)} now.")
    elif broken is not None:
        is_whole = not {"include", "exclude"} & set(report.left_out_by)
        texts.append(f"No {'' if is_whole else 'observed '}weight holds NaN or Inf now.")
    return " ".join(texts)


def _batch_lines(report: StopReport, width: int) -> list[str]:
    return [] if report.batch is None else wrap(f"Batch {printable(str(report.batch))}.", width)


def _advice_lines(report: StopReport, width: int, most: int) -> list[str]:
    """``most``: lines; what does not fit into them is left out, but of the first item its code
    alone.
    """
    lines: list[str] = []
    number = 1
    items = advise(report)
    for item in items:
        shown = wrap(item.text, width, f"{number}. ", "   ")
        code = [f"     {line}" for line in item.code.splitlines()]
        later = items[items.index(item) + 1 :]
        kept = sum(len(wrap(advice.text, width - 3)) for advice in later if advice.is_kept)
        if lines or len(shown) + len(code) + kept <= most:
            shown += code
        if not lines or len(lines) + len(shown) + kept <= most:
            lines += shown
            number += 1
    return lines
