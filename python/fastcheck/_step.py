"""One step: the calls that were made in it, the journal that is not judged yet, and its judge."""

from __future__ import annotations

import weakref
from typing import Any, Optional

from ._calls import CallLog
from ._compat import GradScaler
from ._journal import Journal
from ._record import Verdict
from ._verdict import Judge

__all__ = ["Step"]


class Step:
    """What is known of one step. Filled in by the hooks, under the session's lock; ``judge`` and
    ``logged`` belong to the ledger.
    """

    judge: Judge  # set by the ledger, which makes both

    def __init__(self, index: int) -> None:
        self.index = index
        self.calls = CallLog()
        self.journal = Journal()
        # The next sequence number when the last pass through an outermost module ended, by path.
        self.pass_ends: dict[str, int] = {}
        # The gradient's record of the tensor whose record has this number.
        self.gradients: dict[int, int] = {}
        self.update_count = 0
        # Its boundary was reached, where several ranks decide together: one for each step.
        self.has_met = False
        # The updates skip themselves where a gradient is non-finite.
        self.is_protected = False
        self.state_read = False
        self.scaler: Optional[weakref.ref[GradScaler]] = None
        self.leaf_handles: list[Any] = []
        # The verdicts that the log has, by sequence number.
        self.logged: dict[int, Verdict] = {}
