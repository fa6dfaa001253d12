"""The work at a step boundary: ranks compare replicas and agree on whether to stop."""

from __future__ import annotations

import contextlib
from typing import Callable, Optional

from fastcheck.errors import warn
from fastcheck.monitor.distributed.replicas import ReplicaCheck, ReplicaMismatch

from .session import Session
from .stop_handler import StopHandler


class StepBoundary:
    """Called outside the session's lock, by the thread that closed the step."""

    def __init__(self, session: Session, stop_handler: StopHandler) -> None:
        self.check: Optional[ReplicaCheck] = None
        self.mismatches: list[ReplicaMismatch] = []
        # Closed after the last stop was delivered; install() adds to it.
        self.at_end = contextlib.ExitStack()
        self._session = session
        self._stop_handler = stop_handler

    def __call__(self) -> None:
        """Raises what the ranks agree on."""
        if self.check is not None:
            self._compare(self.check.boundary)
        self._stop_handler.at_step_boundary()

    def finish(self, waits: bool) -> None:
        """There will be no further boundary. ``waits``: for what the last ones have begun."""
        if not waits:
            self._stop_handler.close()
            return
        if self.check is not None:
            self._compare(self.check.finish)
        self._stop_handler.at_step_boundary(is_last=True)

    def _compare(self, advance: Callable[[int], Optional[ReplicaMismatch]]) -> None:
        found = advance(self._session.step.index)
        if found is not None:
            self.mismatches.append(found)
            for listener in self._session.event_store.listeners:
                listener.replicas_differ(found.step, str(found))
            warn(str(found))
