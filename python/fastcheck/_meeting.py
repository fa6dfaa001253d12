"""What is done at a step boundary, once the step is closed: the ranks compare what should be equal,
and agree on whether to stop.
"""

from __future__ import annotations

import warnings
from typing import Callable, Optional

from ._alarm import Alarm
from ._errors import FastcheckWarning
from ._replicas import ReplicaCheck, ReplicaMismatch
from ._session import Session

__all__ = ["Meeting"]


class Meeting:
    """Called outside the session's lock, by the thread that closed the step."""

    def __init__(self, session: Session, alarm: Alarm) -> None:
        self.check: Optional[ReplicaCheck] = None
        self.mismatches: list[ReplicaMismatch] = []
        self._session = session
        self._alarm = alarm

    def __call__(self) -> None:
        """Raises what the ranks agree on."""
        if self.check is not None:
            self._compare(self.check.boundary)
        self._alarm.meet()

    def finish(self, waits: bool) -> None:
        """There will be no further boundary. ``waits``: for what the last ones have begun."""
        if not waits:
            self._alarm.close()
            return
        if self.check is not None:
            self._compare(self.check.finish)
        self._alarm.meet(is_last=True)

    def _compare(self, advance: Callable[[int], Optional[ReplicaMismatch]]) -> None:
        found = advance(self._session.step.index)
        if found is not None:
            self.mismatches.append(found)
            warnings.warn(str(found), FastcheckWarning, stacklevel=5)
