"""Text by the cells that it takes on a terminal: wide characters take two, combining ones none."""

from __future__ import annotations

import unicodedata

__all__ = ["cell_count", "fit_cells"]


def cell_count(text: str) -> int:
    """How many cells ``text`` takes."""
    return len(text) if text.isascii() else sum(map(_cells, text))


def fit_cells(text: str, width: int, cut_front: bool = False, mark: str = "…") -> str:
    """``text`` in exactly ``width`` cells: filled with spaces at its end, or cut with ``mark``
    at its end or front.
    """
    missing = width - cell_count(text)
    if missing >= 0:
        return text + " " * missing
    mark = mark[: max(width, 0)]
    kept, room = [], max(width, 0) - len(mark)
    for one in reversed(text) if cut_front else text:
        room -= _cells(one)
        if room < 0:
            break
        kept.append(one)
    part = "".join(reversed(kept) if cut_front else kept)
    padding = " " * (width - len(mark) - cell_count(part))
    return mark + part + padding if cut_front else part + mark + padding


def _cells(one: str) -> int:
    if unicodedata.combining(one):
        return 0
    return 2 if unicodedata.east_asian_width(one) in "WF" else 1
