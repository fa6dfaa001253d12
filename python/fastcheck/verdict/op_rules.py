"""The verdict at op level, by provenance: the inputs and outputs of every op are recorded, so an
origin is an op whose inputs were all finite.

A non-finite value is an event if something computed from it lasts or leaves (``Destination``).
Until then it is pending; at the end of the step it is absorbed, but for what a later step reads of
it.

With ``is_strict`` (``Stop(count="all")``) it is an event where it appears: a NaN is judged at once,
and an infinity waits for its consumers: it is absorbed where the outputs of all of them are finite,
and an origin where one of them returns a NaN, or where it has no consumer.

On a device that saturates, the largest finite number stands for an infinity and never becomes a NaN
(Inf - Inf is 0). A saturated value is therefore judged at once in any case, unless all saturated
values are negative, as in a mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Callable, NamedTuple, Optional

import numpy as np

from fastcheck.record.event import GIVEN_NUMBER, NEVER_FINITE, UNUSED
from fastcheck.record.format import VALUE_BYTES, Verdict

from . import entries
from .allowed import why_allowed
from .benign import BOUNDED, ELEMENTWISE, WRITERS, why_benign
from .findings import (
    CONFIRMED,
    Finding,
    Findings,
    FindingState,
    PossibleVerdict,
    is_event,
    is_statistic,
    tensors_of,
)
from .incident import HOST, INTEGERS, RANKS, Destination, Incident, NonfiniteInput
from .module_rules import harm, made_in_loss, was_finite

# Findings of earlier steps that may still be read: parameters, masks, running statistics.
_MAX_EARLIER_FINDINGS = 4096

# The places where an infinity is an event that is allowed elsewhere.
_LASTING = frozenset(("gradient", "update", "state"))

_OPEN = frozenset((Verdict.UNRESOLVED, Verdict.ABSORBED, Verdict.SCALED))
_ON_PURPOSE = ", probably written on purpose"
_WAITING = frozenset((Verdict.UNRESOLVED, Verdict.ABSORBED, Verdict.INTENDED))
_SCALED = frozenset((Verdict.SCALED,))

_LARGEST = "the largest number, which may have been written on purpose"
_NOT_READ = "whether that was finite is not known, a copy from a device may be under way there"
_UPDATE_SKIPPED = "scaled gradients were made of it, whose update was skipped"


class OpMemory:
    """The part of the verdicts that outlives a step."""

    def __init__(self) -> None:
        self.earlier_findings: dict[int, Finding] = {}
        #: The places where a non-finite value counts, and their numbers.
        self.places: dict[Destination, int] = {HOST: 0, RANKS: 1, INTEGERS: 2}
        #: The findings that a record was read of, where they are several, by its number.
        self.parts: dict[int, list[Finding]] = {}
        #: True if there is, or was in an earlier step, a finding whose consequences decide.
        self.has_open = False


class _Inputs(NamedTuple):
    """The findings that an operator read, and the first of those with such a verdict."""

    all: list[Finding]
    confirmed: Optional[Finding]
    scaled: Optional[Finding]
    #: One whose consequences are not known yet.
    waiting: Optional[Finding]
    intended: list[Finding]
    #: One that the user allows, from which an intended one follows.
    allowed: Optional[Finding]


@dataclass(eq=False)
class OpRules:
    """Gives the findings of one step their verdicts. ``_record_of``: the record with this number,
    while it is held.
    """

    findings: Findings
    _memory: OpMemory
    _last_finite_step: Callable[[int], Optional[int]]
    _record_of: Callable[[int], Optional[np.void]]
    is_strict: bool
    # Not every operator of every step is read.
    _is_filtered: bool = field(default=False, init=False)

    def apply(self, entry: entries.Seen, bad: entries.Records) -> None:
        """Judges what the entry tells of."""
        if isinstance(entry, entries.Operator):
            self._operator(entry, bad)
        elif isinstance(entry, entries.ArgumentKnown):
            self._argument_known(entry)
        elif isinstance(entry, entries.LossKnown):
            self._loss_known(entry)
        else:
            for seq, role in tensors_of(entry, bad):
                if self._find(seq) is None:
                    finding = Finding(bad[seq], role)
                    self._add(finding)
                    if not self._allow(finding):
                        _RULES[type(entry)](self, finding, entry)

    # Operators

    def _operator(self, entry: entries.Operator, bad: entries.Records) -> None:
        """Judges an op that read or wrote a non-finite tensor."""
        incident, self._is_filtered = entry.incident, entry.is_filtered
        for argument in incident.nonfinite_inputs:
            if (
                argument.is_arrival
                and argument.seq in bad
                and argument.seq not in self.findings.by_seq
            ):
                arrival = self._made_by(incident, bad[argument.seq])
                first = self._recomputed(arrival) if incident.forward_seq >= 0 else None
                if first is not None:
                    self._stand_for(argument.seq, [first])
                    reason = "it was recomputed (activation checkpointing): the first run counts"
                    self.findings.decide(arrival, Verdict.BENIGN, reason)
                elif not self._allow(arrival):
                    self._arrive(arrival, argument.is_collective, self._outside)
        findings = (
            f for argument in incident.nonfinite_inputs for f in self._read_of(argument, bad)
        )
        inputs = list({id(finding): finding for finding in findings}.values())
        if incident.place >= 0:
            place = list(self._memory.places)[incident.place]
            for source in inputs:
                self._reached(source, place)
            return
        is_finite = bool(incident.made) and not any(is_bad for _, is_bad in incident.made)
        for source in inputs:
            source.uses.unseen_count += incident.is_unseen
            source.uses.finite_count += is_finite
        for seq, is_bad in incident.made:
            if is_bad and seq in bad:
                finding = self._made_by(incident, bad[seq])
                finding.uses.inputs = incident.inputs
                self._made(finding, inputs, entry)
                for source in inputs:
                    source.uses.made.append(finding)

    def _made_by(self, incident: Incident, record: np.void) -> Finding:
        finding = Finding(record, self.findings.sites[int(record["site"])].role)
        finding.uses.line, finding.uses.api = incident.line, incident.api
        self._add(finding)
        return finding

    def _made(self, finding: Finding, inputs: list[Finding], entry: entries.Operator) -> None:
        """Judges what an operator made. ``inputs``: the findings that it read."""
        incident = entry.incident
        finding.uses.op = str(incident)
        if incident.is_recompute and not self.is_strict:
            first_run = self._first_run(finding)
            if first_run is not None:
                inputs = [*inputs, first_run]
                first_run.uses.made.append(finding)
                if first_run.verdict in CONFIRMED:
                    reason = _recomputed_reason(finding)
                    self.findings.decide(finding, Verdict.PROPAGATED, reason, first_run)
                    return
        read = self._read_by(inputs)
        if not self._explained(finding, read, entry) and not self._meant(finding, read, incident):
            self._made_anew(finding, read, entry)

    def _read_by(self, inputs: list[Finding]) -> _Inputs:
        intended = [f for f in inputs if f.verdict is Verdict.INTENDED]
        return _Inputs(
            inputs,
            next((f for f in inputs if f.verdict in CONFIRMED and self._is_of_now(f)), None),
            next((f for f in inputs if f.verdict is Verdict.SCALED), None),
            next((f for f in inputs if f.is_unresolved or _is_open(f)), None),
            intended,
            next((f for source in intended for f in (source, source.root) if f.is_allowed), None),
        )

    def _explained(self, finding: Finding, read: _Inputs, entry: entries.Operator) -> bool:
        """True if the operator may return such numbers, or if what it read explains them."""
        incident = entry.incident
        benign = why_benign(incident.op, self.findings.sites[finding.site].index)
        if benign is not None:
            self.findings.decide(finding, Verdict.BENIGN, benign)
        elif read.confirmed is None and read.waiting is None and self._allow(finding):
            finding.cause = next((f for f in read.all if f.is_allowed), None)
        elif incident.is_recompute and self.is_strict:
            cause = read.all[0] if read.all else None
            self.findings.decide(finding, Verdict.PROPAGATED, _recomputed_reason(finding), cause)
        elif read.scaled is not None and read.confirmed is None:
            then = PossibleVerdict(Verdict.PROPAGATED, self.findings.follows(read.scaled))
            self._hold_scaled(finding, then, read.all)
        elif read.confirmed is not None:
            self.findings.propagate(finding, read.confirmed)
        else:
            return False
        return True

    def _meant(self, finding: Finding, read: _Inputs, incident: Incident) -> bool:
        """True if the infinities were given as numbers, or carry on those that were."""
        if finding.has_nan:
            return False
        if _is_written(finding, incident):
            what = "the largest number" if finding.is_saturated else "an infinity"
            self._intend(finding, f"{finding.uses.op} was given {what} as a number")
        elif (
            read.intended
            and not read.allowed
            and read.waiting is None
            and not _new_infinities(finding, read.all, incident)
            and incident.op not in BOUNDED
            and _carries(finding, read.intended)
        ):
            source = read.intended[0]
            self._intend(finding, self.findings.follows(source), source)
        elif not read.all and self._is_copied(finding, incident):
            reason = f"{finding.uses.op} copied it from where it is an ordinary number"
            self._intend(finding, reason)
        else:
            return False
        return True

    def _made_anew(self, finding: Finding, read: _Inputs, entry: entries.Operator) -> None:
        """Judges what the operator has made itself, as far as is known."""
        incident, op, unread = entry.incident, finding.uses.op, ""
        if incident.reads_in_flight and not read.all:
            unread = f"{op} read pinned memory of the host: {_NOT_READ}"
        new_count = _new_infinities(finding, read.all, incident)
        if entry.is_scaled and finding.is_gradient:
            reason = unread or f"{op} read only finite values"
            verdict = Verdict.ARRIVED if unread else Verdict.ORIGIN
            self._hold_scaled(finding, PossibleVerdict(verdict, reason), read.all)
        elif unread and finding.is_saturated:
            self._intend(finding, _LARGEST)
        elif unread:
            self._arrive(finding, False, unread)
        elif read.allowed:
            site = self.findings.sites[read.allowed.site]
            reason = f"values that allow_nonfinite() allows in {site} spread here"
            self._decide_or_hold(finding, PossibleVerdict(Verdict.ORIGIN, reason), read.all)
        elif self._decides_at_once(finding):
            self._judge_at_once(finding, read.waiting, read.intended, incident)
        elif finding.has_nan:
            # A NaN among them explains it; an infinity beside that may have done no harm.
            carried = [f for f in read.all if f.has_nan and (_is_open(f) or f.verdict in CONFIRMED)]
            then = PossibleVerdict(Verdict.ORIGIN, self._why(finding, read.intended, incident))
            self._hold(finding, then, carried or read.all)
        elif new_count:
            reason = (
                f"{op} made it: {new_count:,} of its infinities are not among those that it read"
            )
            # Beside a -Inf, which may be a mask, they count alone: what it read may be harmless.
            carried = [f for f in read.all if not f.only_neginf]
            self._hold(finding, PossibleVerdict(Verdict.ORIGIN, reason), carried)
        else:
            reason = f"{op} made it: {_read(incident)}"
            if read.intended:
                reason = self._why(finding, read.intended, incident)
            self._hold(finding, PossibleVerdict(Verdict.ORIGIN, reason), read.all)

    def _judge_at_once(
        self,
        finding: Finding,
        waiting: Optional[Finding],
        intended: Sequence[Finding],
        incident: Incident,
    ) -> None:
        """Judges a finding without its consequences: a NaN, or saturated values that are no mask.
        An infinity waits for its consumers.
        """
        op = finding.uses.op
        if _is_certain(finding) and waiting is not None:
            what = "made a NaN of it" if finding.has_nan else "made a positive one of it"
            self._blame(waiting, f"{op} {what}")
            self.findings.propagate(finding, waiting)
        elif _is_certain(finding):
            self.findings.decide(finding, Verdict.ORIGIN, self._why(finding, intended, incident))
        elif finding.role != "grad_input" and incident.is_optimizer:
            # It stays in the optimizer's state, which every later step reads.
            reason = f"{op} overflowed in the optimizer's state"
            self.findings.decide(finding, Verdict.ORIGIN, reason)
        else:
            reason = f"{op} made it: {_read(incident)}"
            self._wait(finding, PossibleVerdict(Verdict.ORIGIN, reason), waiting)

    def _blame(self, waiting: Finding, clause: str) -> None:
        """A waiting infinity caused a NaN: the finding where it began is counted."""
        if _is_open(waiting):
            self._count(waiting, clause)
            return
        self._adopt(waiting.root)
        self.findings.release_root(waiting, clause)

    def _why(self, finding: Finding, intended: Sequence[Finding], incident: Incident) -> str:
        """The reason why what an operator made is an event. ``intended``: the infinities that it
        read.
        """
        if not intended:
            return _read(incident)
        root = intended[0].root
        what = "made a NaN" if finding.has_nan else "made an infinity"
        is_exp = any(name in finding.uses.op.lower() for name in ("softmax", "logsumexp"))
        is_mask = is_exp and finding.has_nan and all(source.only_neginf for source in intended)
        how = "stored in" if root.role in ("buffer", "param") else "written on purpose in"
        return (
            f"{finding.uses.op} {what} where it read only finite values and infinities that were "
            f"{how} {self._writer(root)}"
            f"{' (a row that is masked entirely does this)' if is_mask else ''}"
        )

    def _writer(self, finding: Finding) -> str:
        """The place where a finding was made: the site, and the line where that is known."""
        line = f", {finding.uses.line}" if finding.uses.line else ""
        return f"{self.findings.sites[finding.site].in_text}{line}"

    def _is_copied(self, finding: Finding, incident: Incident) -> bool:
        """True if one of the op's inputs held the largest number of the same dtype."""
        if not finding.is_saturated:
            return False
        records = (self._record_of(seq) for _, seq in incident.inputs)
        return any(
            record is not None
            and record["saturated_count"]
            and record["dtype"] == finding.record["dtype"]
            for record in records
        )

    def _first_run(self, finding: Finding) -> Optional[Finding]:
        """The finding of the first run of what activation checkpointing computes again in
        backward.
        """
        runs = [f for f in self.findings.all if f.site == finding.site and f is not finding]
        first = [run for run in runs if not run.is_recompute]
        again = len(runs) - len(first)
        return first[again] if again < len(first) else None

    def _recomputed(self, arrival: Finding) -> Optional[Finding]:
        """The finding with these very values. torch ends a recomputation within the last operator
        that it needs, whose result is not seen.
        """
        values, has_sum = arrival.record.tobytes()[:VALUE_BYTES], arrival.record["checksum"] != 0
        known = (f for f in self._open() if f is not arrival) if has_sum else ()
        return next((f for f in known if f.record.tobytes()[:VALUE_BYTES] == values), None)

    def _is_of_now(self, finding: Finding) -> bool:
        """True if it is of this step: of an earlier step it counts by its consequences."""
        return self.is_strict or finding.seq in self.findings.by_seq

    # Tensors that are read by name, and are no results of operators

    def _entered(self, finding: Finding, entry: entries.Entered) -> None:
        known = [f for seq in entry.sources for f in self._known(seq) if f is not finding]
        sources = self._fitting(finding.record, known)
        # An operator wrote it, unless it was read before by name or by another module.
        is_written = any(source.uses.op for source in sources)
        is_written &= all(map(self._is_from_outside, sources))
        if sources and (finding.only_neginf or not is_written):
            self._stand_for(finding.seq, sources)
            reason = "the verdict on the operator that made it counts"
            self.findings.decide(finding, Verdict.BENIGN, reason)
            return
        finding.is_data = not entry.is_collective
        reason = "it is part of the batch, and no observed operator wrote it"
        if sources:
            root = sources[0].root
            finding.uses.line = sources[0].uses.line or root.uses.line
            reason = f"it is part of the batch, into which {self._writer(root)} wrote it"
        self._arrive(finding, entry.is_collective, reason)

    def _is_from_outside(self, finding: Finding) -> bool:
        """True if it was not computed, but written: as a number, or from a tensor that no observed
        op made.
        """
        if finding.verdict is Verdict.INTENDED:
            return not finding.root.is_allowed
        path, causes = _ancestors(finding)
        # On a device torch makes a tensor of the number in x[0] = number.
        return not causes and all(
            root.then is not None and (root.then.verdict is Verdict.ARRIVED or not root.uses.inputs)
            for root in _roots(path)
        )

    def _argument_known(self, entry: entries.ArgumentKnown) -> None:
        finding = self._find(entry.seq)
        reason = why_allowed(self.findings.sites[entry.site], self.findings.allowances)
        if finding is not None and _is_open(finding) and reason is not None:
            finding.is_allowed = True
            self._intend(finding, reason)

    def _stored(self, finding: Finding, entry: entries.OpStored) -> None:
        last_finite = self._last_finite_step(finding.site)
        earlier = self.findings.first_confirmed
        if _is_plain_number(finding):
            self._intend(finding, _LARGEST)
        elif last_finite is not None and earlier is not None:
            self.findings.propagate(finding, earlier)
        elif last_finite is not None and not finding.is_mask:
            self._changed(finding, last_finite)
        else:
            is_kept = is_statistic(self.findings.sites[finding.site])
            if not (finding.has_nan or is_kept) and (finding.is_mask or finding.role == "buffer"):
                self._intend(finding, f"a stored infinity{_ON_PURPOSE}")
                return
            reason = f"{NEVER_FINITE}: look at the checkpoint or at the initialisation"
            if is_kept and not finding.has_nan:  # the norm returns its bias, which is finite
                self.findings.decide(finding, Verdict.ARRIVED, reason)
            else:
                self._decide_or_hold(finding, PossibleVerdict(Verdict.ARRIVED, reason))

    def _changed(self, finding: Finding, last_finite: int) -> None:
        """Judges a stored tensor that was finite in an earlier step, or before its module ran."""
        sites = self.findings.sites
        site = sites[finding.site]
        then = PossibleVerdict(Verdict.ARRIVED, was_finite(finding.role, last_finite))
        if finding.role == "buffer":
            # Read again where a norm has just run, and nowhere else.
            reason = f"{then.reason}: {site.module or site.module_type} wrote it in its forward"
            then = PossibleVerdict(Verdict.ORIGIN, reason)
        made = [f for f in self._open() if sites[f.site].module == site.module]
        if self.is_strict or finding.role != "buffer" or not made:
            self.findings.decide(finding, *then)
            return
        # A norm that has just run keeps what it made of its input.
        self._hold(finding, then, made[:1])
        self._count(finding, f"it reached {site.tensor_name}")

    def _loss(self, finding: Finding, entry: entries.Loss) -> None:
        """Judges a loss that is a number, or whose ops were left out."""
        earlier = self.findings.first_confirmed
        others = self.findings.all[:-1]
        roots = (f.root for f in others if f.is_tentative and not f.root.is_mask)
        root = next(roots, None)
        then = PossibleVerdict(Verdict.ORIGIN, made_in_loss(self.findings))
        if earlier is not None:
            self.findings.propagate(finding, earlier)
        elif entry.is_scaled:
            self.findings.hold_scaled(finding, then)
        elif root is not None:
            self.findings.release(root, harm(self.findings, root, finding))
            self.findings.propagate(finding, root)
        else:
            self.findings.decide(finding, *then)

    def _loss_known(self, entry: entries.LossKnown) -> None:
        finding = self.findings.by_seq.get(entry.seq)
        if self.is_strict and finding is not None and finding.is_tentative:
            self.findings.release_root(finding)

    def _compiled(self, finding: Finding, entry: entries.Compiled) -> None:
        earlier = self.findings.first_confirmed
        reason = f"it was made within compiled code: {entry.name} is the first that shows it"
        # The consumers of the finding are not observed either.
        finding.uses.unseen_count += 1
        if earlier is not None:
            self.findings.propagate(finding, earlier)
        elif entry.is_scaled and finding.is_gradient:
            first = self.findings.first_scaled
            scaled = [] if first is None else [first]
            self._hold_scaled(finding, PossibleVerdict(Verdict.ARRIVED, reason), scaled)
        else:
            self._arrive(finding, False, reason)
            if _is_open(finding):
                # It may follow from any that is open: the first that the code can have read.
                finding.uses.parents = [f for f in self._open() if f is not finding][:1]

    def _named(self, finding: Finding, entry: entries.NamedResult) -> None:
        earlier = self.findings.first_confirmed
        if entry.source >= 0:
            reason = "the verdict on the operator that made it counts"
            self.findings.decide(finding, Verdict.BENIGN, reason)
        elif earlier is not None:
            self.findings.propagate(finding, earlier)
        elif entry.is_scaled and finding.is_gradient:
            self._hold_scaled(finding, PossibleVerdict(Verdict.ARRIVED, self._outside), [])
        else:
            self._arrive(finding, False, self._outside)

    def _arrive(self, finding: Finding, is_collective: bool, reason: str) -> None:
        """Judges a finding that no observed op wrote."""
        if is_collective:
            reason = "it came through a collective: look at the ranks that took part in it"
        elif _is_plain_number(finding):
            self._intend(finding, _LARGEST)
            return
        then = PossibleVerdict(Verdict.ARRIVED, reason)
        if _is_certain(finding):
            self._decide_or_hold(finding, then)
        elif finding.is_mask or int(finding.record["numel"]) == 1:
            self._intend(finding, "a stored infinity")
        else:
            self._wait(finding, then, None)

    @property
    def _outside(self) -> str:
        if self._is_filtered:
            return (
                "no observed operator made it: it came from tensors that ops=, roles=, include=, "
                "exclude=, steps= or every= leave unread, or from outside of torch's operators"
            )
        # Within torch.func.grad operators are called for wrappers alone.
        return (
            "no observed operator made it: it came from outside of torch's operators, or out of a "
            "transform of torch.func"
        )

    # Findings

    def _find(self, seq: int) -> Optional[Finding]:
        """The finding with this record, of this step or of an earlier step."""
        finding = self.findings.by_seq.get(seq)
        if finding is None:
            finding = self._memory.earlier_findings.pop(seq, None)
            if finding is not None:
                # The youngest again: the oldest goes first.
                self._memory.earlier_findings[seq] = finding
        return finding

    def _known(self, seq: int) -> list[Finding]:
        """The findings that this record describes."""
        if seq in self._memory.parts:
            return self._memory.parts[seq]
        finding = self._find(seq)
        return [] if finding is None else [finding]

    def _read_of(self, argument: NonfiniteInput, bad: entries.Records) -> list[Finding]:
        """The findings that an op read in one tensor."""
        findings = self._known(argument.seq)
        if argument.read >= 0:
            findings = [*findings, *(f for seq in argument.also for f in self._known(seq))]
            findings = self._fitting(bad.get(argument.read), findings)
            self._stand_for(argument.read, findings)
        return findings

    def _stand_for(self, seq: int, findings: list[Finding]) -> None:
        """Lets these findings stand for the record ``seq``: what reads it reads them."""
        parts = self._memory.parts
        parts[seq] = findings
        while len(parts) > _MAX_EARLIER_FINDINGS:
            del parts[next(iter(parts))]

    def _fitting(self, record: Optional[np.void], findings: list[Finding]) -> list[Finding]:
        """The findings of which something may be in ``record``: a NaN, or an infinity of its
        sign.
        """
        if record is None or len(findings) < 2:
            return findings
        kinds = _kinds(Finding(record, "input"))
        return [f for f in findings if _kinds(f) & kinds or not _kinds(f)] or findings

    def _add(self, finding: Finding) -> None:
        self.findings.add(finding)
        earlier = self._memory.earlier_findings
        earlier[finding.seq] = finding
        while len(earlier) > _MAX_EARLIER_FINDINGS:
            del earlier[next(iter(earlier))]

    def _adopt(self, finding: Finding) -> None:
        """Adopts a finding of an earlier step, or a finding that was made between two steps: it
        counts in this step.
        """
        if finding.seq not in self.findings.by_seq:
            self.findings.all.insert(0, finding)
            self.findings.by_seq[finding.seq] = finding

    def _open(self) -> list[Finding]:
        return [f for f in self.findings.all if _is_open(f)]

    def _allow(self, finding: Finding) -> bool:
        is_allowed = self.findings.allow(finding)
        # Allowed only as long as it reaches no gradient.
        self._memory.has_open = self._memory.has_open or is_allowed
        return is_allowed

    def _intend(self, finding: Finding, reason: str, cause: Optional[Finding] = None) -> None:
        self.findings.decide(finding, Verdict.INTENDED, reason, cause)
        # Only a mask is meant in a weight that is trained.
        self._memory.has_open |= not finding.only_neginf

    def _decides_at_once(self, finding: Finding) -> bool:
        return self.is_strict or finding.is_saturated

    def _decide_or_hold(
        self, finding: Finding, then: PossibleVerdict, parents: Sequence[Finding] = ()
    ) -> None:
        if self._decides_at_once(finding):
            self.findings.decide(finding, *then)
        else:
            self._hold(finding, then, parents)

    def _hold(self, finding: Finding, then: PossibleVerdict, parents: Sequence[Finding]) -> None:
        """Leaves a finding to its consequences."""
        reason = "whether it counts depends on what is computed from it"
        self.findings.hold(finding, FindingState.PENDING, reason, then)
        self._trace(finding, parents)

    def _hold_scaled(
        self, finding: Finding, then: PossibleVerdict, inputs: Sequence[Finding]
    ) -> None:
        parents = [f for f in inputs if f.verdict is Verdict.SCALED or f.is_unresolved]
        self.findings.hold_scaled(finding, then, parents[0] if parents else None)
        if not self.is_strict:
            self._trace(finding, inputs)

    def _wait(self, finding: Finding, then: PossibleVerdict, cause: Optional[Finding]) -> None:
        """Leaves a finding to its consumers, or to its consequences."""
        if self._decides_at_once(finding):
            reason = "an infinity; whether it counts depends on what is computed from it"
            self.findings.hold(finding, FindingState.DOUBTFUL, reason, then, cause)
        else:
            self._hold(finding, then, [] if cause is None else [cause])

    def _lapse(self, finding: Finding, state: FindingState, reason: str) -> None:
        """Settles a finding of which nothing came. If it is traced it may count in a later step."""
        if finding.uses.is_traced:
            self.findings.lapse(finding, state, reason)
        else:
            verdict = Verdict.ABSORBED if state is FindingState.SETTLED else Verdict.SCALED
            self.findings.decide(finding, verdict, reason)

    def _trace(self, finding: Finding, parents: Sequence[Finding]) -> None:
        finding.uses.is_traced = True
        finding.uses.parents = [
            parent for parent in parents if _is_open(parent) or parent.verdict in CONFIRMED
        ]
        self._memory.has_open = True

    # Consequences

    def _reached(self, finding: Finding, place: Destination) -> None:
        """Judges a finding that has reached a place where it counts."""
        if self.is_strict:
            return
        root = finding.root
        is_lasting = place.kind in _LASTING and root.is_allowed
        is_intended = finding.verdict is root.verdict is Verdict.INTENDED
        if place.kind == "weight":
            if is_intended and finding.uses.op and not (finding.only_neginf or root.is_allowed):
                reason = f"{finding.reason}; {place.clause}"
                self._hold(finding, PossibleVerdict(Verdict.ORIGIN, reason), [])
            return
        if is_intended and (place.kind == "loss" or is_lasting):
            # No loss is infinite on purpose, and no gradient where infinities are only allowed.
            verdict = Verdict.ARRIVED if root.role in ("input", "buffer") else Verdict.ORIGIN
            reason = root.reason.removesuffix(_ON_PURPOSE)  # it was not
            self._release(root, PossibleVerdict(verdict, reason), place.clause)
            if finding is not root:
                self.findings.propagate(finding, root)
        if not _is_open(finding) or (finding.only_neginf and place.may_be_negative_infinity):
            return
        if place.may_be_infinite and not finding.has_nan:
            return
        # Values that are missing in the data may be kept as they are.
        if place.kind == "buffer" and self._is_from_outside(finding):
            return
        # A weight that always held -Inf, as a mask that is trained does, holds it after an update.
        if place.kind == "state" and finding.only_neginf:
            path, causes = _ancestors(finding)
            if not causes and all(f.role == "param" for f in _roots(path)):
                return
        # An update uses only those scaled gradients that the scaler let through.
        if finding.verdict is Verdict.SCALED and place.kind not in ("update", "state"):
            return
        self._count(finding, place.clause)

    def _count(self, finding: Finding, clause: str) -> None:
        """Makes an event of the place where a finding began; what lies between follows from it."""
        path, causes = _ancestors(finding)
        roots = _roots(path)
        suspects = [root for root in roots if root.site not in self.findings.memory.harmless]
        if not suspects and not causes:
            suspects = roots
        suspects.sort(key=_position)
        for root in suspects:
            is_later = finding.record["step"] != root.record["step"]
            later = f" in step {int(finding.record['step'])}" if is_later else ""
            self._release(root, root.then, _harm(root, path) + clause + later)
        cause = min((*suspects, *causes), key=_position)
        spread = {id(effect): effect for effect in path if effect not in roots}
        stack = list(suspects)
        while stack:
            for effect in stack.pop().uses.made:
                if _is_open(effect) and id(effect) not in spread:
                    spread[id(effect)] = effect
                    stack.append(effect)
        for effect in sorted(spread.values(), key=_position):
            # Findings that an earlier step has made of it are over.
            if _is_open(effect) and effect.seq in self.findings.by_seq:
                self.findings.propagate(effect, cause)

    def _release(self, root: Finding, then: Optional[PossibleVerdict], clause: str) -> None:
        assert then is not None
        self._adopt(root)
        self.findings.memory.harmless.discard(root.site)
        self.findings.decide(root, then.verdict, f"{then.reason}; {clause}")

    # The end of an update, and of the step

    def settle_scaled(self, skipped: bool) -> Optional[Finding]:
        """Settles scaled gradients. Where a mask keeps a gradient from every parameter it may
        overflow: then the scaler does not skip the update.
        """
        held = [f for f in self.findings.all if f.state is FindingState.SCALED]
        harmless = [] if skipped else [f for f in held if _is_absorbed(f, _WAITING | _SCALED)]
        for finding in harmless:
            reason = "a scaled gradient, and everything computed from it was finite"
            self._lapse(finding, FindingState.SETTLED, reason)
        for finding in held if not skipped and not self.is_strict else ():
            if finding.state is FindingState.SCALED and not finding.is_saturated:
                reason = "a scaled gradient that reached no parameter: the update was not skipped"
                self._lapse(finding, FindingState.SETTLED, reason)
        return self.findings.settle_scaled(skipped)

    def ensure_event(self) -> None:
        self._settle_infinities()
        # The consequences of a NaN that went where nothing is observed are not known.
        for finding in list(self.findings.all):
            is_unknown = finding.is_unresolved and finding.has_nan and finding.uses.unseen_count
            if is_unknown and _is_open(finding):
                self._count(finding, "its consumers are not observed")
        self.findings.ensure_event()

    def _settle_infinities(self) -> None:
        """Decides those that wait for their consumers: all of them have run."""
        for finding in self.findings.all:
            if not finding.is_unresolved or _is_open(finding):
                continue
            root = finding.root
            if any(result.verdict is Verdict.SCALED for result in finding.uses.made):
                self._lapse(finding, FindingState.SKIPPED, _UPDATE_SKIPPED)
            elif _is_absorbed(finding):
                self._lapse(finding, FindingState.SETTLED, _why_absorbed(finding))
            elif root is not finding:
                if root.state.is_undecided:
                    self.findings.release(root)
                self.findings.propagate(finding, root)
            else:
                self.findings.release(finding)

    def settle(self) -> None:
        self.ensure_event()
        self.settle_open()

    def settle_open(self) -> None:
        """Settles what is open: later steps alone may still read what this step made."""
        for finding in self.findings.all if not self.is_strict else ():
            if not finding.is_unresolved:
                continue
            if any(result.verdict is Verdict.SCALED for result in finding.uses.made):
                self._lapse(finding, FindingState.SKIPPED, _UPDATE_SKIPPED)
                continue
            reason = UNUSED
            if _is_absorbed(finding):
                reason = _why_absorbed(finding)
            self._lapse(finding, FindingState.SETTLED, reason)
            if not finding.uses.parents:
                self.findings.memory.harmless.add(finding.site)

    def renew(self) -> None:
        self.settle()

    def count_cut_off(self) -> None:
        """Settles nothing: a finding that an exception keeps from its consequences has none."""

    def undecided(self) -> list[Finding]:
        return []

    def let_go(self) -> None:
        """Ends the step: later findings are traced to where these began, not along their way."""
        for finding in self.findings.all:
            uses = finding.uses
            uses.archived = finding.verdict
            for parent in uses.parents:
                parent.uses.made.clear()
            path, causes = _ancestors(finding)
            roots = [root for root in _roots(path) if root is not finding]
            uses.parents = roots + causes if uses.parents else []
            uses.made.clear()


