"""Listener: the moments of a monitor at which its other parts are told something."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import numpy as np

from fastcheck.log.step_table import StepRow
from fastcheck.record.event import Event
from fastcheck.report.stop_report import StopReport
from fastcheck.verdict.step import Step


class Listener:
    """A part of a monitor that is told of what the others do; it is connected by being added to
    ``event_store.listeners``, whose order is that of the calls. Methods that are not overridden do
    nothing.
    """

    # By the thread that judges, which holds the event store's lock. None may raise.

    def counted(self, event: Event) -> None:
        """The event counts against ``overflow_nums``."""

    def step_ended(self, step: Step, rows: Sequence[StepRow], chunks: Sequence[np.ndarray]) -> None:
        """A step is over, with these rows of the step table and these records."""

    def run_ended(self) -> None:
        """No step will follow the last one."""

    def setting_changed(self, name: str, before: Optional[float], after: float) -> None:
        """A number of an optimizer, or the clip threshold, is another one than before. ``before``
        is None for the first number of an Adam.
        """

    # By the thread of training, outside of all locks.

    def stopping(self, report: StopReport) -> None:
        """The report is about to be acted on. What this raises is reported as an internal error."""

    def replicas_differ(self, step: int, text: str) -> None:
        """check_replicas() has found a difference."""

    def at_boundary(self) -> None:
        """A step boundary. What this raises leaves the training loop."""
