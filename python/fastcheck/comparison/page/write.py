"""Writes the page of a comparison: the text of the report, and the data of what was gathered."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from itertools import groupby
from typing import Any, Optional

import numpy as np

from fastcheck._version import __version__
from fastcheck.comparison.block import Kind, Phase
from fastcheck.comparison.measure import REASONS
from fastcheck.comparison.names import Name, NameTable
from fastcheck.comparison.over_time import LOSS_DRIFT, LossPair
from fastcheck.comparison.questions import IN_A_RUN
from fastcheck.comparison.render import sections
from fastcheck.comparison.result import Result
from fastcheck.comparison.row import Row
from fastcheck.comparison.tally import COMPUTED, Found
from fastcheck.log.step_table import StepRow
from fastcheck.report.page.container import (
    Container,
    details_html,
    headline_html,
    lines_html,
    page_html,
    table_html,
    text_html,
    write_html,
)
from fastcheck.report.page.parts import add_grid, dtype_list, json_numbers, step_columns
from fastcheck.utils.text.layout import Section, Table
from fastcheck.utils.text.numbers import to_json

from .gather import NEVER, Gathered

_SIGNALS = ("learning_rate", "loss", "scale", "gradient_norm", "overflow")
_PAGE_TITLES = {
    "learning_rate": "learning rate",
    "scale": "loss scale",
    "gradient_norm": "gradient norm",
    "overflow": "skipped update",
}


def parted_signals(actual: Sequence[StepRow], reference: Sequence[StepRow]) -> list[dict[str, Any]]:
    """The numbers that differ anywhere on the lowest rank: of each the first step where it is not
    equal, with both values, and the first where it differs by more than LOSS_DRIFT of the
    reference.
    """
    ranks = {row.rank for row in actual} & {row.rank for row in reference}
    if not ranks:
        return []
    rank = min(ranks)
    ours, theirs = (
        {row.step: row for row in rows if row.rank == rank} for rows in (actual, reference)
    )
    steps = sorted(ours.keys() & theirs.keys())
    signals = []
    for name in _SIGNALS:
        pairs = [(step, getattr(ours[step], name), getattr(theirs[step], name)) for step in steps]
        apart = [LossPair(*pair) for pair in pairs if not _same(*pair[1:])]
        if apart:
            step, mine, other = apart[0]
            far = (pair.step for pair in apart if pair.error > LOSS_DRIFT)
            signals.append(
                {
                    "signal": _PAGE_TITLES.get(name, name),
                    "first_inexact": step,
                    "first_different": next(far, None),
                    "actual": _cell(mine),
                    "reference": _cell(other),
                    "row": -1,
                }
            )
    return signals


def _same(mine: Optional[float], other: Optional[float]) -> bool:
    if mine is None or other is None:
        return True  # one side has not read it
    return mine == other or (math.isnan(mine) and math.isnan(other))


def _cell(value: Any) -> Any:
    return ("yes" if value else "no") if isinstance(value, bool) else value


_MOST_ROWS = 500
# The number of answers about what both sides were given: settings, batches, first weights.
_GIVEN = 4
_QUESTIONS = {phase: IN_A_RUN[phase] for phase in (Phase.BATCHES, Phase.WEIGHTS, *COMPUTED)}
#: The order of signals that part at one step: causes before effects.
_ORDER = (
    *("learning rate", "tensors: batches", "tensors: initial weights", "tensors: forward"),
    *("tensors: loss", "loss", "tensors: gradients", "gradient norm", "loss scale"),
    *("skipped update", "tensors: update"),
)
_SIDE = ("dtype", "numel", "nan_count", "posinf_count", "neginf_count", "min", "max", "mean")


def comparison_data(comparison: Result, gathered: Gathered, names: NameTable) -> tuple[str, str]:
    """The header and the arrays in base64."""
    container = Container()
    columns = gathered.rows.columns()
    count = gathered.rows.count
    actual, reference = gathered.steps()
    ranks = sorted(set(columns["rank"].tolist())) or [0]
    header: dict[str, Any] = {
        "format": 1,
        "kind": "comparison",
        "fastcheck": __version__,
        "directory": comparison.actual,
        "records": int(columns["records"].sum()),
        "damaged": 0,
        "dropped_bytes": 0,
        "dtypes": dtype_list(),
        "verdicts": [],
        "sites": _name_columns([names[number] for number in range(len(names))]),
        "rows": {name: json_numbers(column) for name, column in columns.items()},
        "bad": [],
        "steps": to_json({rank: step_columns(actual, rank) for rank in ranks}),
        "events": [],
        "event_count": 0,
        "spread": {"count": 0, "places": []},
        "meta": {str(rank): {} for rank in ranks},
        "around": None,
    }
    if gathered.sides is None:
        header.update(axis={"width": 1, "starts": []}, coarse={"width": 1, "starts": []})
        header["exact"] = True
    else:
        header.update(add_grid(container, gathered.sides[0], count))
        add_grid(container, gathered.sides[1], count, "reference.", with_bad=False)
        seen = np.logical_or.reduce(gathered.sides[0].seen[:count], axis=0)
        excess = gathered.excess[:count, seen]
        if header["exact"]:
            container.add_f64("excess", excess)
        else:
            container.add_log("excess", excess, 8)
    header["first"] = _first_row(comparison, columns, names)
    rows = () if gathered.is_timed else comparison.rows[:_MOST_ROWS]
    header["comparison"] = {
        "kind": comparison.kind,
        "actual": comparison.actual,
        "reference": comparison.reference,
        "verdict": comparison.verdict,
        "is_timed": gathered.is_timed,
        "questions": {int(phase): text for phase, text in _QUESTIONS.items()},
        "reasons": list(REASONS),
        "reference_steps": to_json({rank: step_columns(reference, rank) for rank in ranks}),
        "parted": sorted(
            to_json(parted_signals(actual, reference)) + _parted_questions(columns),
            key=lambda signal: _ORDER.index(signal["signal"]),
        ),
        # The first pairs that differ, in the order of the computation.
        "pairs": [to_json(_pair(row)) for row in rows],
        "pair_count": len(comparison.rows) + comparison.more_rows,
    }
    return container.to_text(header)


def _name_columns(names: list[Name]) -> dict[str, list[str]]:
    return {
        "module": [name.module for name in names],
        "type": ["" if name.module or name.op else "the model" for name in names],
        "direction": [name.direction for name in names],
        "role": [name.role for name in names],
        "name": [str(name).rpartition(" · ")[2] for name in names],
        "op": [name.op for name in names],
    }


def _first_row(
    comparison: Result, columns: dict[str, np.ndarray], names: NameTable
) -> Optional[dict[str, int]]:
    """The row of the first difference; of the first inexact row where that is all there is."""
    difference = _first_found(comparison) or comparison.first_inexact
    if difference is None:
        return None
    at = [
        row
        for row, (site, rank) in enumerate(zip(columns["site"].tolist(), columns["rank"].tolist()))
        if rank == difference.row.rank and str(names[site]) == difference.row.name
    ]
    return {"rank": difference.row.rank, "step": difference.row.step, "row": at[0] if at else -1}


def _first_found(comparison: Result) -> Optional[Found]:
    """The first place that differs: what both sides were given comes before what they computed."""
    given = [answer.found for answer in comparison.answers[:_GIVEN] if answer.answer == "no"]
    return next((difference for difference in given if difference is not None), comparison.first)


def _parted_questions(columns: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """The questions with a difference: the first steps of each, and the earliest's first row."""
    questions = []
    for phase, text in _QUESTIONS.items():
        mine = columns["phase"] == phase
        inexact = np.flatnonzero(mine & (columns["first_inexact"] != NEVER))
        if not len(inexact):
            continue
        different = np.flatnonzero(mine & (columns["different"] > 0))
        steps = columns["first_inexact"][inexact]
        row, far = int(inexact[np.argmin(steps)]), None
        if len(different):
            firsts = columns["first_different"][different]
            row, far = int(different[np.argmin(firsts)]), int(firsts.min())
        questions.append(
            {
                "signal": f"tensors: {text}",
                "first_inexact": int(steps.min()),
                "first_different": far,
                "actual": None,
                "reference": None,
                "row": row,
            }
        )
    return questions


