"""The verdict at op level on tensors that are read by name and are not results of operators: the
batch, stored tensors, a loss, arguments and results of compiled code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

from fastcheck.record.format import Verdict
from fastcheck.verdict.allowed import why_allowed
from fastcheck.verdict.module_level import was_finite

from .consequences import ConsequenceJudge
from .finding import OpFinding
from .results import LARGEST

__all__ = ["NamedReadings"]


class NamedReadings(ConsequenceJudge):
    """Judges them; and what is common to them and to operators."""

    #: The gradients of this step carry a loss scale.
    is_scaled = False
    #: Not every op of every step is read.
    is_filtered = False

    def arrived(self, finding: OpFinding, is_collective: bool) -> None:
        """An op read it, and no observed op wrote it."""
        self._add(finding)
        self._arrive(finding, is_collective, self._outside)

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

    def known_argument(self, seq: int, site: int) -> None:
        """An argument of the model, with this site, that an observed op wrote."""
        finding = self._find(seq)
        reason = why_allowed(self._sites[site], self.allowances)
        if finding is not None and finding.is_open and reason is not None:
            finding.is_allowed = True
            self._decide(finding, Verdict.INTENDED, reason)

    # Of op level's own findings alone, hence the override's narrower type.
    def loss(self, finding: OpFinding, scaled: bool = False) -> None:  # type: ignore[override]  # its findings have the records of operators
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

    def _decide_or_hold(
        self,
        finding: OpFinding,
        verdict: Verdict,
        reason: str,
        parents: Sequence[OpFinding] = (),
    ) -> None:
        if self._decides_at_once(finding):
            self._decide(finding, verdict, reason)
        else:
            self._hold(finding, verdict, reason, parents)

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

    @property
    def _outside(self) -> str:
        if self.is_filtered:
            return (
                "no observed op has made it: it came from what ops=, roles=, include=, exclude=, "
                "steps= or every= leave unread, or from outside of torch's operators"
            )
        return "no observed op has made it: it came from outside of torch's operators"

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
