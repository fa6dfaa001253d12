"""The verdict at op level, by provenance: the inputs and outputs of every op are recorded, so an
origin is an op whose inputs were all finite.

What is not written on purpose waits for its consequences (``consequences.py``). With
``is_strict`` a NaN is judged at once, and an infinity waits for its consumers: it is absorbed where
the outputs of all of them are finite, and an origin where one of them returns a NaN, or where it
has no consumer.

On a device that saturates, the largest finite number stands for an infinity and never becomes a NaN
(Inf - Inf is 0). A saturated value is therefore judged at once in any case, unless all saturated
values are negative, as in a mask.
"""

from __future__ import annotations

from typing import Callable, Optional

import numpy as np

from fastcheck.record.format import Verdict
from fastcheck.verdict.finding import Finding
from fastcheck.verdict.journal import BadRecords, Entry
from fastcheck.verdict.module_level import Judge

from .consequences import EarlierFindings
from .finding import WAITING, OpFinding, is_absorbed, why_absorbed
from .incident import Incident
from .named_readings import NamedReadings
from .results import (
    LARGEST,
    carries,
    is_copied,
    is_written,
    leaked,
    recomputed,
    why_nan,
    writer_of,
)
from .rules import BOUNDED, why_benign

__all__ = ["EarlierFindings", "OpIncident", "OpJudge"]

_NOT_READ = "whether that was finite is not known, a copy from a device may be under way there"


