"""Writes the page of a log: one HTML file that loads nothing."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Optional, Union

from fastcheck.report.from_log import report_from_log
from fastcheck.report.stop_report import StopReport
from fastcheck.utils.names.style import STYLES

from .collect import collect, newest_log
from .document import page_data
from .evidence import event_of
from .shell import page_html, write_html
from .verdict import healthy_html, title_of, verdict_html

__all__ = ["newest_log", "page_of_log", "write_page"]


def page_of_log(
    log: Union[str, os.PathLike[str]],
    style: str = STYLES[0],
    name: Optional[str] = None,
    report: Optional[StopReport] = None,
) -> str:
    """The page of a log directory, or of the newest log right below ``log``, as HTML. ``style``:
    how the verdict names tensors. ``name``: what stands for the log's path in it, where the log
    does not stay. ``report``: that of the stop, which holds more than the log; None: it is built
    from the log.

    Raises:
        LogError: there is no log, or it can't be read.
    """
    found = collect(newest_log(os.fspath(log)))
    view = found.evidence.view(found.directory, found.sites_of, found.meta)
    report = report or report_from_log(view, event_of(view), style)
    found.directory = found.directory if name is None else name
    if report is not None:
        report = replace(report, log_path=None if name else found.directory)
        verdict = verdict_html(report)
    else:
        verdict = healthy_html(found, len(view.events))
    return page_html(
        title_of(found, report),
        os.path.basename(os.path.abspath(found.directory)),
        verdict,
        page_data(found, view.events),
    )


def write_page(
    log: Union[str, os.PathLike[str]],
    path: Union[str, os.PathLike[str]],
    style: str = STYLES[0],
    name: Optional[str] = None,
    report: Optional[StopReport] = None,
) -> int:
    """Writes the page of ``log`` (see page_of_log()) to ``path``, which it replaces as a whole;
    returns its size in bytes.

    Raises:
        LogError: the log can't be read, or the file can't be written.
    """
    return write_html(path, page_of_log(log, style, name, report))
