"""Writes the page of a comparison: the text of the report, and the data of what was gathered."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Union

from fastcheck.comparison.names import NameTable
from fastcheck.comparison.render import sections
from fastcheck.comparison.result import Result
from fastcheck.report.page.shell import page_html, text_html, write_html
from fastcheck.utils.text.layout import Part, Section, Table

from .document import comparison_data
from .gather import Gathered

__all__ = ["comparison_html", "write_comparison"]

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


def comparison_html(comparison: Result, gathered: Gathered, names: NameTable) -> str:
    """The page as HTML."""
    both = [os.path.basename(os.path.abspath(side)) for side in _sides(comparison)]
    name = f"{both[0]} against {both[1]}"
    return page_html(
        f"fastcheck: {name}",
        name,
        _verdict(comparison),
        comparison_data(comparison, gathered, names),
    )


def write_comparison(
    path: Union[str, os.PathLike[str]], comparison: Result, gathered: Gathered, names: NameTable
) -> int:
    """Writes the page to ``path``, which it replaces; returns its size in bytes.

    Raises:
        LogError: the file can't be written.
    """
    return write_html(path, comparison_html(comparison, gathered, names))


def _sides(comparison: Result) -> tuple[str, str]:
    return comparison.actual, comparison.reference


def _verdict(comparison: Result) -> str:
    parts = sections(comparison)
    result = " ".join(_lines(section.parts) for section in parts if section.label == "result")
    style = "good" if comparison.agrees else "bad"
    made = [f'<p class="headline {style}">{text_html(result)}</p>']
    made += [_section(section) for section in parts if section.label != "result"]
    return "\n".join(made)


def _lines(parts: Sequence[Part]) -> str:
    return " ".join(part for part in parts if isinstance(part, str))


def _section(section: Section) -> str:
    title = text_html(_TITLES.get(section.label, section.label))
    opened = " open" if section.label in _OPEN else ""
    body: list[str] = []
    text: list[str] = []
    for part in section.parts:
        if isinstance(part, Table):
            body += _pre(text)
            text = []
            body.append(_table(part, title))
        else:
            text.append(part)
    body += _pre(text)
    return (
        f"<details{opened}><summary>{title}</summary>"
        f'<div class="scrolling" tabindex="0" role="region" aria-label="{title}">'
        f"{''.join(body)}</div></details>"
    )


def _pre(lines: Sequence[str]) -> list[str]:
    return [f"<pre>{text_html(chr(10).join(lines))}</pre>"] if lines else []


def _table(table: Table, title: str) -> str:
    columns = len(table.header)

    def cell(tag: str, column: int, text: str) -> str:
        is_number = table.left <= column < columns - table.note
        return f"<{tag}{' class=number' if is_number else ''}>{text_html(text)}</{tag}>"

    head = "".join(
        cell("th", at, text) if text else "<td></td>" for at, text in enumerate(table.header)
    )
    rows = "".join(
        f"<tr>{''.join(cell('td', at, text) for at, text in enumerate(row))}</tr>"
        for row in table.rows
    )
    caption = f"<caption>{title}</caption>"
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
