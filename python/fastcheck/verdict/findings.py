"""The findings of a step: a Finding for each non-finite record while its verdict is open, with one
FindingState, which Findings alone changes.

    NEW ---> FINAL                   decided at once
     +-----> DOUBTFUL ---> FINAL     it may be on purpose (-Inf alone, the batch): harm decides
     +-----> PENDING ----> FINAL     its consequences decide
     |          +--------> SETTLED -> FINAL   nothing came of it; later in the run something may
     |          +--------> SKIPPED   (op level) what came of it was skipped by loss scaling
     +-----> UNUSED -----> FINAL     a gradient that no optimizer has used
     |          +--------> SCALED
     +-----> SCALED -----> FINAL     loss scaling decides: the update was made
                +--------> PENDING   made, and it is a gradient between modules
                +--------> SETTLED   (op level) it reached no parameter
                +--------> SKIPPED   the update was skipped
"""

from __future__ import annotations

import enum
import sys
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple, Optional

import numpy as np

from fastcheck.calls.module_calls import Call
from fastcheck.record.format import NONFINITE_COUNTS, Depth, DeviceMode, Flag, Verdict
from fastcheck.record.site import Site, SiteTable
from fastcheck.record.statistics import statistics_of

from . import entries
from .allowed import Allowance, why_allowed

#: Roles in which the largest finite number is taken for an overflow, on a device that saturates. A
#: batch or a weight may hold it on purpose: torch.finfo(dtype).min is a common mask.
_SATURABLE = frozenset({"output", "loss", "grad_input", "grad_output", "param_grad"})

_GRADIENTS = frozenset({"grad_input", "grad_output", "param_grad", "grad_norm"})


class FindingState(enum.Enum):
    """The state of decision of a finding; see the diagram above. With each the verdict
    meanwhile.
    """

    NEW = 0, Verdict.NONE
    DOUBTFUL = 1, Verdict.UNRESOLVED
    PENDING = 2, Verdict.UNRESOLVED
    UNUSED = 3, Verdict.UNRESOLVED
    SCALED = 4, Verdict.SCALED
    SETTLED = 5, Verdict.ABSORBED
    SKIPPED = 6, Verdict.SCALED
    FINAL = 7, Verdict.NONE
    #: FINAL, and its consequences have decided.
    CONCLUDED = 8, Verdict.NONE

    def __init__(self, number: int, meanwhile: Verdict) -> None:
        self.meanwhile = meanwhile
        #: ``then`` comes true unless something else is decided.
        self.is_undecided = 1 <= number <= 4
        #: The finding counts as soon as something that it led to lasts or leaves.
        self.is_pending = number in (2, 5)
        #: The finding's consequences decide, or have decided.
        self.by_consequence = number in (2, 5, 8)


#: Non-finite beyond doubt: neither a possible mask nor a scaled gradient.
CONFIRMED = frozenset({Verdict.ORIGIN, Verdict.ARRIVED, Verdict.PROPAGATED})


class PossibleVerdict(NamedTuple):
    """The outcome of an undecided finding if it turns out to matter."""

    verdict: Verdict
    reason: str


def is_statistic(site: Site) -> bool:
    """True if it is the mean or the variance that a norm of torch keeps: neither begins with
    infinities, as those of a program's own norm may.
    """
    is_kept = site.role == "buffer" and site.label in ("running_mean", "running_var")
    return is_kept and ("BatchNorm" in site.module_type or "InstanceNorm" in site.module_type)


def is_event(record: np.void, role: str) -> bool:
    """True if a record that overflowed() is to be judged, of a tensor in this role."""
    counts = (record[name] for name in NONFINITE_COUNTS)
    return role in _SATURABLE or any(counts)


_SEVERAL = (entries.Stored, entries.UsedGradients, entries.UnusedGradients, entries.OptimizerState)
_ROLES: Mapping[type, str] = {
    entries.Batch: "input",
    entries.InnerInput: "input",
    entries.Output: "output",
    entries.Named: "output",
    entries.Loss: "loss",
    entries.GradientNorm: "grad_norm",
    entries.Entered: "input",
}


