"""Figures of a comparison: errors in the order of execution, or over the steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Optional

import numpy as np

from .canvas import BAD, LINE, curve, label_steps, new_figure, plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["TensorError", "errors_figure", "growth_figure"]

_MOST_LABELS, _LABEL = 60, 40


class TensorError(NamedTuple):
    """``threshold``: that of the tensor's dtype; None without one. ``differs``: beyond it."""

    name: str
    error: float
    threshold: Optional[float]
    differs: bool


def errors_figure(title: str, tensors: Sequence[TensorError]) -> Figure:
    """The error of each tensor, in order, on a logarithmic scale; infinite ones at the top.

    Raises:
        ImportError: matplotlib is not installed.
    """
    has_names = len(tensors) <= _MOST_LABELS
    figure = new_figure(10, 5 if not has_names else 6)
    axes = figure.subplots()
    errors = np.array([one.error for one in tensors])
    shown = errors[np.isfinite(errors) & (errors > 0)]
    low, high = (shown.min() / 4, shown.max() * 4) if len(shown) else (1e-8, 1.0)
    limits = np.array([math.nan if t.threshold is None else t.threshold for t in tensors])
    limits = np.where(limits > 0, limits, np.nan)
    if np.isfinite(limits).any():
        low, high = min(low, np.nanmin(limits) / 4), max(high, np.nanmax(limits) * 4)
    heights = np.clip(np.where(errors > 0, errors, low), low, high)
    places = np.arange(len(tensors))
    for wanted, color, label in ((True, BAD, "different"), (False, LINE, "within")):
        mine = np.array([one.differs == wanted for one in tensors], bool)
        if mine.any():
            axes.vlines(places[mine], low, heights[mine], color=color, linewidth=1, alpha=0.5)
            axes.plot(places[mine], heights[mine], "o", color=color, markersize=3, label=label)
    endless = np.isposinf(errors)
    if endless.any():
        axes.plot(places[endless], heights[endless], "^", color=BAD, label="no finite error")
    if np.isfinite(limits).any():
        axes.step(places, limits, where="mid", color="#666666", linewidth=1, label="threshold")
    axes.set_yscale("log")
    axes.set_ylim(low, high * 1.5)
    axes.set_ylabel("error")
    axes.grid(True, axis="y", linewidth=0.4, alpha=0.5)
    if has_names:
        names = [
            plain(one.name if len(one.name) <= _LABEL else "…" + one.name[1 - _LABEL :])
            for one in tensors
        ]
        axes.set_xticks(places, names, rotation=90, fontsize=6)
    else:
        axes.set_xlabel("tensors, in the order in which they were computed")
    axes.set_title(plain(title), fontsize=9)
    if tensors:
        axes.legend(fontsize=7)
    return figure


def growth_figure(
    title: str,
    steps: Sequence[int],
    errors: Sequence[float],
    losses: Sequence[tuple[int, float, float]],
    drifts_from: int | None,
) -> Figure:
    """The largest error of each step, and both losses (step, actual, reference) where there are
    some. ``drifts_from``: the first step at which they have drifted apart.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = new_figure(10, 3 + 3 * bool(losses))
    panels = figure.subplots(1 + bool(losses), 1, sharex=True, squeeze=False)[:, 0]
    curve(panels[0], steps, errors)
    panels[0].set_ylabel("largest error")
    panels[0].set_title(plain(title), fontsize=9)
    if losses:
        at = [loss[0] for loss in losses]
        for side, (label, color) in enumerate((("actual", LINE), ("reference", "#666666")), 1):
            curve(panels[1], at, [loss[side] for loss in losses], color, label)
        panels[1].set_ylabel("loss")
        panels[1].legend(fontsize=7)
        if drifts_from is not None:
            panels[1].axvline(drifts_from, color=BAD, linewidth=0.8)
    label_steps(panels[-1])
    return figure
