"""The policy: what is done with an event that was found."""

from __future__ import annotations

import enum

from ._config import Config
from ._counter import Counter
from ._record import Verdict

__all__ = ["Decision", "Policy"]


class Decision(enum.Enum):
    """What follows from an event."""

    CONTINUE = "continue"  # it is recorded, and that is all
    WARN = "warn"  # the action is carried out, the run goes on
    STOP = "stop"  # the run is stopped


class Policy:
    """Counts events and says when the action is due: at the overflow_nums-th and at every one after
    it.
    """

    def __init__(self, config: Config) -> None:
        self.counter = Counter(config.overflow_nums, config.within, config.count)
        self._due = Decision.STOP if config.action == "raise" else Decision.WARN

    def counts(self, verdict: Verdict) -> bool:
        return self.counter.counts(verdict)

    def decide(self, step: int) -> Decision:
        """Counts one event of ``step`` and decides."""
        return self._due if self.counter.add(step) else Decision.CONTINUE
