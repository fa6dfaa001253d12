"""Renders a comparison as text: the questions, the first difference, the growth of the error."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Optional

from fastcheck.comparison.over_time import shown_losses
from fastcheck.statistics.elements import Elements
from fastcheck.utils.text.layout import Part, Section, Table, listed, paint, sparkline, wrap
from fastcheck.utils.text.numbers import (
    and_more,
    counted,
    enumerated,
    format_number,
    format_shape,
    format_steps,
)

from .block import Kind, Phase
from .measure import ELEMENTS, REASONS, PairState
from .row import Row
from .tally import Found

if TYPE_CHECKING:
    from .questions import Answer
    from .result import Result

_WIDTH = 100
_BODY = _WIDTH - 10
_SETTINGS = 12
_NAMES = 6
_TENSORS = 20
_FEW = 3
_ALONE = {
    Phase.FORWARD: "On the other side its module is called less often or not at all, or is not "
    "observed, or returns a tensor that was read by another name, as dropout does in eval mode",
    Phase.GRADIENTS: "On the other side no gradient comes there (detach(), no_grad(), frozen "
    "weights), or it is not observed, or read by another name",
}
# The measures in the table of the worst tensors.
_WORST = ("cosine", "max abs", "within 1/1000", "within 5/1000", "max ULP")
_SHOWN = {"no": "NO", "partly": "partly", "not asked": "-", "unknown": "?"}
_STYLE = {"yes": "green", "no": "red", "partly": "yellow", "accepted": "yellow"}


def sections(comparison: Result, color: bool = False, ascii_only: bool = False) -> list[Section]:
    """The parts of the report, at most 100 columns wide where names allow it; ``color``: words that
    matter have a colour.
    """
    blocks = [
        Section("compare", _sides_and_steps(comparison)),
        Section("asked", _asked(comparison, color)),
        Section("result", _result(comparison, color)),
    ]
    if comparison.advice:
        lines = [line for text in comparison.advice for line in wrap(text + ".", _BODY, "", "  ")]
        blocks.append(Section("why", lines))
    stopped = any(answer.answer == "not asked" for answer in comparison.answers)
    given = [answer for answer in comparison.answers[:4] if answer.answer == "no"]
    shown = comparison.first if not given or not stopped else None
    is_checkpoint = comparison.kind == Kind.CHECKPOINT.value
    if is_checkpoint and comparison.rows:
        blocks.append(Section("tensors", _worst_tensors(comparison)))
    elif given and stopped:
        for answer in given:
            if answer.found is not None:
                blocks.append(Section(answer.question.split()[-1], _sides(answer.found.row)))
    elif shown is not None:
        blocks.append(Section("first", _first(comparison, shown)))
        if growth := _growth(comparison, shown, ascii_only):
            blocks.append(Section("growth", growth))
    elif comparison.verdict == "equal" and comparison.first_inexact is not None:
        inexact = comparison.first_inexact
        text = f"not equal to the bit from step {inexact.row.step:,} on, {inexact.row.name} first"
        if is_checkpoint:
            count = sum(states.get("close", 0) for states in comparison.counts.values())
            more = f", and {count - 1:,} more (--exact names them)" if count > 1 else ""
            text = f"not equal to the bit: {inexact.row.name}{more}"
        blocks.append(Section("first", wrap(text, _BODY)))
    if comparison.unchanged:
        blocks.append(Section("unchanged", _unchanged(comparison)))
    if len(comparison.losses) > 1 and any(loss.error for loss in comparison.losses):
        blocks.append(Section("loss", _losses(comparison)))
    if comparison.missing:
        blocks.append(Section("missing", _missing(comparison)))
    if comparison.notes:
        lines = [line for note in comparison.notes for line in wrap(note, _BODY, "- ", "  ")]
        blocks.append(Section("notes", lines))
    return blocks


def _sides_and_steps(comparison: Result) -> list[str]:
    lines = [f"actual     {comparison.actual}", f"reference  {comparison.reference}"]
    pairs = sum(
        count
        for states in comparison.counts.values()
        for state, count in states.items()
        if not state.startswith("only")
    )
    if pairs:
        text = f"{counted(pairs, 'pair')} of tensors"
        if comparison.kind != Kind.CHECKPOINT.value:
            text = f"{format_steps(comparison.steps)}, {text}"
        lines.append(text)
    return lines


def _asked(comparison: Result, color: bool) -> list[Part]:
    widest = max(len(answer.question) for answer in comparison.answers)
    is_checkpoint = comparison.kind == Kind.CHECKPOINT.value
    lines: list[Part] = []
    for answer in comparison.answers:
        word = _SHOWN.get(answer.answer, answer.answer)
        style = _STYLE.get(answer.answer, "dim")
        head = f"{answer.question:<{widest}}  {paint(word, style, color)}"
        pad = " " * (8 - len(word))
        lines.append(f"{head}{pad}  {answer.text}".rstrip())
        lines += _details(answer, is_checkpoint, widest + 2)
    return lines


def _details(answer: Answer, is_checkpoint: bool, indent: int) -> list[Part]:
    pad, width = " " * indent, _BODY - 20 + indent
    lines: list[Part] = []
    if answer.settings:
        rows = [[s.path or "it all", s.actual, s.reference] for s in answer.settings[:_SETTINGS]]
        lines.append(Table(["", "actual", "reference"], rows, left=3, width=110, indent=indent))
        hidden = len(answer.settings) - len(rows)
        lines += [pad + line for line in and_more(hidden, "more (--json shows all)")]
    if answer.found is not None:
        row = answer.found.row
        step = "" if is_checkpoint else f" at step {row.step:,}"
        step += f", rank {row.rank}" if row.rank else ""
        lines += wrap(f"first{step}: {row.name}", width, pad, pad + "  ")
        if row.why:
            lines += wrap(row.why, width, pad + "  ")
    return lines


def _result(comparison: Result, color: bool) -> list[str]:
    if comparison.verdict == "identical":
        both = "in the steps and ranks that both have"
        which = both if comparison.leaves_out else "nothing missing"
        return [paint(f"identical: equal to the bit, {which}.", "green", color)]
    if comparison.verdict == "equal":
        accepted = [a.question for a in comparison.answers if a.answer == "accepted"]
        but = f", except for {enumerated(accepted)} (accepted)" if accepted else ""
        return [paint(f"equal within the thresholds{but}.", "green", color)]
    wrong = [answer.question for answer in comparison.answers if answer.answer == "no"]
    if wrong:
        text = f"different: {enumerated(wrong)}."
        if any(answer.answer == "not asked" for answer in comparison.answers):
            text += " Later questions are not asked: their answers may follow from this."
        style = "red"
    else:
        text = "different: some tensors have no partner that can be read; the others agree."
        style = "yellow"
    return [paint(line, style, color) for line in wrap(text, _BODY)]


def _first(comparison: Result, difference: Found) -> list[Part]:
    row = difference.row
    where = f"rank {row.rank}, " if any(r.rank for r in comparison.rows) else ""
    call = f" (call {row.call})" if row.call else ""
    lines: list[Part] = []
    lines += wrap(f"{where}step {row.step:,}: {row.name}{call}", _BODY, "", "  ")
    if not difference.count_before:
        text = "no tensor that was computed before it in this step is on both sides"
    elif difference.exact_before:
        what = "what was dumped" if comparison.is_partial else "everything computed"
        text = f"{what} before it in this step is equal to the bit"
    else:
        before = _format_error(difference.error_before)
        text = f"before it in this step the largest error is {before}"
    reason = row.reason or "not equal to the bit"
    if row.state is not PairState.REORDERED:
        reason += f": error {_format_error(row.error)}"
    lines += wrap("; ".join(filter(None, [reason, row.relation, text])) + ".", _BODY)
    for side, names in zip(("actual", "reference"), difference.alone):
        # The advice has what is read.
        if names := tuple(name for name in names if " · forward · input" not in name):
            shown = listed(names, _FEW, ", and {:,} more")
            alone = _ALONE.get(row.phase, _ALONE[Phase.FORWARD])
            lines += wrap(f"Before it, in {side} alone: {shown}. {alone}.", _BODY)
    lines.append("")
    lines += _sides(row)
    inexact = comparison.first_inexact
    if inexact is not None and inexact.key < difference.key:
        lines.append("")
        hint = (
            "Both sides have the same environment, so look there."
            if comparison.expects_bits
            else "The two sides were computed in different ways, which round differently."
        )
        lines += wrap(
            f"The first tensor that is not equal to the bit: step {inexact.row.step:,}, "
            f"{inexact.row.name} (error {_format_error(inexact.row.error)}). {hint}",
            _BODY,
        )
    return lines


def _worst_tensors(comparison: Result) -> list[Part]:
    """A table of the tensors that differ most, with their measures."""
    rows = sorted(comparison.rows, key=lambda row: -row.error)[:_TENSORS]
    shown = [name.removeprefix("within ") for name in _WORST]
    header = ["tensor", "shape", "error", *shown, ""]
    cells = []
    for row in rows:
        elements = row.elements
        shape = _cell(None if row.reference is None else row.reference["shape"])
        measures = {} if elements is None else _measures(elements)
        measured = [measures.get(name, "-") for name in _WORST]
        # The error is redundant where the measures are shown.
        is_shown = elements is not None and row.reason == REASONS[ELEMENTS]
        note = row.relation if is_shown else row.why
        error = "-" if row.actual is None or row.reference is None else _format_error(row.error)
        cells.append([row.name, shape, error, *measured, note])
    lines: list[Part] = [Table(header, cells, left=2, width=_BODY + 40, note=1)]
    hidden = len(comparison.rows) + comparison.more_rows - len(rows)
    return lines + and_more(hidden, "more (--csv FILE has all)")


def _sides(row: Row) -> list[Part]:
    counts = {"nan_count": "NaN", "posinf_count": "+Inf", "neginf_count": "-Inf"}
    columns = ("dtype", "shape", "numel", *counts, "min", "max", "mean", "l2_norm")
    sides = [("actual", row.actual), ("reference", row.reference)]
    used = []
    for column in (*columns, "checksum", "crc32"):
        cells = [None if values is None else values[column] for _, values in sides]
        if any(cells) if column in counts else any(value is not None for value in cells):
            used.append(column)
    rows = [
        [name, *(_cell(None if values is None else values[column]) for column in used)]
        for name, values in sides
    ]
    header = ["", *(counts.get(column, column) for column in used)]
    lines: list[Part] = [Table(header, rows, left=1, width=_BODY + 20)]
    elements = row.elements
    if elements is not None:
        measures = _measures(elements)
        if elements.nonfinite:
            measures["NaN/Inf on one side"] = f"{elements.nonfinite:,}"
        lines += ["", Table(list(measures), [list(measures.values())], left=0, width=_BODY + 20)]
    return lines


def _measures(elements: Elements) -> dict[str, str]:
    return {
        "cosine": f"{elements.cosine:.6f}",
        "max abs": _format_error(elements.max_abs),
        "max rel": _format_error(elements.max_rel),
        "within 1/1000": f"{elements.within_1000:.2%}",
        "within 5/1000": f"{elements.within_200:.2%}",
        "distance": _format_error(elements.euclidean),
        "max ULP": "-" if elements.max_ulp is None else f"{elements.max_ulp:,}",
    }


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return format_shape(value)
    return value if isinstance(value, str) else format_number(value)


def _format_error(value: float) -> str:
    return "inf" if math.isinf(value) else f"{value:.2g}"


def _growth(comparison: Result, difference: Found, ascii_only: bool) -> list[Part]:
    lines: list[Part] = []
    if any(row.state is not PairState.SAME for row in difference.trail):
        lines.append("in that step, what was recorded next:")
        rows = [[row.name, _state(row)] for row in difference.trail[:_NAMES]]
        lines.append(Table(["tensor", "error"], rows, width=_BODY - 2, indent=2))
    steps = comparison.growth
    if len(steps) > 1 and any(step.error for step in steps):
        series: list[Optional[float]] = [
            step.error if math.isfinite(step.error) else None for step in steps
        ]
        bad = [not math.isfinite(step.error) for step in steps]
        lines.append(f"largest error of each step, {steps[0].step:,} to {steps[-1].step:,}:")
        lines.append("  " + sparkline(series, bad, width=60, ascii_only=ascii_only))
        worst = max(steps, key=lambda step: step.error)
        lines += wrap(
            f"  from {_format_error(steps[0].error)} to {_format_error(steps[-1].error)}; "
            f"most at step {worst.step:,}, {_format_error(worst.error)}, {worst.name}",
            _BODY,
            "  ",
            "    ",
        )
    return lines


def _state(row: Row) -> str:
    if row.state is PairState.SAME:
        return "0"
    return _format_error(row.error) if row.error else "0 (not to the bit)"


def _unchanged(comparison: Result) -> list[str]:
    names = comparison.unchanged
    shown = listed(names, _TENSORS, ", and {:,} more (--json shows all)")
    return wrap(f"{len(names):,} names are equal to the bit: {shown}", _BODY, "", "  ")


def _losses(comparison: Result) -> list[Part]:
    losses, start = list(comparison.losses), comparison.drifts_from
    worst = max(losses, key=lambda loss: loss.error)
    begins = "does not drift apart" if start is None else f"drifts apart from step {start:,} on"
    most = f"{_format_error(worst.error)} at step {worst.step:,}"
    rows = [
        [f"{loss.step:,}", f"{loss.actual:.6g}", f"{loss.reference:.6g}", _format_error(loss.error)]
        for loss in shown_losses(losses, start)
    ]
    header = ["step", "actual", "reference", "difference"]
    return [f"{begins}; the largest relative difference is {most}", Table(header, rows, left=0)]


def _missing(comparison: Result) -> list[str]:
    lines, is_checkpoint = [], comparison.kind == Kind.CHECKPOINT.value
    for state, side in ((PairState.ONLY_ACTUAL, "actual"), (PairState.ONLY_REFERENCE, "reference")):
        missing = [entry for entry in comparison.missing if entry.state is state]
        if not missing:
            continue
        total = sum(entry.count for entry in missing)
        names = listed([entry.name for entry in missing], _NAMES, ", and {:,} more names")
        first = f", first at step {min(entry.first_step for entry in missing):,}"
        lines += wrap(
            f"only in {side}, {total:,}{'' if is_checkpoint else first}: {names}",
            _BODY,
            "",
            "  ",
        )
    return lines
