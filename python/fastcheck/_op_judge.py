"""The verdict at op level: by provenance. Every op is seen, with what it read and what it made, so
an origin is an op that read only finite values.

A NaN is judged at once. An infinity waits for its consumers: absorbed where all of them come out
finite, an origin where one of them makes a NaN of it, or where nothing takes it over at all.

On a device that saturates nothing makes a NaN of the largest number, which stands for an infinity
there: Inf - Inf is 0. So it is judged at once too, but where all that saturated is negative, as in
a mask.
"""

from __future__ import annotations

from typing import Callable, Optional

import numpy as np

from ._finding import Finding, is_event, saturated_signs
from ._journal import BadRecords, Entry
from ._op_incident import Incident
from ._op_rules import BOUNDED, WRITERS, why_benign
from ._record import Verdict
from ._verdict import Judge

__all__ = ["Elders", "OpFinding", "OpIncident", "OpJudge"]

# Findings of earlier steps that may still be read: parameters, masks, running statistics.
_MAX_ELDERS = 65536

Elders = dict[int, "OpFinding"]


class OpFinding(Finding):
    """A finding that knows what became of it."""

    def __init__(self, record: np.void, role: str) -> None:
        super().__init__(record, role)
        # Ops that read it and came out finite, and what was made of it that is not.
        self.finite_consumers = 0
        # Ops that read it, and of which nobody saw what they made of it.
        self.unseen_consumers = 0
        self.carriers: list[OpFinding] = []
        # What the op read that made it: the argument's name and the record.
        self.inputs: list[tuple[str, int]] = []

    @property
    def signs(self) -> int:
        """Bit 0: it has +Inf; bit 1: -Inf; or what saturated in their places. 0: nobody knows."""
        record = self.record
        signs = int(record["posinf_count"] > 0) | int(record["neginf_count"] > 0) << 1
        return signs | saturated_signs(record) if self.is_saturated else signs

    @property
    def is_certain(self) -> bool:
        """Its consumers have nothing to say: a NaN, or a saturated number that may be no mask."""
        return self.has_nan or (self.is_saturated and self.signs != 2)

    @property
    def is_plain_number(self) -> bool:
        """The largest number, where a tensor may hold it on purpose: what was read or stored."""
        return not is_event(self.record, self.role)

    @property
    def is_waiting(self) -> bool:
        """An infinity whose consumers decide."""
        return self.verdict is Verdict.UNRESOLVED


