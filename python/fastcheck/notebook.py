"""HTML of objects for notebooks: small, escaped, without script, readable on a light and on a dark
page. Imports nothing but ``errors``, so that a class of any room can use it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any, Callable, Optional

from .errors import printable

#: Rows of a table, and characters of a cell.
MOST_ROWS = 20
_MOST_CHARACTERS = 300

# Colours of the page, and greys and tints that show on any.
_RULE = "1px solid rgba(128,128,128,.4)"
_BLOCK = "font-size:90%;line-height:1.4;overflow-x:auto;max-width:100%"
_CELL = "padding:1px 10px 1px 0;text-align:{};border:0;background:none;color:inherit"
_HEAD = f"{_CELL};border-bottom:{_RULE};font-weight:600"
_MARKED = ' style="background:rgba(230,40,90,.18)"'


def guarded_html(shown: object, make: Callable[[], str]) -> str:
    """Returns what ``make`` returns; if it raises, the text of ``shown``."""
    try:
        return make()
    except Exception:
        return f"<pre>{_text(_repr_of(shown), _MOST_CHARACTERS * 10)}</pre>"


def block_html(title: str, *parts: str) -> str:
    """Parts under a title, which is plain text."""
    return f'<div style="{_BLOCK}"><strong>{_text(title)}</strong>{"".join(parts)}</div>'


def fields_html(fields: Sequence[tuple[str, object]]) -> str:
    """Names and their values, without those that are None or empty."""
    rows = [
        f'<tr><td style="{_CELL.format("left")};opacity:.7">{_text(name)}</td>'
        f'<td style="{_CELL.format("left")}">{cell_html(value)}</td></tr>'
        for name, value in fields
        if value is not None and value != ""
    ]
    return _table("".join(rows))


def table_html(
    header: Sequence[str],
    rows: Sequence[Sequence[object]],
    marked: Optional[Sequence[bool]] = None,
    total: Optional[int] = None,
) -> str:
    """A table of at most MOST_ROWS rows, text to the left and numbers to the right, and a line with
    the number of the others. ``marked``: rows that stand out; ``total``: where there are more rows
    than are given.
    """
    if not rows:
        return ""
    shown = list(rows[:MOST_ROWS])
    flags = list(marked or [])[:MOST_ROWS] + [False] * len(shown)
    sides = ["right" if all(_is_number(c) for c in column) else "left" for column in zip(*shown)]
    head = "".join(
        f'<th style="{_HEAD.format(side)}">{_text(name)}</th>' for name, side in zip(header, sides)
    )
    body = "".join(
        f"<tr{_MARKED if flag else ''}>"
        + "".join(
            f'<td style="{_CELL.format(side)}">{cell_html(value)}</td>'
            for value, side in zip(row, sides)
        )
        + "</tr>"
        for row, flag in zip(shown, flags)
    )
    left = (len(rows) if total is None else total) - len(shown)
    more = f'<div style="opacity:.7">and {left:,} more</div>' if left > 0 else ""
    return _table(f"<tr>{head}</tr>{body}") + more


def lines_html(lines: Sequence[str]) -> str:
    """Lines of text, at most MOST_ROWS."""
    shown = [f"<div>{_text(line, 3 * _MOST_CHARACTERS)}</div>" for line in lines[:MOST_ROWS]]
    left = len(lines) - len(shown)
    return "".join(shown) + (f'<div style="opacity:.7">and {left:,} more</div>' if left else "")


def cell_html(value: object) -> str:
    """A value: numbers with six digits, all else as its text."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.6g}" if math.isfinite(value) else _text(value)
    return _text(value)


def _table(rows: str) -> str:
    return f'<table style="border-collapse:collapse;margin:4px 0;color:inherit">{rows}</table>'


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _text(value: Any, most: int = _MOST_CHARACTERS) -> str:
    text = str(value)
    text = text if len(text) <= most else text[: most - 1] + "…"
    return escape(printable(text, keep="\n"), quote=True)


def _repr_of(shown: object) -> str:
    try:
        return repr(shown)
    except Exception:
        return object.__repr__(shown)