_RULES: Mapping[type, Callable[[OpRules, Finding, Any], None]] = {
    entries.Entered: OpRules._entered,
    entries.OpStored: OpRules._stored,
    entries.Loss: OpRules._loss,
    entries.Compiled: OpRules._compiled,
    entries.NamedResult: OpRules._named,
}


def _position(finding: Finding) -> int:
    return finding.position


def _kinds(finding: Finding) -> int:
    """Bits 0 and 1: as of ``signs``; bit 2: it has a NaN."""
    return finding.signs | int(finding.has_nan) << 2


def _is_certain(finding: Finding) -> bool:
    """True if it is judged without its consumers: a NaN, or saturated values that are no mask."""
    return finding.has_nan or (finding.is_saturated and finding.signs != 2)


def _is_plain_number(finding: Finding) -> bool:
    """True if it is only the largest finite number in an input or a stored tensor, which may hold
    it on purpose.
    """
    return not is_event(finding.record, finding.role)


def _read(incident: Incident) -> str:
    """A clause on what an op has read that made non-finite numbers of finite tensors."""
    has_given = incident.infinite_scalars & 0b10011
    return f"everything that it read was finite{GIVEN_NUMBER if has_given else ''}"


def _recomputed_reason(finding: Finding) -> str:
    op = finding.uses.op
    return f"{op} was recomputed in backward (activation checkpointing): its first run counts"


