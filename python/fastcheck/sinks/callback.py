"""action=callable: hands each event to the user's function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable

if TYPE_CHECKING:
    from .._report import StopReport
    from .._verdict import Event


class CallbackSink:
    """Calls ``function(event)``. What it raises reaches the training loop; what it returns is
    ignored.
    """

    def __init__(self, function: Callable[[Event], Any]) -> None:
        self.function = function

    def __call__(self, report: StopReport) -> None:
        self.function(report.culprit)
