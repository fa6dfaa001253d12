"""Ends a step that nothing else ends: a loop that updates no weights, or without torch's optimizers
and without ``monitor.step()``.
"""

from __future__ import annotations

from fastcheck.monitor.session.session import Session

# Above what gradients are accumulated over. What a step has read is kept, and searched, until it
# ends.
_MOST_PASSES = 1000


class EndlessSteps:
    """Of one session. Counts the backward passes of its open step."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._step = -1
        self._passes = 0
        self._warning = ""
        self._has_warned = False

    def after_backward(self) -> bool:
        """A backward pass is over; the session's lock is held. Whether the step is to be closed:
        nothing has done so for 1,000 of them.
        """
        index = self._session.step.index
        if index != self._step:
            self._step, self._passes = index, 0
        self._passes += 1
        if self._passes < _MOST_PASSES or self._session.is_closed:
            return False
        self._passes = 0
        if not self._has_warned:
            self._has_warned = True
            self._warning = (
                f"{_MOST_PASSES:,} backward passes have run in step {index:,} without an update of "
                f"the weights that ends it: fastcheck ends a step after {_MOST_PASSES:,} of them. "
                "Call monitor.step() where an iteration of the loop ends"
            )
        return True

    def take_warning(self) -> str:
        """What is to be warned of, once; empty as a rule."""
        warning, self._warning = self._warning, ""
        return warning