def _is_open(finding: Finding) -> bool:
    """True if it becomes an event where something that it led to counts."""
    return finding.uses.is_traced and finding.verdict in _OPEN


def _is_absorbed(finding: Finding, among: frozenset[Verdict] = _WAITING) -> bool:
    """True if all that became of it, through any number of findings with such verdicts, is
    finite.
    """
    met: set[int] = set()
    stack, has_end = [finding], False
    while stack:
        current = stack.pop()
        if id(current) in met:
            continue
        met.add(id(current))
        if current.verdict not in among:
            return False
        if (
            _is_certain(current)
            and current.is_saturated
            and current.verdict is not Verdict.INTENDED
        ):
            return False
        ends = current.uses.finite_count + current.uses.unseen_count
        if not ends and not current.uses.made:
            return False
        has_end = has_end or ends > 0
        stack += current.uses.made
    return has_end


def _why_absorbed(finding: Finding) -> str:
    consumers = finding.uses.finite_count + len(finding.uses.made)
    plural = "s" if consumers > 1 else ""
    if consumers:
        return f"{consumers} operator{plural} read it and returned finite values"
    return (
        "only operators that are not observed (left out by a filter, or compiled) read it, and "
        "nothing that was read afterwards is a NaN"
    )


def _ancestors(finding: Finding) -> tuple[list[Finding], list[Finding]]:
    """The undecided findings that this finding was made of, itself included; and the events among
    them.
    """
    met, stack = {id(finding)}, [finding]
    path: list[Finding] = []
    causes: list[Finding] = []
    while stack:
        ancestor = stack.pop()
        if ancestor.verdict in CONFIRMED:
            causes.append(ancestor)
            continue
        path.append(ancestor)
        for parent in ancestor.uses.parents:
            if id(parent) not in met:
                met.add(id(parent))
                stack.append(parent)
    return path, causes


