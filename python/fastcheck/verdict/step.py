"""The state of one step: its calls, the entries not judged yet, and its judge."""

from __future__ import annotations

import weakref
from typing import Any, Optional, Protocol

from fastcheck.calls.module_calls import CallLog
from fastcheck.record.format import Verdict
from fastcheck.utils.torch.versions import GradScaler

from .journal import Journal
from .module_level import Judge

__all__ = ["Step", "Tape"]


class Step:
    """What is known of one step. Filled in by the hooks, under the session's lock; ``judge`` and
    ``logged`` belong to the ledger.
    """

    judge: Judge  # set by the ledger, which makes both

    def __init__(self, index: int, first_seq: int = 0) -> None:
        self.index = index
        # The sequence number at which it began.
        self.first_seq = first_seq
        self.calls = CallLog()
        self.journal = Journal()
        # The next sequence number when the last pass through an outermost module ended, by path.
        self.pass_ends: dict[str, int] = {}
        # The gradient's record of the tensor whose record has this number.
        self.gradients: dict[int, int] = {}
        # The tokens of parameters that a module was given as an argument, by id().
        self.given_parameters: dict[int, int] = {}
        self.update_count = 0
        # Its boundary was reached, where several ranks decide together: one for each step.
        self.has_met = False
        # The updates that skip themselves where a gradient is non-finite.
        self.guarded_count = 0
        # Why an update that was applied could not be skipped.
        self.why_updated = ""
        # The closure of an optimizer's step was called again: what the evaluations before it made
        # was applied.
        self.is_partly_updated = False
        self.state_read = False
        self.scaler: Optional[weakref.ref[GradScaler]] = None
        # What its loss is multiplied by, where that is known: a number or a tensor.
        self.scale: Any = None
        self.leaf_handles: list[Any] = []
        # With count="calls": what has been counted in it.
        self.counted_calls: set[tuple[object, ...]] = set()
        # The verdicts that the log has, by sequence number.
        self.logged: dict[int, Verdict] = {}


class Tape(Protocol):
    """Takes the journal of a graph that is being captured, in place of the drain."""

    #: Why replays can't be followed; None: they can.
    problem: Optional[str]

    def take(self, step: Step, journal: Journal, closes_step: bool, /) -> None: ...
