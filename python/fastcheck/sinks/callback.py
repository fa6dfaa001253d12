"""action=callable: hands each event to the user's function."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Callable

from .._errors import FastcheckWarning

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
        if report.dump is not None:
            # The function is given the event, which knows nothing of it.
            said = " ".join(report.dump.lines(1000))
            warnings.warn(f"fastcheck: {said}", FastcheckWarning, stacklevel=2)
        self.function(report.culprit)
