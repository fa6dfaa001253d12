"""Plain-text layout for reports and commands: sections, wrapping, tables, sparklines, colours;
cells of CSV files.
"""

from __future__ import annotations

import math
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TextIO, Union

from fastcheck.errors import printable

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def csv_text(text: str) -> str:
    """``text`` as a cell that no spreadsheet takes for a formula: an apostrophe goes before a
    formula.

    https://owasp.org/www-community/attacks/CSV_Injection
    """
    return f"'{text}" if text.startswith(_FORMULA) else text


GUTTER = 10
_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = "_.,-=+*#"
_BAD, _ASCII_BAD = "×", "!"
_NOT_ASCII = {"·": "-", "…": "..", "×": "x", "→": "->", "≥": ">=", "≤": "<="}
_STYLES = {"bold": "1", "red": "31;1", "dim": "2", "green": "32", "yellow": "33"}
# The text that paint() writes.
_PAINT = re.compile(r"(\x1b\[(?:" + "|".join(["0", *_STYLES.values()]) + ")m)")


def wants_ascii(stream: TextIO | None) -> bool:
    """True when ``stream`` can't print the few characters beyond ASCII that are used here."""
    encoding = getattr(stream, "encoding", None) or "ascii"
    try:
        (_BARS + "·…").encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return True
    return False


def wants_color(stream: TextIO) -> bool:
    """Colours go to a terminal only, and not there either when NO_COLOR is set
    (https://no-color.org).
    """
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


def to_ascii(text: str) -> str:
    """``text`` with the marks used here replaced, and anything else (a module's name) escaped."""
    for mark, plain_text in _NOT_ASCII.items():
        text = text.replace(mark, plain_text)
    return text.encode("ascii", "backslashreplace").decode("ascii")


def listed(items: Sequence[object], most: int, rest: str = " and {:,} more") -> str:
    """The first of them, divided by commas; ``rest`` where there are more than ``most``."""
    more = len(items) - most
    return ", ".join(map(str, items[:most])) + (rest.format(more) if more > 0 else "")


def paint(text: str, style: str, color: bool) -> str:
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if color and style and text else text


def line_width(default: int) -> int:
    """The width of lines: ``default``, or what the environment's COLUMNS asks for (50 at least)."""
    asked = os.environ.get("COLUMNS", "")
    return max(50, int(asked)) if asked.isdecimal() and int(asked) else default


def wrap(text: str, width: int, first: str = "", rest: str | None = None) -> list[str]:
    """``text`` in lines of at most ``width``; a word that is longer (a path) keeps a line to
    itself, whole.
    """
    return textwrap.wrap(
        text,
        max(width, 20),
        initial_indent=first,
        subsequent_indent=first if rest is None else rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def section(label: str, lines: Sequence[str], color: bool = False) -> list[str]:
    """``lines`` with ``label`` in the gutter of the first."""
    gutter = label.ljust(GUTTER)
    head = paint(gutter.rstrip(), "bold", color) + gutter[len(gutter.rstrip()) :]
    pad = " " * GUTTER
    return [
        ((head if number == 0 else pad) + line).rstrip()
        for number, line in enumerate(lines or ["-"])
    ]


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    left: int = 1,
    width: int = 78,
    note: int = 0,
) -> list[str]:
    """Columns aligned: the first ``left`` to the left, numbers to the right, the last ``note``
    unlabelled to the left.

    When the table is wider than ``width``, a name of the first column that has no room stands
    whole on lines of its own, above the other cells of its row. When there is no room for these
    either, each row is text: ``name`` and below it ``dtype float32, min 0.1``.
    """
    return Table(header, rows, left, width, note, may_be_text=True).lines()


def _as_text(table: Table, row: Sequence[str]) -> list[str]:
    """A row of a table in lines: its first cell, and the others with their labels."""
    name = f"{table.header[0]} {row[0]}" if table.left == 0 and any(row[1:]) else row[0]
    cells = [f"{label} {cell}".strip() for label, cell in zip(table.header[1:], row[1:]) if cell]
    # A label and its cell stay together: textwrap breaks no line at this space.
    text = ", ".join(cell.replace(" ", "\xa0") for cell in cells)
    lines = wrap(name, table.width, rest="  ") + wrap(text, table.width, "  ")
    return [line.replace("\xa0", " ") for line in lines]