def tensors_of(entry: Any, bad: entries.Records) -> list[tuple[int, str]]:
    """The numbers and roles of the tensors in ``bad`` whose reading the entry is, in order."""
    if isinstance(entry, _SEVERAL):
        first, roles = entry.first_seq, entry.roles
        stop = first + len(roles)
        return [(seq, roles[seq - first]) for seq in sorted(bad) if first <= seq < stop]
    if entry.seq not in bad:
        return []
    return [(entry.seq, _ROLES.get(type(entry)) or entry.role)]


class Uses:
    """The operators, at op level, and modules that have made a finding, or read it."""

    def __init__(self) -> None:
        # A module read it and returned finite values: it did no harm there.
        self.is_absorbed = False
        # The exception that ended the forward in which it was made.
        self.ended_by = ""
        # The operators that returned finite values, those whose outputs were not read, and what the
        # others have made of it.
        self.finite_count = 0
        self.unseen_count = 0
        self.made: list[Finding] = []
        # The operator that wrote it, where, and its inputs: the argument's name and the record's
        # number.
        self.op = self.line = self.api = ""
        self.inputs: list[tuple[str, int]] = []
        # It counts where something that it led to does, and the undecided findings that it was made
        # of.
        self.is_traced = False
        self.parents: list[Finding] = []
        # The verdict under which its step was closed.
        self.archived: Optional[Verdict] = None
        # The tensor, where functional_call() was given it in place of a parameter.
        self.given: Optional[weakref.ref[Any]] = None


class Blame(NamedTuple):
    """The place where a finding is said to be. ``call``: whose inputs and parameters explain it;
    None where nothing observed was read to make it.
    """

    site: int
    call: Optional[Call]


class Finding:
    """A non-finite record of the open step."""

    def __init__(
        self, record: np.void, role: str, call: Optional[Call] = None, thread: int = 0
    ) -> None:
        self.record = record
        self.role = role
        self.call = call
        self.thread = thread
        # Its place among the others: its sequence number, or that of the finding for which the
        # parameter was read.
        self.position = self.seq
        self.blamed = Blame(self.site, call if role == "output" else None)
        self.state = FindingState.NEW
        self.verdict = Verdict.NONE
        self.reason = ""
        self.then: Optional[PossibleVerdict] = None
        self.cause: Optional[Finding] = None
        self.counted = False
        # It is in the batch that this rank was given, and came from no other rank.
        self.is_data = False
        # Covered by allow_nonfinite().
        self.is_allowed = False
        self.uses = Uses()

    # The record

    @cached_property
    def seq(self) -> int:
        return int(self.record["seq"])

    @cached_property
    def site(self) -> int:
        return int(self.record["site"])

    @cached_property
    def has_nan(self) -> bool:
        return bool(self.record["nan_count"])

    @cached_property
    def is_gradient(self) -> bool:
        return self.role in _GRADIENTS

    @cached_property
    def is_saturated(self) -> bool:
        """True if it holds values that a device saturates instead of returning an infinity."""
        is_saturating = self.record["device_mode"] == int(DeviceMode.SATURATING)
        return bool(is_saturating and self.record["saturated_count"])

    @cached_property
    def saturated_signs(self) -> int:
        """The signs of saturated values. Bit 0: the largest finite number is among them; bit 1: the
        lowest. 0: there are none, or ``record=`` left the extremes out.
        """
        if not self.is_saturated or self.record["depth"] < Depth.STATS:
            return 0
        reading = statistics_of(self.record)
        form = reading.float_format
        if form is None or reading.max is None or reading.min is None:
            return 0
        return int(reading.max >= form.max) | int(reading.min <= -form.max) << 1

    @property
    def signs(self) -> int:
        """Bit 0: it has +Inf; bit 1: -Inf; or values that saturated in their places. 0: unknown."""
        record = self.record
        signs = int(record["posinf_count"] > 0) | int(record["neginf_count"] > 0) << 1
        return signs | self.saturated_signs

    @property
    def infinities(self) -> int:
        return int(self.record["posinf_count"]) + int(self.record["neginf_count"])

    @cached_property
    def only_neginf(self) -> bool:
        """Every non-finite value is -Inf: a masked score and a log(0) look alike here. What
        saturated stands for an infinity of its sign, where the record has the extremes.
        """
        if self.is_saturated and self.saturated_signs != 2:
            return False
        return not self.has_nan and not self.record["posinf_count"]

    @property
    def is_mask(self) -> bool:
        """True if a tensor is zeros and -Inf, and both: only ever written on purpose."""
        record = self.record
        zeros = int(record["zero_count"])
        # Complex tensors count each part, and never match: no mask is complex.
        masked = int(record["neginf_count"])
        if self.is_saturated:
            masked += int(record["saturated_count"])
        everything = zeros + masked == int(record["numel"])
        return self.only_neginf and zeros > 0 and everything

    @property
    def is_initial(self) -> bool:
        """True if a buffer holds infinities alone, as where a least or a largest number begins."""
        return self.role == "buffer" and self.infinities == int(self.record["numel"])

    @property
    def mask_reason(self) -> str:
        """The reason why a finding with only_neginf is no event yet."""
        if self.is_saturated:
            return "all that saturated is negative, as in a mask"
        return "its only non-finite values are -Inf"

    @property
    def is_recompute(self) -> bool:
        """True if activation checkpointing computed it again in backward."""
        return bool(int(self.record["flags"]) & int(Flag.RECOMPUTE))

    # The state

    def stand(self, state: FindingState, verdict: Verdict) -> None:
        """Sets the state, and the provisional verdict. Called by Findings only."""
        is_concluded = state is FindingState.FINAL and self.state.by_consequence
        self.state = FindingState.CONCLUDED if is_concluded else state
        self.verdict = verdict

    @property
    def is_tentative(self) -> bool:
        """True if it may be a mask, or nothing was computed from it so far."""
        return self.verdict is Verdict.UNRESOLVED and not self.is_gradient

    @property
    def is_unresolved(self) -> bool:
        return self.verdict is Verdict.UNRESOLVED

    @property
    def is_held_input(self) -> bool:
        """True if it came in with the batch, and nothing has shown harm: a weight's gradient is
        made of it, even where the output is finite.
        """
        return self.role == "input" and self.state is FindingState.DOUBTFUL and not self.only_neginf

    @property
    def root(self) -> Finding:
        """The finding that this finding follows from, through any number of others."""
        finding = self
        while finding.cause is not None:
            finding = finding.cause
        return finding

    def detach(self) -> None:
        """Lets go of what is held when its step has ended: of what it follows from only the root
        stays in memory.
        """
        root = self.root
        self.cause = None if root is self else root
        # A weight is read in every step: what is made of it would never go.
        self.uses.made.clear()


