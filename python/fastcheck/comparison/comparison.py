"""Comparison: the Result that compare() returns, with its text as ``str()``."""

from __future__ import annotations

from fastcheck.notebook import block_html, fields_html, guarded_html, lines_html, table_html

from .render import render_comparison
from .result import Result
from .row import Row

__all__ = ["Comparison"]


class Comparison(Result):
    """A Result whose ``str()`` is the report."""

    def __str__(self) -> str:
        return render_comparison(self)

    def _repr_html_(self) -> str:
        """For notebooks: the verdict, the answers, and the first rows that differ. Reads nothing;
        never raises.
        """
        return guarded_html(self, lambda: _comparison_html(self))


def _comparison_html(found: Comparison) -> str:
    fields: list[tuple[str, object]] = [
        ("actual", found.actual),
        ("reference", found.reference),
        ("compared", found.kind),
        ("first difference", None if found.first is None else _place(found.first.row)),
        ("losses drift from step", found.drifts_from),
    ]
    answers = [[answer.question, answer.answer, answer.text] for answer in found.answers]
    bad = [answer.answer == "no" for answer in found.answers]
    rows: list[list[object]] = [
        [row.step, row.name, row.phase.name.lower(), row.state.name.lower(), row.error, row.reason]
        for row in found.rows
    ]
    header = ["step", "tensor", "question", "state", "error", "reason"]
    return block_html(
        found.verdict,
        fields_html(fields),
        table_html(["question", "equal", ""], answers, bad),
        table_html(header, rows, total=len(found.rows) + found.more_rows),
        lines_html(found.notes),
    )


def _place(row: Row) -> str:
    return f"{row.name}, step {row.step:,}, error {row.error:.3g}"
