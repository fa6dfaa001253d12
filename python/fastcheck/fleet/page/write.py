"""Writes the page of a fleet: one HTML file that loads nothing."""

from __future__ import annotations

import os
from typing import Union

from fastcheck.fleet.findings import FleetReport
from fastcheck.report.page.shell import page_html, write_html

from .document import fleet_page_data
from .verdict import fleet_headline, fleet_verdict_html

__all__ = ["write_fleet_page"]


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