class SiteMemory:
    """The numbers of sites at which something did no harm in an earlier step: ``masks``, where that
    was -Inf; ``harmless``, where nothing came of it.
    """

    def __init__(self) -> None:
        self.masks: set[int] = set()
        self.harmless: set[int] = set()


def unread_clause(count: int) -> str:
    """The end of a reason that tells what was finite; empty where all was read."""
    if count == 0:
        return ""
    tensors = "a small tensor" if count == 1 else f"{count:,} small tensors"
    return f"; {tensors} of this step had been overwritten before being read"


class Findings:
    """The findings of one step. Each whose verdict was decided or changed is put in ``changed`` for
    the caller to take. ``allowances``: what may be non-finite among what is judged now.
    """

    def __init__(self, sites: SiteTable, memory: SiteMemory, allowances: list[Allowance]) -> None:
        self.sites = sites
        self.memory = memory
        self.allowances = allowances
        self.all: list[Finding] = []
        self.changed: list[Finding] = []
        self.by_seq: dict[int, Finding] = {}
        #: The verdicts that the log has, by sequence number.
        self.logged: dict[int, Verdict] = {}
        # Tensors that were overwritten before their turn to be read came.
        self.unread_count = 0

    def new(self, entry: Any, bad: entries.Records) -> Iterator[Finding]:
        """Adds the non-finite tensors of an entry (module level) that have no finding yet. Gives
        those that allow_nonfinite() does not decide on.
        """
        call = getattr(entry, "call", None)
        thread = getattr(entry, "thread", 0) if call is None else call.thread
        for seq, role in tensors_of(entry, bad):
            # A parameter may have been read for another finding, before its own entry.
            if is_event(bad[seq], role) and seq not in self.by_seq:
                finding = Finding(bad[seq], role, call, thread)
                self.add(finding)
                if not self.allow(finding):
                    yield finding

    def add(self, finding: Finding) -> None:
        self.all.append(finding)
        self.by_seq[finding.seq] = finding

    def allow(self, finding: Finding) -> bool:
        """Decides on a finding that allow_nonfinite() covers; whether it does."""
        if not self.allowances:
            return False
        reason = why_allowed(self.sites[finding.site], self.allowances)
        if reason is not None:
            finding.is_allowed = True
            self.decide(finding, Verdict.INTENDED, reason)
        return reason is not None

    @staticmethod
    def roots_of(findings: list[Finding]) -> list[Finding]:
        """The roots of these findings, where they began, each once, earliest first."""
        roots = {id(root): root for root in (finding.root for finding in findings)}
        return sorted(roots.values(), key=lambda finding: finding.position)

    def pending_from(self, root: Finding) -> list[Finding]:
        return [f for f in self.all if f.state.is_pending and f is not root and f.root is root]

    @property
    def tentative(self) -> list[Finding]:
        """The findings of which nothing was computed so far, or which may be masks."""
        return [f for f in self.all if f.is_tentative]

    @property
    def first_confirmed(self) -> Optional[Finding]:
        return next((f for f in self.all if f.verdict in CONFIRMED), None)

    @property
    def first_scaled(self) -> Optional[Finding]:
        return next((f for f in self.all if f.verdict is Verdict.SCALED), None)

    @property
    def has_held_gradients(self) -> bool:
        """True if scaled gradients still wait for what the scaler decides."""
        return any(f.state is FindingState.SCALED for f in self.all)

    @property
    def has_unused_gradients(self) -> bool:
        """True if there are these, or gradients that no optimizer has used yet."""
        return any(f.state in (FindingState.SCALED, FindingState.UNUSED) for f in self.all)

    # The states

    def decide(
        self, finding: Finding, verdict: Verdict, reason: str, cause: Optional[Finding] = None
    ) -> None:
        self._enter(finding, FindingState.FINAL, verdict, reason)
        finding.cause = cause

    def propagate(self, finding: Finding, cause: Finding) -> None:
        self.decide(finding, Verdict.PROPAGATED, self.follows(cause), cause)

    def follows(self, cause: Finding) -> str:
        return f"it follows from {self.sites[cause.blamed.site]}"

    def hold(
        self,
        finding: Finding,
        state: FindingState,
        reason: str,
        then: PossibleVerdict,
        cause: Optional[Finding] = None,
    ) -> None:
        """Leaves it undecided, with a reason for now."""
        self._enter(finding, state, state.meanwhile, reason)
        finding.then = then
        finding.cause = cause

    def hold_scaled(
        self, finding: Finding, then: PossibleVerdict, cause: Optional[Finding] = None
    ) -> None:
        reason = "a scaled gradient; loss scaling decides what becomes of it"
        self.hold(finding, FindingState.SCALED, reason, then, cause)

    def release(self, finding: Finding, clause: str = "") -> None:
        """Decides a finding that matters: ``then`` comes true, where it was not decided. ``clause``
        ends the reason.
        """
        verdict, reason = finding.verdict, finding.reason
        if finding.then is not None and (finding.state.is_undecided or finding.state.is_pending):
            verdict, reason = finding.then
        self._enter(
            finding, FindingState.FINAL, verdict, f"{reason}; {clause}" if clause else reason
        )

    def release_root(self, finding: Finding, clause: str = "") -> None:
        """Decides what a finding that matters follows from, and so the finding."""
        root = finding.root
        self.release(root, clause)
        if finding is not root:
            self.propagate(finding, root)

    def pass_blame(self, given: Finding, maker: Finding, reason: str) -> None:
        """Blames ``maker``, for this reason, in place of ``given``, which was counted."""
        maker.position, maker.counted, given.counted = given.position, True, False
        self.add(maker)
        self.decide(maker, Verdict.ORIGIN, reason)
        self.lapse(given, FindingState.SETTLED, "what came of it was made of other infinities")
        for finding in self.all:
            if finding.cause is given:
                self.propagate(finding, maker)

    def lapse(
        self, finding: Finding, state: FindingState, reason: str, cause: Optional[Finding] = None
    ) -> None:
        """Settles a finding of which nothing came until now."""
        self._enter(finding, state, state.meanwhile, reason)
        finding.cause = cause

    def _enter(self, finding: Finding, state: FindingState, verdict: Verdict, reason: str) -> None:
        finding.stand(state, verdict)
        clause = unread_clause(self.unread_count)
        if verdict in (Verdict.ORIGIN, Verdict.ARRIVED) and clause not in reason:
            reason += clause
        finding.reason = reason
        self.changed.append(finding)

    # The end of an update, and of the step

    def skip_unused(self) -> None:
        """Settles gradients that no optimizer has used, as none will."""
        for finding in self.all:
            if finding.state is FindingState.UNUSED:
                reason = "the training loop has left this update out"
                self.lapse(finding, FindingState.SCALED, reason, finding.cause)

    def settle_scaled(self, skipped: bool) -> Optional[Finding]:
        """The scaler has decided. Returns the first scaled gradient where the update was
        ``skipped``; otherwise the scaled gradients get the verdicts planned for them.
        """
        held = [f for f in self.all if f.state is FindingState.SCALED]
        for finding in held:
            if skipped:
                finding.stand(
                    FindingState.SKIPPED, finding.verdict
                )  # the same: nothing has changed
            else:
                self.release(finding)
        return held[0] if skipped and held else None

    def overdue(self, finding: Finding, skipped_steps: int) -> None:
        """Judges a scaled finding as an origin, because loss scaling has skipped so many steps in a
        row. Whether a smaller scale would help is not known: a NaN may be Inf - Inf of what the
        scale has made too large.
        """
        record = finding.record
        what = "Inf" if record["posinf_count"] or record["neginf_count"] else "NaN"
        reason = (
            f"{skipped_steps} steps in a row were skipped by loss scaling, and a gradient is still "
            f"{what}"
        )
        self.decide(finding, Verdict.ORIGIN, reason)

    def ensure_event(self) -> None:
        """Counts the first non-finite record of a step where none was counted as an origin."""
        confirmed = self.first_confirmed
        has_origin = any(f.verdict in (Verdict.ORIGIN, Verdict.ARRIVED) for f in self.all)
        if confirmed is not None and not has_origin:
            reason = "the step has non-finite values, and no observed module began them"
            self.decide(confirmed, Verdict.ARRIVED, reason)

    def remember_masks(self) -> None:
        """The step has ended: sites whose -Inf did no harm are remembered as masks."""
        if self.first_confirmed is None:
            self.memory.masks.update(f.site for f in self.all if f.state is FindingState.DOUBTFUL)

    def add_overflow(self, finding: Finding, reason: str) -> None:
        """The overflow status of a saturating device was set, and no tensor of the step shows it: a
        value inside an operator overflowed, or a NaN became 0. Adding a mask sets it too.
        """
        self.add(finding)
        self.decide(
            finding,
            Verdict.ABSORBED,
            f"{reason}: its overflow status was set, and no output or gradient that was read shows "
            "where",
        )


_COUNTED = {
    "origin": frozenset({Verdict.ORIGIN, Verdict.ARRIVED}),
    "all": frozenset({Verdict.ORIGIN, Verdict.ARRIVED, Verdict.PROPAGATED}),
}


# The event store takes care that a call is counted once.
_COUNTED["calls"] = _COUNTED["all"]


class Counter:
    """Counts events against ``overflow_nums``; with ``within``, only those of the last so many
    steps.
    """

    def __init__(self, overflow_nums: int, within: Optional[int], count: str) -> None:
        self.overflow_nums = overflow_nums
        self.total = 0
        #: Steps in a row that loss scaling has skipped.
        self.skipped_steps = 0
        self._within = within
        #: Events with one of these verdicts count.
        self.verdicts = _COUNTED[count]
        # Only the youngest overflow_nums events can matter for the limit.
        self._steps: deque[int] = deque(maxlen=min(max(overflow_nums, 1), sys.maxsize))

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