def _aligned(
    header: Sequence[str], rows: Sequence[Sequence[str]], left: int, width: int, note: int
) -> list[list[str]]:
    columns = len(header)
    cells = [list(header), *[list(row) for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(columns)]
    too_wide = sum(widths) + 2 * (columns - 1) - width
    if too_wide > 0:
        widths[0] = max(min(widths[0], 12), widths[0] - too_wide)
    blocks = []
    for row in cells:
        lines = []
        if len(row[0]) > widths[0]:
            lines, row = wrap(row[0], width, rest="  "), ["", *row[1:]]
        parts = []
        for column, cell in enumerate(row):
            to_left = column < left or column >= columns - note
            parts.append(cell.ljust(widths[column]) if to_left else cell.rjust(widths[column]))
        blocks.append([*lines, "  ".join(parts).rstrip()])
    return blocks


@dataclass(frozen=True)
class Table:
    """The cells of a table, for plain text and for other renderers; see table()."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1
    width: int = 78
    note: int = 0
    indent: int = 0
    #: Rows that are to stand out: a style of paint() by the row's index.
    styles: Mapping[int, str] = field(default_factory=dict)
    #: A table that is wider than ``width`` becomes text; see table().
    may_be_text: bool = False

    def lines(self, color: bool = False) -> list[str]:
        head, *rest = _aligned(self.header, self.rows, self.left, self.width, self.note)
        if (
            self.may_be_text
            and max(len(line) for row in (head, *rest) for line in row) > self.width
        ):
            head, rest = [], [_as_text(self, row) for row in self.rows]
        body = [
            paint(line, self.styles.get(row, ""), color)
            for row, lines in enumerate(rest)
            for line in lines
        ]
        return [" " * self.indent + line for line in (*head, *body)]


#: A line of text, or a table.
Part = Union[str, Table]


class Section(NamedTuple):
    """A part of a report, under its label."""

    label: str
    parts: Sequence[Part]

    def lines(self, color: bool = False) -> list[str]:
        lines: list[str] = []
        for part in self.parts:
            lines += part.lines(color) if isinstance(part, Table) else [part]
        return section(self.label, lines, color)


def printable_section(section: Section) -> Section:
    """``section`` with control characters escaped, which names of a file may hold; what paint()
    writes stays.
    """
    parts: list[Part] = []
    for part in section.parts:
        if isinstance(part, Table):
            rows = [[printable(cell) for cell in row] for row in part.rows]
            parts.append(replace(part, rows=rows))
        else:
            pieces = _PAINT.split(part)
            pieces[::2] = [printable(piece, keep="\n") for piece in pieces[::2]]
            parts.append("".join(pieces))
    return Section(section.label, parts)


def plain_text(sections: Iterable[Section], color: bool = False) -> str:
    return "\n\n".join("\n".join(section.lines(color)) for section in sections)


def sparkline(
    values: Sequence[float | None], bad: Sequence[bool], width: int = 60, ascii_only: bool = False
) -> str:
    """A character per value, ``×`` where ``bad``; the largest of each group when there are more
    than ``width``.

    Logarithmic when the positive values span more than a factor of ten.
    """
    bars = _ASCII_BARS if ascii_only else _BARS
    mark = _ASCII_BAD if ascii_only else _BAD
    pairs = list(zip(values, bad))
    if len(pairs) > width:
        groups = [
            pairs[i * len(pairs) // width : (i + 1) * len(pairs) // width] for i in range(width)
        ]
        pairs = [
            (
                max((v for v, _ in group if v is not None), default=None),
                any(is_bad for _, is_bad in group),
            )
            for group in groups
        ]
    usable = [v for v, is_bad in pairs if v is not None and not is_bad and math.isfinite(v)]
    logarithmic = is_logarithmic(usable)

    def height(value: float) -> float:
        return math.log(value) if logarithmic else value

    shown = [height(v) for v in usable if not logarithmic or v > 0]
    low, high = (min(shown), max(shown)) if shown else (0.0, 0.0)
    line = ""
    for value, is_bad in pairs:
        if is_bad:
            line += mark
        elif value is None or not math.isfinite(value):
            line += " "
        elif logarithmic and value <= 0:
            line += bars[0]
        else:
            part = (height(value) - low) / (high - low) if high > low else 0.0
            line += bars[min(len(bars) - 1, int(part * len(bars)))]
    return line


def is_logarithmic(values: Sequence[float]) -> bool:
    """True if sparkline() shows these values on a logarithmic scale."""
    positive = [v for v in values if v > 0]
    return bool(positive) and max(positive) > 10 * min(positive)


def for_stderr(text: str, ascii_only: bool | None = None) -> str:
    """``text`` as a traceback, and so str() of an exception, is printed to standard error.
    ``ascii_only``: None: where that prints ASCII only.
    """
    is_ascii = wants_ascii(sys.stderr) if ascii_only is None else ascii_only
    return to_ascii(text) if is_ascii else text
