"""The state of one step: its calls, the entries not judged yet, and its rules."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Iterable
from typing import Any, Callable, Optional, Protocol

import numpy as np

from fastcheck.calls.module_calls import MAX_CALLS, CallLog, ModuleNode
from fastcheck.utils.torch.versions import GradScaler

from .entries import Journal, Records, Seen
from .findings import Finding, Findings

#: The record of what a module stores, its role, and the tensor, where functional_call() has put it
#: in the place of a parameter.
ReadTensor = tuple[np.void, str, Optional["weakref.ref[Any]"]]
#: Reads what a module and its submodules (None: all modules) store now that is non-finite.
ReadStored = Callable[[Optional[ModuleNode]], Iterable[ReadTensor]]


def nothing_stored(node: Optional[ModuleNode]) -> Iterable[ReadTensor]:
    """A ReadStored that reads nothing."""
    return ()


class Decision(enum.Enum):
    """The consequence of an event."""

    WARN = "warn"  # the action is carried out, the run goes on
    STOP = "stop"  # the run is stopped


class Rules(Protocol):
    """Gives the findings of a step their verdicts: ModuleRules or OpRules. Whatever has changed is
    in ``findings.changed``.
    """

    findings: Findings

    def apply(self, entry: Seen, bad: Records) -> None:
        """Judges what the entry has read. ``bad``: the records that show an overflow."""

    def settle_scaled(self, skipped: bool) -> Optional[Finding]:
        """Settles scaled gradients, as Findings.settle_scaled() does."""

    def ensure_event(self) -> None:
        """Makes sure that there is an event for non-finite values so far, because an update is
        due.
        """

    def settle(self) -> None:
        """Settles findings at the end of the step, or when everything that reads them has run."""

    def settle_open(self) -> None:
        """Settles findings that are still pending without a consequence."""

    def renew(self) -> None:
        """The step does not end, and its findings are dropped."""

    def count_cut_off(self) -> None:
        """The run ends: what an exception kept from its consequences counts."""

    def undecided(self) -> list[Finding]:
        """The findings that are pending: of what follows from one another the first."""

    def let_go(self) -> None:
        """Releases references that only the step needs."""


class Update:
    """The update of a step: what the training loop does with its gradients, and with the
    weights.
    """

    scaler: Optional[weakref.ref[GradScaler]] = None
    # The factor of the loss, where it is known: a number or a tensor.
    scale: Any = None
    # Gradients were changed before they were read.
    has_changed_gradients = False
    # They were clipped to 0 since.
    is_clipped_away = False
    # The tensors that modules and optimizers store were read.
    state_read = False
    count = 0
    # The optimizer that steps, or was the last to.
    by: Optional[weakref.ref[Any]] = None
    # The updates that skip themselves where a gradient is non-finite.
    guarded_count = 0
    # The reason why an update that was applied could not be skipped.
    why_applied = ""
    # The backward passes that are over, and the next sequence number when the first was.
    passes = 0
    first_pass_end = 0
    # The closure of an optimizer's step was called again: what the evaluations before it made
    # was applied.
    is_partial = False
    # An optimizer that holds none of the model's parameters was about to step: whether it
    # changes the weights is not known.
    is_elsewhere = False
    # The step's boundary was reached, where several ranks decide together: one for each step.
    has_met = False


class Step:
    """A step, and what is known of it. Filled in by the hooks, under the session's lock; ``rules``
    and their ``findings`` belong to the ledger.
    """

    is_observed: bool
    rules: Rules
    findings: Findings

    def __init__(
        self, index: int, first_seq: int = 0, read_stored: ReadStored = nothing_stored
    ) -> None:
        self.index = index
        self.read_stored = read_stored
        # The sequence number at which it began.
        self.first_seq = first_seq
        self.calls = CallLog(maxlen=MAX_CALLS)
        self.journal = Journal()
        # The next sequence number when the last pass through an outermost module ended, by path.
        self.pass_ends: dict[str, int] = {}
        # The gradient's record of the tensor whose record has this number.
        self.gradients: dict[int, int] = {}
        # The first records of parameters that a module was given as arguments (a parametrization),
        # by the id of the parameter, and by the site of its gradient.
        self.given: dict[int, int] = {}
        self.given_by_gradient: dict[int, int] = {}
        self.update = Update()
        self.leaf_handles: list[Any] = []
        # The calls that were counted in it, with count="calls".
        self.counted_calls: set[tuple[object, ...]] = set()


class Tape(Protocol):
    """Takes the journal of a graph that is being captured, in place of the drain."""

    #: The reason why replays can't be followed; None: they can.
    problem: Optional[str]

    def take(self, step: Step, journal: Journal, closes_step: bool, /) -> None: ...
    def read_waiting(self) -> None: ...
