"""The page that a stop leaves in its log: whether there is one, and its writing."""

from __future__ import annotations

import os
from dataclasses import replace

from fastcheck.log.reader import log_parts
from fastcheck.report.stop_report import StopReport

from .write import write_page

#: The page's name in the directory of the log.
PAGE = "report.html"
# About a second of work. `fastcheck report` makes the page of a larger log.
_MOST_BYTES = 128 << 20


def with_page(report: StopReport) -> StopReport:
    """The report with the path that its page is to have: none without a log, or with one of more
    than 128 MiB. All ranks that stop together name the same one.

    Raises:
        FastcheckError, OSError: the log can't be read.
    """
    log = report.log_path
    if log is None or report.is_lost:
        return report
    # No rank of several that hold their records in memory has written any yet.
    parts = log_parts(log) if os.path.isdir(log) else {}
    if sum(os.path.getsize(path) for paths in parts.values() for path in paths) > _MOST_BYTES:
        return report
    return replace(report, page=os.path.join(log, PAGE))


def write_stop_page(report: StopReport, rank: int) -> None:
    """Writes the page that the report names, if ``rank``, this one, is that of the culprit: it has
    the records of the event.

    Raises:
        FastcheckError, OSError: the log can't be read, or the page can't be written.
    """
    if report.page is not None and report.log_path is not None and report.rank == rank:
        write_page(report.log_path, report.page, report.style, report=report)
