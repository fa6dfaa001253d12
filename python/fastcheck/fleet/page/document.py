"""The data of a fleet's page: its ranks, its findings, and a plane of ranks by steps.

A cell of ``state`` is 0 where the rank has no record, 1 where it is as its peers, 255 where a value
is not finite, 254 where replicas hold other bits; between them ``2 + 16 log2(z / 4)`` of the
largest number of robust standard deviations. ``sites``: at how many sites, 255 at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from fastcheck._version import __version__
from fastcheck.errors import printable
from fastcheck.fleet.findings import Cell, Finding, FleetReport
from fastcheck.report.page.container import Container

__all__ = ["fleet_page_data"]

# Ranks by columns.
_MOST_CELLS = 4_000_000
_MOST_COLUMNS, _FEWEST_COLUMNS = 1000, 32
_ORDINARY, _LEAST, _MOST, _REPLICAS, _NONFINITE = 1, 2, 250, 254, 255
_TEXTS = ("host", "device", "serial", "replica_group")
_NUMBERS = ("rank", "first_step", "last_step", "row_count")


def fleet_page_data(report: FleetReport) -> tuple[str, str]:
    """The header and the arrays in base64, of a report that was made with its cells."""
    ranks = [report.ranks[number] for number in sorted(report.ranks)]
    columns: dict[str, list[Any]] = {}
    for name in _TEXTS:
        values = (getattr(one, name) for one in ranks)
        columns[name] = [None if value is None else printable(value) for value in values]
    for name in _NUMBERS:
        columns[name] = [getattr(one, name) for one in ranks]
    starts, column_of, width = _axis(report)
    state = np.zeros((len(ranks), len(starts)), np.uint8)
    for row, one in enumerate(ranks):
        first, last = column_of(one.first_step), column_of(one.last_step)
        state[row, first : last + 1] = _ORDINARY
    sites = np.zeros_like(state)
    row_of = {one.rank: row for row, one in enumerate(ranks)}
    for cell in report.cells:
        if cell.rank in row_of:
            place = row_of[cell.rank], column_of(cell.step)
            state[place] = max(int(state[place]), _code(cell))
            sites[place] = max(int(sites[place]), min(cell.sites, 255))
    container = Container()
    container.add_u8("state", state)
    container.add_u8("sites", sites)
    header = {
        "format": 1,
        "kind": "fleet",
        "fastcheck": __version__,
        "ranks": columns,
        "axis": {"width": width, "starts": starts},
        "findings": [_finding(one) for one in report.findings],
    }
    return container.to_text(header)


def _axis(report: FleetReport) -> tuple[list[int], Callable[[int], int], int]:
    """The first steps of the columns, the column of a step, and how many steps a column has."""
    steps = sorted({*report.steps, report.first_step, report.last_step})
    most = max(min(_MOST_COLUMNS, _MOST_CELLS // max(len(report.ranks), 1)), _FEWEST_COLUMNS)
    if len(steps) <= most:
        # Steps that were not recorded have no column.
        width = min((b - a for a, b in zip(steps, steps[1:])), default=1)
        starts = np.array(steps)
    else:
        width = -(-(steps[-1] + 1 - steps[0]) // most)
        starts = np.arange(steps[0], steps[-1] + 1, width)

    def column_of(step: int) -> int:
        return max(int(np.searchsorted(starts, step, side="right")) - 1, 0)

    return starts.tolist(), column_of, width


def _code(cell: Cell) -> int:
    if cell.kind == "nonfinite":
        return _NONFINITE
    if cell.kind == "replicas":
        return _REPLICAS
    octaves = math.log2(max(cell.z, 4.0) / 4.0) if math.isfinite(cell.z) else math.inf
    return min(_LEAST + round(min(16 * octaves, 255.0)), _MOST)


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "kind": finding.kind,
        "accuses": finding.is_accusation,
        "what": printable(finding.what),
        "advice": printable(finding.advice),
        "step": finding.first_step,
        "suspects": [
            [one.rank, one.first_step, printable(one.site), printable(one.evidence)]
            for one in finding.suspects
        ],
    }
