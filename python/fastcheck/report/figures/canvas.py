"""An empty figure, and what all figures share: colours, marks of events, labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastcheck.errors import explain, printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "BAD",
    "LINE",
    "WARNING",
    "Mark",
    "curve",
    "label_steps",
    "mark_steps",
    "new_figure",
    "plain",
    "spans_much",
]

#: Colours: what is not finite, what the watch warns of, and a line (Okabe and Ito, 2008).
BAD, WARNING, LINE = "#cc2277", "#e69f00", "#0072b2"
# Marks of a kind that are drawn.
_MOST_MARKS = 200
# Values that span more than this are shown on a logarithmic scale.
_SPAN = 30.0


class Mark(NamedTuple):
    """A step to be marked. ``is_event``: of an overflow; else a warning of the watch."""

    step: int
    is_event: bool


def new_figure(width: float, height: float) -> Figure:
    """Of so many inches.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            explain(
                "plot() needs matplotlib",
                expected="matplotlib, installed",
                got=str(error),
                hint="pip install 'fastcheck[plot]'",
            )
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def plain(text: str) -> str:
    """``text`` as matplotlib draws it as it is: printable, and no formula."""
    return printable(text).replace("$", r"\$")


def curve(
    axes: Any,
    steps: Sequence[int],
    values: Sequence[float | None],
    color: str = LINE,
    label: str = "",
    may_be_log: bool = True,
) -> None:
    """A line over the steps, with a cross at the top where a value is not finite. ``may_be_log``:
    positive values that span much are shown on a logarithmic scale.
    """
    x = np.array(steps, np.float64)
    y = np.array([math.nan if value is None else value for value in values], np.float64)
    finite = np.isfinite(y)
    marker = "." if int(finite.sum()) <= 60 else None
    axes.plot(
        x, np.where(finite, y, np.nan), color=color, linewidth=1, marker=marker, markersize=3,
        label=label or None,
    )  # fmt: skip
    bad = np.array([value is not None and not math.isfinite(value) for value in values], bool)
    if bad.any():
        at = axes.get_xaxis_transform()
        axes.plot(x[bad], np.full(int(bad.sum()), 0.95), "x", color=BAD, markersize=4, transform=at)
    if may_be_log and spans_much(y):
        axes.set_yscale("log")
    axes.grid(True, linewidth=0.4, alpha=0.5)
    axes.margins(x=0.01)


def spans_much(values: np.ndarray) -> bool:
    """Whether the finite values are positive, and more than a factor of 30 apart."""
    finite = values[np.isfinite(values)]
    return bool(len(finite) and finite.min() > 0 and finite.max() > _SPAN * finite.min())


def label_steps(axes: Any) -> None:
    """The axis of the steps, which are whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def mark_steps(axes: Any, marks: Sequence[Mark]) -> None:
    """A line at each step that is marked; the first ones where there are many."""
    for is_event, color in ((False, WARNING), (True, BAD)):
        steps = sorted({mark.step for mark in marks if mark.is_event == is_event})
        for step in steps[:_MOST_MARKS]:
            axes.axvline(step, color=color, linewidth=0.8, alpha=0.7, zorder=0)
