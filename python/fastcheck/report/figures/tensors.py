"""A figure of single tensors: abs max, rms, mean and share of zeros over the steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fastcheck.record.format import overflowed
from fastcheck.record.site import Site
from fastcheck.record.statistics import LARGEST_FINITE, component_counts, statistics_columns
from fastcheck.utils.names.style import row_name

from .canvas import BAD, LINE, Mark, curve, label_steps, mark_steps, new_figure, plain, spans_much

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["MOST_TENSORS", "tensors_figure"]

#: Tensors in one figure.
MOST_TENSORS = 8
# Okabe and Ito (2008), without black and yellow.
_COLORS = (LINE, "#d55e00", "#009e73", "#56b4e9", "#e69f00", "#cc79a7", "#666666", "#994f00")


def tensors_figure(
    records: np.ndarray, sites: Sequence[Site], chosen: Sequence[int], marks: Sequence[Mark]
) -> Figure:
    """``records``: of one rank, in order; ``chosen``: numbers of sites, at most MOST_TENSORS.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = new_figure(10, 8)
    panels = figure.subplots(4, 1, sharex=True)
    for axes, name in zip(panels, ("abs max", "rms", "mean", "zeros, %")):
        axes.set_ylabel(name)
    limits: set[float] = set()
    highest = 0.0
    sizes: list[list[np.ndarray]] = [[], []]
    for number, color in zip(chosen, _COLORS):
        mine = records[records["site"] == number]
        columns = statistics_columns(mine)
        with np.errstate(all="ignore"):
            abs_max = np.fmax(np.abs(columns["min"]), np.abs(columns["max"]))
            zeros = 100 * mine["zero_count"] / component_counts(mine)
        # A cross where it overflowed, at the top of the first panel.
        abs_max = np.where(overflowed(mine), np.inf, abs_max)
        steps = mine["step"].tolist()
        label = plain(row_name(sites[number], None, "fastcheck"))
        curve(panels[0], steps, _known(abs_max), color, label, may_be_log=False)
        curve(panels[1], steps, _known(columns["rms"]), color, may_be_log=False)
        for axes, values in zip(panels[2:], (columns["mean"], zeros)):
            curve(axes, steps, _known(values), color, may_be_log=False)
        finite = abs_max[np.isfinite(abs_max)]
        highest = max(highest, float(finite.max()) if len(finite) else 0.0)
        sizes[0].append(finite[finite > 0])
        sizes[1].append(columns["rms"][columns["rms"] > 0])
        limits |= set(LARGEST_FINITE[mine["dtype"]].tolist())
    for axes, values in zip(panels, sizes):
        if values and spans_much(np.concatenate(values)):
            axes.set_yscale("log")
    panels[3].set_ylim(0, max(panels[3].get_ylim()[1], 1.0))
    for limit in limits:
        # The end of the range, where it is in sight.
        if limit <= 1e4 * max(highest, 1e-300):
            panels[0].axhline(limit, color=BAD, linewidth=0.8, linestyle="--")
    for axes in panels:
        mark_steps(axes, marks)
    panels[0].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    label_steps(panels[-1])
    return figure


def _known(values: np.ndarray) -> list[float | None]:
    return [None if value != value else value for value in values.tolist()]