def _pair(row: Row) -> dict[str, Any]:
    whole = row.to_dict()
    measures = ("step", "rank", "question", "call", "state", "error", "reason")
    made = {name: whole[name] for name in (*measures, "cosine", "max_abs", "max_ulp", "differing")}
    made["name"] = row.name
    for side, values in (("actual", row.actual), ("reference", row.reference)):
        made[side] = None if values is None else {name: values[name] for name in (*_SIDE, "shape")}
    return made


_TITLES = {
    "compare": "What was compared",
    "asked": "Questions, in the order of cause and effect",
    "first": "First difference",
    "growth": "Growth of the difference",
    "unchanged": "What did not change",
    "loss": "Losses",
    "missing": "On one side only",
    "notes": "Notes",
    "tensors": "Tensors",
}
_OPEN = ("compare", "asked", "first")


def write_comparison(path: str, comparison: Result, gathered: Gathered, names: NameTable) -> None:
    """Writes the page to ``path``, which it replaces.

    Raises:
        LogError: the file can't be written.
    """
    sides = (comparison.actual, comparison.reference)
    name = " against ".join(os.path.basename(os.path.abspath(side)) for side in sides)
    data = comparison_data(comparison, gathered, names)
    write_html(path, page_html(f"fastcheck: {name}", name, _verdict(comparison), data))


def _verdict(comparison: Result) -> str:
    parts = sections(comparison)
    of_result = [part for section in parts if section.label == "result" for part in section.parts]
    result = " ".join(part for part in of_result if isinstance(part, str))
    style = "good" if comparison.agrees else "bad"
    first = None if comparison.agrees else _first_found(comparison)
    if first is not None:
        result += f" First: {_place(comparison, first.row)}."
    made = [headline_html(result, style, _tries(comparison, first))]
    made += [_section(section) for section in parts if section.label not in ("result", "why")]
    return "\n".join(made)


def _place(comparison: Result, row: Row) -> str:
    rank = f", rank {row.rank}" if any(other.rank for other in comparison.rows) else ""
    step = "" if comparison.kind == Kind.CHECKPOINT.value else f", step {row.step:,}"
    return f"{row.name}{rank}{step}"


def _tries(comparison: Result, first: Optional[Found]) -> list[str]:
    """The advice of the result, and what to look at first."""
    tries = [f"{text[0].upper()}{text[1:]}." for text in comparison.advice]
    given = [answer.question for answer in comparison.answers[:_GIVEN] if answer.answer == "no"]
    if given and Kind(comparison.kind).family == "run":
        names = " and ".join(given)
        tries.append(f"Give both sides the same {names}, and compare again.")
    elif first is not None and not tries:
        tries.append(f"Look at {first.row.name}: its numbers on both sides are below.")
    return tries


def _section(section: Section) -> str:
    title = text_html(_TITLES.get(section.label, section.label))
    body = []
    for kind, parts in groupby(section.parts, type):
        if kind is Table:
            body += [table_html(part, title) for part in parts if isinstance(part, Table)]
        else:
            body.append(lines_html(part for part in parts if isinstance(part, str)))
    return details_html(title, "".join(body), section.label in _OPEN)