def _roots(path: Sequence[Finding]) -> list[Finding]:
    """The findings that were made of no other."""
    return [finding for finding in path if not finding.uses.parents]


def _harm(root: Finding, path: list[Finding]) -> str:
    """A clause that names the op that made a NaN of an infinity."""
    if root.has_nan:
        return ""
    made = [f for f in path if f.has_nan and f is not root and f.uses.parents]
    first = min(made, key=_position, default=None)
    return "" if first is None or not first.uses.op else f"{first.uses.op} made a NaN of it; "


def _is_written(finding: Finding, incident: Incident) -> bool:
    """True if the op was given as numbers what it has made. A product may overflow like any other
    where one factor is the largest number; a negative factor makes a mask.
    """
    # The order of a norm is no element of it.
    written = 0 if "norm" in incident.op else incident.infinite_scalars & 3
    if finding.is_saturated:
        largest = incident.infinite_scalars >> 2 & 3
        is_writer = ".".join(incident.op.split(".")[:2]) in WRITERS
        written |= largest if is_writer else largest & 2
    return bool(written) and finding.signs & ~written == 0


def _new_infinities(finding: Finding, sources: list[Finding], incident: Incident) -> int:
    """The number of infinities that an op has made of finite values beside those that it read, at
    least: each of these is in as many results as its tensor was broadcast to. 0: that is not known.
    """
    if finding.has_nan or finding.is_saturated or not sources or incident.op not in ELEMENTWISE:
        return 0
    read = {seq for _, seq in incident.inputs}
    numel = int(finding.record["numel"])
    carried = 0
    for source in sources:
        if source.seq not in read:
            return 0  # a part of it was read
        carried += source.infinities * -(-numel // max(1, int(source.record["numel"])))
    return max(0, finding.infinities - carried)


def _carries(finding: Finding, sources: list[Finding]) -> bool:
    signs = 0
    for source in sources:
        signs |= source.signs
    return finding.signs & ~signs == 0
