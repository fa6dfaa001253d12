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
from fastcheck.verdict.module_level import Judge, was_finite

from .consequences import ConsequenceJudge, EarlierFindings
from .finding import WAITING, OpFinding, is_absorbed, why_absorbed
from .incident import Incident
from .results import LARGEST, carries, is_copied, is_written, recomputed, why_nan, writer_of
from .rules import BOUNDED, why_benign

__all__ = ["EarlierFindings", "OpIncident", "OpJudge"]


class OpJudge(ConsequenceJudge):
    """Judges the observer's incidents."""

    #: The gradients of this step carry a loss scale.
    is_scaled = False
    #: Not every op of every step is read.
    is_filtered = False
    #: The record with this number, while it is held.
    record_of: Callable[[int], Optional[np.void]] = staticmethod(lambda seq: None)

    def incident(self, incident: Incident, bad: BadRecords) -> None:
        """An op that read or wrote a non-finite tensor."""
        for one in incident.nonfinite_inputs:
            if one.is_arrival and one.seq in bad and not self.is_finding(one.seq):
                arrival = self._finding(bad[one.seq], incident)
                self._add(arrival)
                self._arrive(arrival, one.is_collective, self._outside)
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

    @property
    def _outside(self) -> str:
        if self.is_filtered:
            return (
                "no observed op has made it: it came from what ops=, roles=, include=, exclude=, "
                "steps= or every= leave unread, or from outside of torch's operators"
            )
        return "no observed op has made it: it came from outside of torch's operators"

    def stored(self, finding: OpFinding) -> None:
        """A parameter or a buffer, before its first use."""
        self._add(finding)
        last_finite = self._last_finite_step(finding.site)
        earlier = self._first_confirmed()
        if finding.is_plain_number:
            self._decide(finding, Verdict.INTENDED, LARGEST)
        elif last_finite is not None and earlier is not None:
            self._propagate(finding, earlier)
        elif last_finite is not None and not finding.is_mask:
            self._changed(finding, was_finite(finding.role, last_finite))
        elif not finding.has_nan and (finding.is_mask or finding.role == "buffer"):
            self._decide(finding, Verdict.INTENDED, "a stored infinity, written on purpose")
        else:
            self._decide_or_hold(
                finding,
                Verdict.ARRIVED,
                "it was non-finite when it was first read: look at the checkpoint or at the "
                "initialisation",
            )

    def _changed(self, finding: OpFinding, reason: str) -> None:
        """A stored tensor that was finite in an earlier step, or before its module ran."""
        site = self._sites[finding.site]
        made = [f for f in self._open() if self._sites[f.site].module == site.module]
        if self.is_strict or finding.role != "buffer" or not made:
            self._decide(finding, Verdict.ARRIVED, reason)
            return
        # A norm that has just run keeps what it made of its input.
        self._hold(finding, Verdict.ARRIVED, reason, made[:1])
        self._count(finding, f"it reached {site.tensor_name}")

    def entered(self, finding: OpFinding, is_collective: bool) -> None:
        """An argument of the model that no observed op wrote."""
        self._add(finding)
        finding.is_data = not is_collective
        self._arrive(finding, is_collective, "it came in with the batch: no observed op made it")

    # Of op level's own findings alone, hence the override's narrower type.
    def loss(self, finding: OpFinding, scaled: bool = False) -> None:  # type: ignore[override]
        """A loss that no observed op has made: a number, or one whose ops were left out."""
        if self.is_strict or scaled:
            super().loss(finding, scaled)
            return
        self._add(finding)
        earlier = self._first_confirmed()
        if earlier is not None:
            self._propagate(finding, earlier)
            return
        reason = "every tensor observed in this step was finite: the loss itself overflowed"
        may_be = [f for f in self._open() if f.site not in self.harmless_sites]
        self._hold(finding, Verdict.ORIGIN, reason, may_be[:1])
        self._count(finding, "it is the loss")

    def known_loss(self, token: int) -> None:
        if self.is_strict:
            super().known_loss(token)

    def compiled(self, finding: OpFinding, name: str, is_scaled: bool) -> None:
        """A tensor written by compiled code that is an input, an output or a gradient of a
        module.
        """
        self._add(finding)
        earlier = self._first_confirmed()
        reason = f"it was made within compiled code, of which {name} is the first to show it"
        # Its consumers are not observed either.
        finding.unseen_consumers += 1
        if earlier is not None:
            self._propagate(finding, earlier)
        elif is_scaled and finding.is_gradient:
            first = self._first_scaled()
            scaled = [first] if isinstance(first, OpFinding) else []
            self._hold_scaled(finding, scaled, reason, Verdict.ARRIVED)
        else:
            self._arrive(finding, False, reason)
            if finding.is_open:
                # It may follow from any that is open: the first that the code can have read.
                finding.parents = [f for f in self._open() if f is not finding][:1]

    def named(self, finding: OpFinding, source: int, is_scaled: bool) -> None:
        """A tensor that observe() has named, besides the record ``source`` of who made it."""
        self._add(finding)
        earlier = self._first_confirmed()
        if source >= 0:
            self._decide(finding, Verdict.BENIGN, "the verdict on the operator that made it counts")
        elif earlier is not None:
            self._propagate(finding, earlier)
        elif is_scaled and finding.is_gradient:
            self._hold_scaled(finding, [], self._outside, Verdict.ARRIVED)
        else:
            self._arrive(finding, False, self._outside)

    def _open(self) -> list[OpFinding]:
        return [f for f in self.findings if isinstance(f, OpFinding) and f.is_open]

    def _decides_at_once(self, finding: OpFinding) -> bool:
        return self.is_strict or finding.is_saturated

    def _decide_or_hold(self, finding: OpFinding, verdict: Verdict, reason: str) -> None:
        if self._decides_at_once(finding):
            self._decide(finding, verdict, reason)
        else:
            self._hold(finding, verdict, reason, [])

    def _arrive(self, finding: OpFinding, is_collective: bool, reason: str) -> None:
        if is_collective:
            reason = "it came through a collective: look at the ranks that took part in it"
        elif finding.is_plain_number:
            self._decide(finding, Verdict.INTENDED, LARGEST)
            return
        if finding.is_certain:
            self._decide_or_hold(finding, Verdict.ARRIVED, reason)
        elif finding.is_mask or int(finding.record["numel"]) == 1:
            self._decide(finding, Verdict.INTENDED, "a stored infinity")
        else:
            self._wait(finding, Verdict.ARRIVED, reason, None)

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
        if reason is not None:
            self._decide(finding, Verdict.BENIGN, reason)
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
            reason = f"{op} read only finite values"
            self._hold_scaled(finding, inputs, reason, Verdict.ORIGIN)
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

    def _hold_scaled(
        self, finding: OpFinding, inputs: list[OpFinding], reason: str, planned: Verdict
    ) -> None:
        finding.hold(
            Verdict.SCALED,
            "a scaled gradient; loss scaling decides what becomes of it",
            planned,
            reason,
        )
        parents = [f for f in inputs if f.verdict is Verdict.SCALED or f.is_waiting]
        finding.cause = parents[0] if parents else None
        if self.is_strict:
            self.changed.append(finding)
        else:
            self._trace(finding, planned, reason, inputs)

    def _wait(
        self, finding: OpFinding, planned: Verdict, reason: str, cause: Optional[OpFinding]
    ) -> None:
        if not self._decides_at_once(finding):
            self._hold(finding, planned, reason, [] if cause is None else [cause])
            return
        finding.hold(Verdict.UNRESOLVED, "an infinity; what is made of it decides", planned, reason)
        finding.cause = cause
        self.changed.append(finding)

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