class OpJudge(Judge):
    """Judges what the observer reports; ``elders`` are the findings of earlier steps."""

    elders: Elders
    #: The gradients of this step carry a loss scale.
    is_scaled = False
    #: Not every op of every step is read.
    is_filtered = False
    #: The record with this number, while it is held.
    record_of: Callable[[int], Optional[np.void]] = staticmethod(lambda seq: None)

    def incident(self, incident: Incident, bad: BadRecords) -> None:
        """One op that made or read something non-finite."""
        for one in incident.fed:
            if one.is_arrival and one.seq in bad and not self.is_finding(one.seq):
                arrival = self._finding(bad[one.seq], incident)
                self._add(arrival)
                self._arrive(arrival, one.is_collective, self._outside)
        fed = [found for one in incident.fed if (found := self._find(one.seq)) is not None]
        if incident.is_unseen:
            for source in fed:
                source.unseen_consumers += 1
        if incident.made and not any(is_bad for _, is_bad in incident.made):
            for source in fed:
                source.finite_consumers += 1
        for seq, is_bad in incident.made:
            if is_bad and seq in bad:
                finding = self._finding(bad[seq], incident)
                finding.inputs = incident.inputs
                self._make(finding, fed, incident)
                for source in fed:
                    source.carriers.append(finding)

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
        """A parameter or a buffer, before anything has used it."""
        self._add(finding)
        if finding.is_plain_number:
            self._decide(finding, Verdict.INTENDED, _LARGEST)
        elif not finding.has_nan and (finding.is_mask or finding.role == "buffer"):
            self._decide(finding, Verdict.INTENDED, "a stored infinity, written on purpose")
        else:
            self._decide(
                finding,
                Verdict.ARRIVED,
                "it was non-finite when it was first read: look at the checkpoint or at the "
                "initialisation",
            )

    def entered(self, finding: OpFinding, is_collective: bool) -> None:
        """An argument of the model that no observed op has made."""
        self._add(finding)
        self._arrive(finding, is_collective, "it came in with the batch: no observed op made it")

    def compiled(self, finding: OpFinding, name: str, is_scaled: bool) -> None:
        """What compiled code has made, and a module took, returned or was given back."""
        self._add(finding)
        earlier = self._first_hard()
        reason = f"it was made within compiled code, of which {name} is the first to show it"
        # Who reads it is not seen either.
        finding.unseen_consumers += 1
        if earlier is not None:
            self._propagate(finding, earlier)
        elif is_scaled and finding.is_gradient:
            self._hold_scaled(finding, self._first_scaled(), reason, Verdict.ARRIVED)
        else:
            self._arrive(finding, False, reason)

    def _find(self, seq: int) -> Optional[OpFinding]:
        found = self._by_token.get(seq)
        if found is None:
            found = self.elders.get(seq)
        return found if isinstance(found, OpFinding) else None

    def _add(self, finding: Finding) -> None:
        super()._add(finding)
        if isinstance(finding, OpFinding):
            self.elders[finding.seq] = finding
            while len(self.elders) > _MAX_ELDERS:
                del self.elders[next(iter(self.elders))]

    def _arrive(self, finding: OpFinding, is_collective: bool, reason: str) -> None:
        if is_collective:
            reason = "it came through a collective: look at the ranks that took part in it"
        elif finding.is_plain_number:
            self._decide(finding, Verdict.INTENDED, _LARGEST)
            return
        if finding.is_certain:
            self._decide(finding, Verdict.ARRIVED, reason)
        elif finding.is_mask or int(finding.record["numel"]) == 1:
            self._decide(finding, Verdict.INTENDED, "a stored infinity")
        else:
            self._wait(finding, Verdict.ARRIVED, reason, None)

    def _make(self, finding: OpFinding, fed: list[OpFinding], incident: Incident) -> None:
        self._add(finding)
        op = str(incident)
        reason = why_benign(incident.op, self._sites[finding.site].index)
        hard = next((f for f in fed if f.is_hard), None)
        scaled = next((f for f in fed if f.verdict is Verdict.SCALED), None)
        waiting = next((f for f in fed if f.is_waiting), None)
        intended = [f for f in fed if f.verdict is Verdict.INTENDED]
        if reason is not None:
            self._decide(finding, Verdict.BENIGN, reason)
        elif incident.is_recompute:
            self._decide(
                finding,
                Verdict.PROPAGATED,
                f"{op} was recomputed in backward (activation checkpointing): its first run counts",
                fed[0] if fed else None,
            )
        elif scaled is not None and hard is None:
            self._hold_scaled(finding, scaled, self._follows(scaled), Verdict.PROPAGATED)
        elif hard is not None:
            self._propagate(finding, hard)
        elif not finding.has_nan and _is_written(finding, incident):
            what = "the largest number" if finding.is_saturated else "an infinity"
            self._decide(finding, Verdict.INTENDED, f"{op} was given {what} as a number")
        elif (
            not finding.has_nan
            and intended
            and waiting is None
            and incident.op not in BOUNDED
            and _carries(finding, intended)
        ):
            finding.decide(Verdict.INTENDED, self._follows(intended[0]), intended[0])
            self.changed.append(finding)
        elif not finding.has_nan and not fed and self._is_copied(finding, incident):
            self._decide(
                finding, Verdict.INTENDED, f"{op} read it where it is a number like others"
            )
        elif self.is_scaled and finding.is_gradient:
            self._hold_scaled(finding, waiting, f"{op} read only finite values", Verdict.ORIGIN)
        elif finding.is_certain and waiting is not None:
            what = "made a NaN of it" if finding.has_nan else "made another of it, not negative"
            self._blame(waiting, f"{op} {what}")
            self._propagate(finding, waiting)
        elif finding.is_certain:
            reason = "everything that it read was finite"
            if intended:
                what = "made a NaN" if finding.has_nan else "overflowed"
                reason = (
                    f"{op} {what} where it read only finite values and infinities that were "
                    "written on purpose (a row that is masked entirely does this)"
                )
            self._decide(finding, Verdict.ORIGIN, reason)
        elif finding.role != "grad_input" and incident.is_optimizer:
            # It stays in the state, and is read again in every later step.
            self._decide(finding, Verdict.ORIGIN, f"{op} overflowed in what the optimizer keeps")
        else:
            reason = f"{op} made it: everything that it read was finite"
            self._wait(finding, Verdict.ORIGIN, reason, waiting)

    def _is_copied(self, finding: OpFinding, incident: Incident) -> bool:
        """Whether the op has read the largest number of the same type on the host, say."""
        if not finding.is_saturated:
            return False
        dtype = finding.record["dtype"]
        records = (self.record_of(seq) for _, seq in incident.inputs)
        return any(
            record is not None and record["saturated_count"] and record["dtype"] == dtype
            for record in records
        )

    def _hold_scaled(
        self, finding: OpFinding, cause: Optional[Finding], reason: str, planned: Verdict
    ) -> None:
        finding.hold(
            Verdict.SCALED,
            "a scaled gradient; loss scaling decides what becomes of it",
            planned,
            reason,
        )
        finding.cause = cause
        self.changed.append(finding)

    def _wait(
        self, finding: OpFinding, planned: Verdict, reason: str, cause: Optional[Finding]
    ) -> None:
        finding.hold(Verdict.UNRESOLVED, "an infinity; what is made of it decides", planned, reason)
        finding.cause = cause
        self.changed.append(finding)

    def _blame(self, waiting: OpFinding, harm: str) -> None:
        """An infinity did harm: where it began counts."""
        root = waiting.root
        root.release()
        root.reason += f"; {harm}"
        self.changed.append(root)
        if waiting is not root:
            self._propagate(waiting, root)

    # The end of the step

    def settle_scaled(self, skipped: bool) -> Optional[Finding]:
        """A scaled gradient may overflow, NaNs included, where a mask lets none of it through to a
        parameter: then the scaler skips nothing, and need not.
        """
        held = [f for f in self.findings if isinstance(f, OpFinding) and _is_held(f)]
        harmless = [] if skipped else [f for f in held if _is_absorbed(f, _WAITING | _HELD)]
        for finding in harmless:
            self._decide(
                finding,
                Verdict.ABSORBED,
                "a scaled gradient, and all that was made of it came out finite",
            )
        return super().settle_scaled(skipped)

    def settle_silent(self) -> None:
        self._settle_infinities()
        super().settle_silent()

    def settle(self) -> None:
        self.settle_silent()

    def _settle_infinities(self) -> None:
        """Every consumer that there will be has run."""
        for finding in self.findings:
            if not isinstance(finding, OpFinding) or not finding.is_waiting:
                continue
            if any(one.verdict is Verdict.SCALED for one in finding.carriers):
                self._decide(
                    finding,
                    Verdict.SCALED,
                    "scaled gradients were made of it, whose update was skipped",
                )
            elif _is_absorbed(finding):
                self._decide(finding, Verdict.ABSORBED, _why_absorbed(finding))
            elif finding.cause is not None and finding.cause is not finding:
                root = finding.root
                if root.planned is not None:
                    root.release()
                    self.changed.append(root)
                self._propagate(finding, root)
            else:
                finding.release()
                self.changed.append(finding)


