"""The actions at an event that is due: raise, warn, or call a function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, NoReturn

from fastcheck.errors import warn
from fastcheck.report.error import OverflowDetected
from fastcheck.report.render import brief

if TYPE_CHECKING:
    from fastcheck.record.event import Event

    from .stop_report import StopReport


class CallbackSink:
    """Calls ``function(event)``. Its exceptions reach the training loop; its result is ignored."""

    def __init__(self, function: Callable[[Event], Any]) -> None:
        self.function = function

    def __call__(self, report: StopReport) -> None:
        if report.dump is not None:
            # The function is given the event, which does not name the dump.
            text = " ".join(report.dump.lines(1000))
            warn(f"fastcheck: {text}")
        self.function(report.culprit)


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
        warn(text)


class RaisingSink:
    """Raises OverflowDetected, whose text is the whole report."""

    def __call__(self, report: StopReport) -> NoReturn:
        raise OverflowDetected(report)
