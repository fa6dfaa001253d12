"""A figure of a run: loss, loss scale and gradient norm over the steps, and layers by steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastcheck.log.step_table import StepRow
from fastcheck.record.format import overflowed
from fastcheck.record.site import NUMBER_ROLES, Site
from fastcheck.record.statistics import FLOAT_FORMATS, LARGEST_FINITE
from fastcheck.report.live.trends import magnitudes

from .canvas import BAD, Mark, curve, label_steps, mark_steps, new_figure, plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["HeatMap", "heat_map", "run_figure"]

_NUMBERS = (
    ("loss", "loss"),
    ("loss scale", "scale"),
    ("gradient norm", "gradient_norm"),
    ("learning rate", "learning_rate"),
)
# Of the map: more than a picture can show apart, so that no bucket is lost in drawing.
_MOST_ROWS, _MOST_COLUMNS = 250, 400
_MOST_LABELS, _LABEL = 40, 36
_LEFT_OUT = ("loss", "loss_scale", "learning_rate", "found_inf", "grad_norm", *NUMBER_ROLES)
_NARROW_BITS = 16.0


class HeatMap(NamedTuple):
    """The least headroom of each layer in each bucket of steps, in bits: -inf where a tensor
    overflowed, NaN where there is none. ``names``: the layer of each row (of several layers, where
    there are too many, the first); ``first`` and ``width``: of the buckets, in steps.
    """

    bits: np.ndarray
    names: list[str]
    first: int
    width: int
    layers: int


def heat_map(records: np.ndarray, sites: Sequence[Site]) -> HeatMap:
    """Of records whose ``site`` indexes ``sites``, by module in the order of the device."""
    kept = np.array([site.role not in _LEFT_OUT for site in sites] or [False], bool)
    records = records[kept[records["site"]] & ~np.isnan(LARGEST_FINITE[records["dtype"]])]
    if not len(records):
        return HeatMap(np.zeros((0, 0)), [], 0, 1, 0)
    names: dict[str, int] = {}
    layer_of = np.zeros(len(sites), np.int64)
    used, places = np.unique(records["site"], return_index=True)
    for number in used[np.argsort(places)].tolist():
        site = sites[number]
        layer_of[number] = names.setdefault(site.module or site.module_type, len(names))
    first, last = int(records["step"].min()), int(records["step"].max())
    width = -(-(last - first + 1) // _MOST_COLUMNS)
    columns = (records["step"] - first) // width
    height = -(-len(names) // _MOST_ROWS)
    rows = layer_of[records["site"]] // height
    with np.errstate(all="ignore"):
        bits = np.log2(LARGEST_FINITE[records["dtype"]] / magnitudes(records))
    bits = np.where(overflowed(records), -np.inf, bits)
    found = np.full((-(-len(names) // height), int(columns.max()) + 1), np.nan)
    np.fmin.at(found, (rows, columns), bits)
    return HeatMap(found, list(names)[::height], first, width, len(names))


def run_figure(
    rows: Sequence[StepRow], records: np.ndarray, sites: Sequence[Site], marks: Sequence[Mark]
) -> Figure:
    """``rows``: the steps; ``records``: of one rank; ``marks``: steps with events.

    Raises:
        ImportError: matplotlib is not installed.
    """
    numbers = [
        (label, [getattr(row, name) for row in rows])
        for label, name in _NUMBERS
        if any(getattr(row, name) is not None for row in rows)
    ]
    layers = heat_map(records, sites)
    height = min(max(0.17 * len(layers.names), 1.5), 7.0)
    figure = new_figure(10, 1.3 * len(numbers) + height + 0.8)
    panels = figure.subplots(
        len(numbers) + 1,
        1,
        sharex=True,
        squeeze=False,
        gridspec_kw={"height_ratios": [*[1.3] * len(numbers), height]},
    )[:, 0]
    steps = [row.step for row in rows]
    for axes, (label, values) in zip(panels, numbers):
        curve(axes, steps, values)
        mark_steps(axes, marks)
        axes.set_ylabel(label)
    _draw_map(figure, panels[-1], layers)
    label_steps(panels[-1])
    return figure


def _draw_map(figure: Any, axes: Any, layers: HeatMap) -> None:
    from matplotlib import colormaps

    if not layers.names:
        axes.text(0.5, 0.5, "no records with numbers", ha="center", transform=axes.transAxes)
        axes.set_yticks([])
        return
    finite = layers.bits[np.isfinite(layers.bits)]
    narrow = np.log2(FLOAT_FORMATS["float16"].max) + 24  # down to its smallest subnormal
    has_narrow = bool(len(finite)) and float(np.median(finite)) <= narrow
    # Of wide dtypes nothing is near the end of its range: the picture has what they differ by.
    least = 0.0 if has_narrow or not len(finite) else float(np.floor(max(finite.min(), 0.0)))
    most = _NARROW_BITS if has_narrow or not len(finite) else float(np.ceil(finite.max()))
    colors = colormaps["YlOrBr_r"].with_extremes(under=BAD, bad="#e8e8e8")
    rows, columns = layers.bits.shape
    image = axes.imshow(
        np.where(layers.bits == -np.inf, least - 1, np.maximum(layers.bits, least)),
        cmap=colors,
        vmin=least,
        vmax=max(most, least + 1),
        aspect="auto",
        interpolation="nearest",
        extent=(
            layers.first - 0.5,
            layers.first + columns * layers.width - 0.5,
            rows - 0.5,
            -0.5,
        ),
    )
    every = -(-rows // _MOST_LABELS)
    axes.set_yticks(range(0, rows, every))
    axes.set_yticklabels([_short(name) for name in layers.names[::every]], fontsize=7)
    if layers.layers > rows:
        axes.set_ylabel(f"{layers.layers:,} layers, {-(-layers.layers // rows)} a row")
    bar = figure.colorbar(image, ax=axes, extend="min", pad=0.01, fraction=0.04)
    bar.set_label("headroom, bits")


def _short(name: str) -> str:
    return plain(name if len(name) <= _LABEL else "…" + name[1 - _LABEL :])