class OpJudge(NamedReadings):
    """Judges the observer's incidents."""

    #: The record with this number, while it is held.
    record_of: Callable[[int], Optional[np.void]] = staticmethod(lambda seq: None)

    def incident(self, incident: Incident, bad: BadRecords) -> None:
        """An op that read or wrote a non-finite tensor."""
        for one in incident.nonfinite_inputs:
            if one.is_arrival and one.seq in bad and not self.is_finding(one.seq):
                arrival = self._finding(bad[one.seq], incident)
                self.take(arrival, OpJudge.arrived, one.is_collective)
        inputs = [
            found for one in incident.nonfinite_inputs if (found := self._find(one.seq)) is not None
        ]
        if incident.place >= 0:
            for source in inputs:
                self.reached(source, self.places[incident.place])
            return
        if incident.is_unseen:
            for source in inputs:
                source.unseen_consumers += 1
        if incident.made and not any(is_bad for _, is_bad in incident.made):
            for source in inputs:
                source.finite_consumers += 1
        for seq, is_bad in incident.made:
            if is_bad and seq in bad:
                finding = self._finding(bad[seq], incident)
                finding.inputs = incident.inputs
                self._make(finding, inputs, incident)
                for source in inputs:
                    source.derived_findings.append(finding)

    def _finding(self, record: np.void, incident: Incident) -> OpFinding:
        finding = OpFinding(record, self._sites[int(record["site"])].role)
        finding.line, finding.api = incident.line, incident.api
        return finding

    def _make(self, finding: OpFinding, inputs: list[OpFinding], incident: Incident) -> None:
        self._add(finding)
        op = finding.op = str(incident)
        reason = why_benign(incident.op, self._sites[finding.site].index)
        if incident.is_recompute and not self.is_strict:
            first_run = self._first_run(finding)
            if first_run is not None:
                inputs = [*inputs, first_run]
                first_run.derived_findings.append(finding)
                if first_run.is_confirmed:
                    self._decide(finding, Verdict.PROPAGATED, recomputed(op), first_run)
                    return
        confirmed = next((f for f in inputs if f.is_confirmed and self._is_of_now(f)), None)
        scaled = next((f for f in inputs if f.verdict is Verdict.SCALED), None)
        waiting = next((f for f in inputs if f.is_waiting or f.is_open), None)
        intended = [f for f in inputs if f.verdict is Verdict.INTENDED]
        leak = leaked(intended, self._sites)
        unread = ""
        if incident.reads_in_flight and not inputs:
            unread = f"{op} read pinned memory of the host: {_NOT_READ}"
        if reason is not None:
            self._decide(finding, Verdict.BENIGN, reason)
        elif confirmed is None and waiting is None and self._allow(finding):
            finding.cause = next((f for f in inputs if f.is_allowed), None)
        elif incident.is_recompute and self.is_strict:
            cause = inputs[0] if inputs else None
            self._decide(finding, Verdict.PROPAGATED, recomputed(op), cause)
        elif scaled is not None and confirmed is None:
            self._hold_scaled(finding, inputs, self._follows(scaled), Verdict.PROPAGATED)
        elif confirmed is not None:
            self._propagate(finding, confirmed)
        elif not finding.has_nan and is_written(finding, incident):
            what = "the largest number" if finding.is_saturated else "an infinity"
            self._decide(finding, Verdict.INTENDED, f"{op} was given {what} as a number")
        elif (
            not finding.has_nan
            and intended
            and not leak
            and waiting is None
            and incident.op not in BOUNDED
            and carries(finding, intended)
        ):
            finding.decide(Verdict.INTENDED, self._follows(intended[0]), intended[0])
            self.changed.append(finding)
        elif not finding.has_nan and not inputs and is_copied(finding, incident, self.record_of):
            self._decide(
                finding, Verdict.INTENDED, f"{op} read it where it is a number like others"
            )
        elif self.is_scaled and finding.is_gradient:
            planned = Verdict.ARRIVED if unread else Verdict.ORIGIN
            self._hold_scaled(finding, inputs, unread or f"{op} read only finite values", planned)
        elif unread and finding.is_saturated:
            self._decide(finding, Verdict.INTENDED, LARGEST)
        elif unread:
            self._arrive(finding, False, unread)
        elif leak:
            self._decide_or_hold(finding, Verdict.ORIGIN, leak, inputs)
        elif self._decides_at_once(finding):
            self._judge_at_once(finding, waiting, incident, writer_of(intended, self._sites))
        elif finding.has_nan:
            reason = why_nan(finding, op, writer_of(intended, self._sites))
            self._hold(finding, Verdict.ORIGIN, reason, inputs)
        else:
            reason = f"{op} made it: everything that it read was finite"
            self._hold(finding, Verdict.ORIGIN, reason, inputs)

    def _is_of_now(self, finding: OpFinding) -> bool:
        """An event of an earlier step counts in this one by its consequences."""
        return self.is_strict or self.is_finding(finding.seq)

    def _judge_at_once(
        self,
        finding: OpFinding,
        waiting: Optional[OpFinding],
        incident: Incident,
        writer: str,
    ) -> None:
        """Without its consequences: a NaN, or saturated values that are no mask. An infinity waits
        for its consumers.
        """
        op = finding.op
        if finding.is_certain and waiting is not None:
            what = "made a NaN of it" if finding.has_nan else "made another of it, not negative"
            self._blame(waiting, f"{op} {what}")
            self._propagate(finding, waiting)
        elif finding.is_certain:
            self._decide(finding, Verdict.ORIGIN, why_nan(finding, op, writer))
        elif finding.role != "grad_input" and incident.is_optimizer:
            # It stays in the optimizer's state, which every later step reads.
            self._decide(finding, Verdict.ORIGIN, f"{op} overflowed in what the optimizer keeps")
        else:
            reason = f"{op} made it: everything that it read was finite"
            self._wait(finding, Verdict.ORIGIN, reason, waiting)

    def _blame(self, waiting: OpFinding, harm: str) -> None:
        """A waiting infinity caused a NaN: the finding where it began is counted."""
        if waiting.is_open:
            self._count(waiting, harm)
            return
        root = waiting.root
        self._adopt(root)
        root.release()
        root.reason += f"; {harm}"
        self.changed.append(root)
        if waiting is not root:
            self._propagate(waiting, root)

    # The end of the step

    def settle_scaled(self, skipped: bool) -> Optional[Finding]:
        """A scaled gradient may overflow, NaNs included, where a mask keeps it from every
        parameter: then the scaler does not skip the update.
        """
        held = [f for f in self.findings if isinstance(f, OpFinding) and _is_held(f)]
        harmless = [] if skipped else [f for f in held if is_absorbed(f, WAITING | _HELD)]
        for finding in harmless:
            self._decide(
                finding,
                Verdict.ABSORBED,
                "a scaled gradient, and all that was made of it came out finite",
            )
        for finding in held if not skipped and not self.is_strict else ():
            if finding.verdict is Verdict.SCALED and not finding.is_saturated:
                reason = "a scaled gradient that reached no parameter: the update was not skipped"
                self._decide(finding, Verdict.ABSORBED, reason)
        return super().settle_scaled(skipped)

    def ensure_event(self) -> None:
        self._settle_infinities()
        self.count_unseen()
        super().ensure_event()

    def settle(self) -> None:
        self.ensure_event()
        if not self.is_strict:
            self.settle_open()

    def _settle_infinities(self) -> None:
        """Decides the waiting infinities: all their consumers have run."""
        for finding in self.findings:
            if not isinstance(finding, OpFinding) or not finding.is_waiting or finding.is_open:
                continue
            if any(one.verdict is Verdict.SCALED for one in finding.derived_findings):
                self._decide(
                    finding,
                    Verdict.SCALED,
                    "scaled gradients were made of it, whose update was skipped",
                )
            elif is_absorbed(finding):
                self._decide(finding, Verdict.ABSORBED, why_absorbed(finding))
            elif finding.cause is not None and finding.cause is not finding:
                root = finding.root
                if root.planned is not None:
                    root.release()
                    self.changed.append(root)
                self._propagate(finding, root)
            else:
                finding.release()
                self.changed.append(finding)


_HELD = frozenset((Verdict.SCALED,))


def _is_held(finding: OpFinding) -> bool:
    return finding.verdict is Verdict.SCALED and finding.planned is not None


class OpIncident(Entry):
    """An incident as an entry of the journal."""

    __slots__ = ("incident",)

    def __init__(self, incident: Incident) -> None:
        self.incident = incident

    def apply(self, judge: Judge, bad: BadRecords) -> None:
        assert isinstance(judge, OpJudge)
        judge.incident(self.incident, bad)
