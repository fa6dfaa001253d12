"""action="warn": one Python warning per event, and training goes on."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from .._errors import FastcheckWarning
from .._report import brief

if TYPE_CHECKING:
    from .._report import StopReport

__all__ = ["ConsoleSink", "FastcheckWarning"]


class ConsoleSink:
    """Warns (FastcheckWarning) about the report's culprit, in a few lines.

    The text names the step, so Python's rule of showing equal warnings once hides none of them.
    """

    def __call__(self, report: StopReport) -> None:
        text = brief(report)
        if report.dump is not None:
            text += "\n  dump: " + " ".join(report.dump.lines(1000))
        if report.log_path is not None:
            text += f"\n  log: {report.log_path}"
        warnings.warn(text, FastcheckWarning, stacklevel=2)
