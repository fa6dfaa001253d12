"""Writes the page of a fleet: one HTML file that loads nothing."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any, Union

import numpy as np

from fastcheck._version import __version__
from fastcheck.fleet.findings import Cell, FleetFinding, FleetReport, Suspect
from fastcheck.report.page.container import (
    Container,
    headline_html,
    page_html,
    table_html,
    text_html,
    write_html,
)
from fastcheck.utils.text.layout import Table, listed

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
    for name in (*_TEXTS, *_NUMBERS):
        columns[name] = [getattr(rank, name) for rank in ranks]
    starts, column_of, width = _axis(report)
    state = np.zeros((len(ranks), len(starts)), np.uint8)
    for row, rank in enumerate(ranks):
        first, last = column_of(rank.first_step), column_of(rank.last_step)
        state[row, first : last + 1] = _ORDINARY
    sites = np.zeros_like(state)
    row_of = {rank.rank: row for row, rank in enumerate(ranks)}
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
        "findings": [_finding_data(finding) for finding in report.findings],
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


def _finding_data(finding: FleetFinding) -> dict[str, Any]:
    return {
        "kind": finding.kind,
        "accuses": finding.is_accusation,
        "what": finding.what,
        "advice": finding.advice,
        "step": finding.first_step,
        "suspects": [
            [suspect.rank, suspect.first_step, suspect.site, suspect.evidence]
            for suspect in finding.suspects
        ],
    }


#: The most suspects of a finding; the others are in the table of ranks.
_MOST_SUSPECTS = 32
_COLUMNS = ("rank", "host", "device", "serial", "from step", "where", "evidence")


def fleet_headline(report: FleetReport) -> str:
    """A line: who is suspect, on which host and from which step on, the earliest first."""
    total = f"{len(report.ranks):,}"
    if not report.accused:
        return f"{report.run}: no rank of {total} is suspect"
    accusing = (finding.suspects for finding in report.findings if finding.is_accusation)
    steps = sorted(((s.first_step, s.rank) for some in accusing for s in some), reverse=True)
    first_step = {rank: step for step, rank in steps}
    named = [
        f"{rank}{_host(report, rank)} from step {step:,}"
        for rank, step in sorted(first_step.items(), key=lambda pair: (pair[1], pair[0]))
    ]
    if len(named) == 1:
        return f"{report.run}: 1 rank of {total} is suspect: rank {named[0]}"
    return f"{report.run}: {len(named)} ranks of {total} are suspect: {listed(named, 4)}"


def _host(report: FleetReport, rank: int) -> str:
    fleet_rank = report.ranks.get(rank)
    return "" if fleet_rank is None or fleet_rank.host is None else f" ({fleet_rank.host})"


def fleet_verdict_html(report: FleetReport) -> str:
    """The verdict of the page: the headline, the extent of the records, and each finding with its
    ranks and its advice.
    """
    kind = "bad" if report.accused else "good"
    parts = [headline_html(fleet_headline(report), kind, [], report.extent)]
    for number, finding in enumerate(report.findings, 1):
        parts += _finding(report, finding, f"Ranks of finding {number}")
    return "\n".join(parts)


def _finding(report: FleetReport, finding: FleetFinding, label: str) -> list[str]:
    kind = "Suspect" if finding.is_accusation else "Remark"
    tag = ' class="bad"' if finding.is_accusation else ""
    parts = [f"<h3><span{tag}>{kind}:</span> {text_html(finding.what)}</h3>"]
    if finding.suspects:
        rows = [_cells(report, suspect) for suspect in finding.suspects[:_MOST_SUSPECTS]]
        table = table_html(Table(_COLUMNS, rows, left=len(_COLUMNS)), label)
        parts.append(
            f'<div class="scrolling" tabindex="0" role="region" aria-label="{label}">{table}</div>'
        )
        left = len(finding.suspects) - _MOST_SUSPECTS
        if left > 0:
            parts.append(f'<p class="hint">and {left:,} more ranks, in the table of ranks</p>')
    parts.append(f"<p><strong>Try:</strong> {text_html(finding.advice)}</p>")
    return parts


def _cells(report: FleetReport, suspect: Suspect) -> list[str]:
    at = report.ranks.get(suspect.rank)
    place = [None, None, None] if at is None else [at.host, at.device, at.serial]
    known = [str(suspect.rank), *(text or "unknown" for text in place)]
    return [*known, f"{suspect.first_step:,}", suspect.site, suspect.evidence]


def write_fleet_page(report: FleetReport, path: Union[str, os.PathLike[str]]) -> int:
    """Writes the page of ``report``, which examine() has made with its cells, to ``path``, which it
    replaces as a whole; returns its size in bytes.

    Raises:
        LogError: the file can't be written.
    """
    page = page_html(
        fleet_headline(report), report.run, fleet_verdict_html(report), fleet_page_data(report)
    )
    return write_html(path, page)
