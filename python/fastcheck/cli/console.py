"""Prints reports of commands: plain text, or with rich on a terminal, or JSON; progress bars."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Callable, Optional

from fastcheck.utils.text.layout import (
    GUTTER,
    Part,
    Section,
    Table,
    plain_text,
    printable_section,
    to_ascii,
    wants_ascii,
    wants_color,
)
from fastcheck.utils.text.numbers import to_json

if TYPE_CHECKING:
    from rich.console import RenderableType

# Below it tables would be all folds: the terminal breaks the lines instead.
_NARROWEST = 80


def show_sections(sections: Sequence[Section]) -> None:
    """Prints to standard output. Files and pipes get the same plain text whatever is installed.
    Control characters in names are escaped.
    """
    sections = [printable_section(section) for section in sections]
    is_ascii, color = wants_ascii(sys.stdout), wants_color(sys.stdout)
    if color and not is_ascii and has_rich():
        _set_by_rich(sections)
        return
    text = plain_text(sections, color)
    print(to_ascii(text) if is_ascii else text)


def print_json(kind: str, document: Mapping[str, Any], *, indent: Optional[int] = 1) -> None:
    """Prints one document of strict JSON to standard output: docs/json.md has its keys, of which
    ``fastcheck`` (the kind) and ``format`` (the version of its keys) come first.
    """
    shown = {"fastcheck": kind, "format": 1, **document}
    text = json.dumps(to_json(shown), allow_nan=False, indent=indent)
    print(text.replace("\x7f", "\\u007f"), flush=True)  # all others are escaped already


@contextlib.contextmanager
def progress(doing: str, of_what: str) -> Iterator[Optional[Callable[[int, int], None]]]:
    """Yields a function of (done, total) that draws a progress bar on standard error; None where
    that is no terminal, or without rich. The bar is erased at the end.
    """
    if not sys.stderr.isatty() or not has_rich():
        yield None
        return
    from rich import progress as bars
    from rich.console import Console

    columns = (
        bars.TextColumn(doing),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TextColumn(of_what + ","),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(doing, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def has_rich() -> bool:
    """True if rich is installed."""
    return importlib.util.find_spec("rich") is not None


def _set_by_rich(sections: Sequence[Section]) -> None:
    """Prints the sections as wide as the terminal: tables give way cell by cell, and no name is
    cut.
    """
    from rich import table
    from rich.console import Console, Group
    from rich.text import Text

    console = Console(file=sys.stdout, markup=False, emoji=False, highlight=False)
    console.width = max(console.width, _NARROWEST)
    for number, section in enumerate(sections):
        grid = table.Table.grid()
        grid.add_column(width=GUTTER, no_wrap=True)
        grid.add_column()
        label = Text(section.label, "bold")
        grid.add_row(label, Group(*(_renderable(part) for part in section.parts or ["-"])))
        if number:
            console.print()
        console.print(grid)


def _renderable(part: Part) -> RenderableType:
    from rich.padding import Padding
    from rich.text import Text

    if isinstance(part, Table):
        return Padding(_table(part), (0, 0, 0, part.indent))
    return Text.from_ansi(part)


def _table(part: Table) -> Any:
    from rich import box, table
    from rich.text import Text

    shown = table.Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    columns = len(part.header)
    for column, name in enumerate(part.header):
        to_left = column < part.left or column >= columns - part.note
        # A name goes on in the next line, and so does a sentence; a number is read whole.
        is_whole = column > 0 and not any(" " in row[column] for row in part.rows)
        shown.add_column(
            Text(name), justify="left" if to_left else "right", overflow="fold", no_wrap=is_whole
        )
    for number, row in enumerate(part.rows):
        style = part.styles.get(number)
        shown.add_row(*map(Text, row), style=f"bold {style}" if style else None)
    return shown
