"""The policy: decides for an event whether the run continues, warns or stops."""

from __future__ import annotations

import enum
from collections import deque
from typing import Optional

from fastcheck.record.format import Verdict


class Decision(enum.Enum):
    """What follows from an event."""

    CONTINUE = "continue"  # it is recorded, and that is all
    WARN = "warn"  # the action is carried out, the run goes on
    STOP = "stop"  # the run is stopped


class Policy:
    """Counts events and decides when the action is due: at the overflow_nums-th and at every one
    after it.
    """

    def __init__(
        self, overflow_nums: int, within: Optional[int], count: str, *, stops: bool
    ) -> None:
        self.counter = Counter(overflow_nums, within, count)
        self._due = Decision.STOP if stops else Decision.WARN

    def counts(self, verdict: Verdict) -> bool:
        return self.counter.counts(verdict)

    def decide(self, step: int) -> Decision:
        """Counts one event of ``step`` and decides."""
        return self._due if self.counter.add(step) else Decision.CONTINUE


_COUNTED = {
    "origin": frozenset({Verdict.ORIGIN, Verdict.ARRIVED}),
    "all": frozenset({Verdict.ORIGIN, Verdict.ARRIVED, Verdict.PROPAGATED}),
}


# The ledger takes care that a call is counted once.
_COUNTED["calls"] = _COUNTED["all"]


class Counter:
    """Counts events against ``overflow_nums``; with ``within``, only those of the last so many
    steps.
    """

    def __init__(self, overflow_nums: int, within: Optional[int], count: str) -> None:
        self.overflow_nums = overflow_nums
        self.total = 0
        self._within = within
        self._verdicts = _COUNTED[count]
        # Only the youngest overflow_nums events can matter for the limit.
        self._steps: deque[int] = deque(maxlen=max(overflow_nums, 1))

    def counts(self, verdict: Verdict) -> bool:
        """Whether events with this verdict count."""
        return verdict in self._verdicts

    def add(self, step: int) -> bool:
        """Counts one event. True when overflow_nums is reached: from then on for every event."""
        self.total += 1
        self._steps.append(step)
        if self.overflow_nums < 0:
            return False
        if self._within is not None:
            while self._steps and step - self._steps[0] >= self._within:
                self._steps.popleft()
        return len(self._steps) >= self.overflow_nums