_LARGEST = "the largest number, which may have been written on purpose"

_HELD = frozenset((Verdict.SCALED,))


def _is_held(finding: OpFinding) -> bool:
    return finding.verdict is Verdict.SCALED and finding.planned is not None


_WAITING = frozenset((Verdict.UNRESOLVED, Verdict.ABSORBED, Verdict.INTENDED))


def _is_absorbed(finding: OpFinding, among: frozenset[Verdict] = _WAITING) -> bool:
    """Whether all that became of it, through any number of findings with such verdicts, is
    finite.
    """
    met: set[int] = set()
    stack, has_end = [finding], False
    while stack:
        one = stack.pop()
        if id(one) in met:
            continue
        met.add(id(one))
        if one.verdict not in among:
            return False
        if one.is_certain and one.is_saturated and one.verdict is not Verdict.INTENDED:
            return False
        ends = one.finite_consumers + one.unseen_consumers
        if not ends and not one.carriers:
            return False
        has_end = has_end or ends > 0
        stack += one.carriers
    return has_end


def _why_absorbed(finding: OpFinding) -> str:
    consumers = finding.finite_consumers + len(finding.carriers)
    plural = "s" if consumers > 1 else ""
    if consumers:
        return f"{consumers} op{plural} read it, and came out finite"
    return (
        "only what passes unread (a filter leaves it out, or it runs compiled) took it in, and "
        "nothing that was read afterwards is a NaN"
    )


def _is_written(finding: OpFinding, incident: Incident) -> bool:
    """Whether the op was given as numbers what it has made. A product may overflow like any other
    where one factor is the largest number; a negative one makes a mask.
    """
    written = incident.infinite_scalars & 3
    if finding.is_saturated:
        largest = incident.infinite_scalars >> 2
        is_writer = ".".join(incident.op.split(".")[:2]) in WRITERS
        written |= largest if is_writer else largest & 2
    return bool(written) and finding.signs & ~written == 0


def _carries(finding: OpFinding, sources: list[OpFinding]) -> bool:
    signs = 0
    for source in sources:
        signs |= source.signs
    return finding.signs & ~signs == 0


class OpIncident(Entry):
    """An incident as an entry of the journal."""

    __slots__ = ("incident",)

    def __init__(self, incident: Incident) -> None:
        self.incident = incident

    def apply(self, judge: Judge, bad: BadRecords) -> None:
        assert isinstance(judge, OpJudge)
        judge.incident(self.incident, bad)
