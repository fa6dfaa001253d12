"""OverflowDetected: the exception that stops a run; its text is the stop report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastcheck.errors import FastcheckError

if TYPE_CHECKING:
    from fastcheck.record.event import Event

    from .stop_report import StopReport


class OverflowDetected(FastcheckError):  # noqa: N818  (a stop that was requested, not a mistake)
    """Training was stopped at a non-finite number. ``str()`` of it is the stop report, in about 25
    lines; on the ranks that only stop with another rank it is two lines that name it.

    Survives pickling, so that a launcher can pass it on from a worker process.
    """

    __module__ = "fastcheck"

    def __init__(self, report: StopReport) -> None:
        # args holds the report itself, so that BaseException.__reduce__ rebuilds the same object.
        Exception.__init__(self, report)
        self.report = report

    @property
    def culprit(self) -> Event:
        """The event that is blamed; it has ``.site``, ``.record``, ``.verdict`` and ``.reason``."""
        return self.report.culprit

    @property
    def step(self) -> int:
        """The step it happened in, counted from 0 at install()."""
        return self.report.step

    @property
    def events(self) -> tuple[Event, ...]:
        """All events of that step, in the order in which the device made them."""
        return self.report.events

    @property
    def log_path(self) -> str | None:
        """The directory with the records of the last steps; None when it couldn't be written."""
        return self.report.log_path

    def __str__(self) -> str:
        from fastcheck.report.render import headline, render
        from fastcheck.utils.torch.rank import own_rank

        report = self.report
        try:
            # Each rank raises: that of the culprit prints the whole, the others where it is.
            if report.world_size > 1 and not report.is_lost and own_rank() != report.rank:
                where = "" if report.log_path is None else f"; log of this rank: {report.log_path}"
                return f"{headline(report)}\nrank {report.rank} prints the report{where}"
            return render(report)
        except Exception as error:  # a fault in the layout must not hide what was found
            culprit = self.culprit
            return (
                f"non-finite numbers at {culprit.site}, step {self.step}: {culprit.reason} "
                f"(the full report failed: {type(error).__name__}: {error})"
            )

    def __repr__(self) -> str:
        return f"OverflowDetected(step={self.step}, site={str(self.culprit.site)!r})"
