"""action="raise": stops training by raising OverflowDetected."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from .._errors import OverflowDetected

if TYPE_CHECKING:
    from .._report import StopReport


class RaisingSink:
    """Raises OverflowDetected, whose text is the whole report."""

    def __call__(self, report: StopReport) -> NoReturn:
        raise OverflowDetected(report)
