"""Consequences: a non-finite value is an event if something computed from it lasts or leaves
(``places.py``). Until then it is unresolved; at the end of the step it is absorbed.

With ``is_strict`` (``Stop(count="all")``) it is an event where it appears, and this file only keeps
the findings of earlier steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

from fastcheck.record.format import Verdict
from fastcheck.verdict.finding import Finding
from fastcheck.verdict.module_level import Judge
from fastcheck.verdict.places import Place, Places

from .finding import OpFinding, is_absorbed, why_absorbed

__all__ = ["ConsequenceJudge", "EarlierFindings"]

# Findings of earlier steps that may still be read: parameters, masks, running statistics.
_MAX_EARLIER_FINDINGS = 4096

# Where what is allowed elsewhere is an event.
_LASTING = frozenset(("gradient", "update", "state"))

EarlierFindings = dict[int, OpFinding]


class ConsequenceJudge(Judge):
    """``earlier_findings`` holds the findings of earlier steps, ``harmless_sites`` the numbers of
    sites where a non-finite value began without consequence, ``places`` what numbers of places
    stand for.
    """

    earlier_findings: EarlierFindings
    places: Places
    holds = False
    #: Something is, or was in an earlier step, whose consequences decide.
    has_open = False

    def reached(self, finding: OpFinding, place: Place) -> None:
        """What this finding describes has reached a place where it counts."""
        if self.is_strict:
            return
        is_lasting = place.kind in _LASTING and finding.root.is_allowed
        if finding.verdict is Verdict.INTENDED and (place.kind == "loss" or is_lasting):
            self._count_intended(finding, place)
        if not finding.is_open or (finding.only_neginf and place.may_be_negative_infinity):
            return
        # Of scaled gradients an update uses only those that the scaler let through.
        if finding.verdict is Verdict.SCALED and place.kind not in ("update", "state"):
            return
        self._count(finding, place.clause)

    def _count_intended(self, finding: OpFinding, place: Place) -> None:
        """No loss is infinite on purpose, and no gradient where infinities are only allowed."""
        root = finding.root
        if isinstance(root, OpFinding) and root.verdict is Verdict.INTENDED:
            verdict = Verdict.ARRIVED if root.role in ("input", "buffer") else Verdict.ORIGIN
            root.if_reached = (verdict, root.reason)
            self._release(root, place.clause)
            if finding is not root:
                self._propagate(finding, root)

    def _allow(self, finding: Finding) -> bool:
        is_allowed = super()._allow(finding)
        # As long as it reaches no gradient.
        self.has_open = self.has_open or is_allowed
        return is_allowed

    def _hold(
        self, finding: OpFinding, planned: Verdict, reason: str, parents: Sequence[OpFinding]
    ) -> None:
        """Its consequences decide."""
        finding.hold(
            Verdict.UNRESOLVED, "what becomes of it decides whether it counts", planned, reason
        )
        self._trace(finding, planned, reason, parents)

    def _trace(
        self, finding: OpFinding, planned: Verdict, reason: str, parents: Sequence[OpFinding]
    ) -> None:
        finding.if_reached = (planned, reason)
        finding.parents = [one for one in parents if one.is_open or one.is_confirmed]
        self.has_open = True
        self.changed.append(finding)

    def _count(self, finding: OpFinding, clause: str) -> None:
        """Where the finding began is an event, and what lies between follows from it."""
        path, causes = _ancestors(finding)
        roots = [one for one in path if not one.parents]
        suspects = [one for one in roots if one.site not in self.harmless_sites]
        if not suspects and not causes:
            suspects = roots
        suspects.sort(key=lambda one: one.position)
        for root in suspects:
            is_later = finding.record["step"] != root.record["step"]
            later = f" in step {int(finding.record['step'])}" if is_later else ""
            self._release(root, _harm(root, path) + clause + later)
        cause = min((*suspects, *causes), key=lambda one: one.position)
        spread = {id(one): one for one in path if one not in roots}
        stack = list(suspects)
        while stack:
            for one in stack.pop().derived_findings:
                if one.is_open and id(one) not in spread:
                    spread[id(one)] = one
                    stack.append(one)
        for one in sorted(spread.values(), key=lambda one: one.position):
            # What an earlier step has made of it is past.
            if one.is_open and self.is_finding(one.seq):
                self._propagate(one, cause)

    def _release(self, root: OpFinding, clause: str) -> None:
        assert root.if_reached is not None
        verdict, reason = root.if_reached
        self._adopt(root)
        self.harmless_sites.discard(root.site)
        self._decide(root, verdict, f"{reason}; {clause}")

    def _adopt(self, finding: Finding) -> None:
        """It is of an earlier step, or was made between two steps, and counts in this one."""
        if not self.is_finding(finding.seq):
            self.findings.insert(0, finding)
            self._by_token[finding.seq] = finding

    # Findings

    def knows(self, seq: int) -> bool:
        """Whether the tensor with this record is a finding, of this step or of an earlier one."""
        return self._find(seq) is not None

    def _find(self, seq: int) -> Optional[OpFinding]:
        found = self._by_token.get(seq)
        if found is None:
            found = self.earlier_findings.pop(seq, None)
            if found is not None:
                self.earlier_findings[seq] = found  # the youngest again: the oldest goes first
        return found if isinstance(found, OpFinding) else None

    def _add(self, finding: Finding) -> None:
        super()._add(finding)
        if isinstance(finding, OpFinding):
            self.earlier_findings[finding.seq] = finding
            while len(self.earlier_findings) > _MAX_EARLIER_FINDINGS:
                del self.earlier_findings[next(iter(self.earlier_findings))]

    def _first_run(self, finding: OpFinding) -> Optional[OpFinding]:
        """What activation checkpointing computes again in backward, where it ran first."""
        runs = [
            one
            for one in self.findings
            if isinstance(one, OpFinding) and one.site == finding.site and one is not finding
        ]
        first = [one for one in runs if not one.is_recompute]
        again = len(runs) - len(first)
        return first[again] if again < len(first) else None

    # The end of the step

    def count_unseen(self) -> None:
        """Of a NaN that went where nothing is observed the consequences are not known."""
        for finding in list(self.findings):
            if not isinstance(finding, OpFinding) or finding.verdict is not Verdict.UNRESOLVED:
                continue
            if finding.is_open and finding.has_nan and finding.unseen_consumers:
                self._count(finding, "what read it is not observed")

    def settle_open(self) -> None:
        """Nothing of this step will be used any more, but what a later one reads."""
        for finding in self.findings:
            if not isinstance(finding, OpFinding) or finding.verdict is not Verdict.UNRESOLVED:
                continue
            if any(one.verdict is Verdict.SCALED for one in finding.derived_findings):
                reason = "scaled gradients were made of it, whose update was skipped"
                self._decide(finding, Verdict.SCALED, reason)
                continue
            reason = "nothing that lasts, and nothing that left the computation, was made of it"
            if is_absorbed(finding):
                reason = why_absorbed(finding)
            self._decide(finding, Verdict.ABSORBED, reason)
            if not finding.parents:
                self.harmless_sites.add(finding.site)

    def let_go(self) -> None:
        """The step is over: later findings are traced to where these began, not along their way."""
        for finding in self.findings:
            if isinstance(finding, OpFinding):
                for one in finding.parents:
                    one.derived_findings.clear()
                path, causes = _ancestors(finding)
                roots = [one for one in path if not one.parents and one is not finding]
                finding.parents = roots + causes if finding.parents else []
                finding.derived_findings.clear()


def _ancestors(finding: OpFinding) -> tuple[list[OpFinding], list[OpFinding]]:
    """The undecided findings that this one was made of, itself included; and the events among
    them.
    """
    met, stack = {id(finding)}, [finding]
    path: list[OpFinding] = []
    causes: list[OpFinding] = []
    while stack:
        one = stack.pop()
        if one.is_confirmed:
            causes.append(one)
            continue
        path.append(one)
        for parent in one.parents:
            if id(parent) not in met:
                met.add(id(parent))
                stack.append(parent)
    return path, causes


def _harm(root: OpFinding, path: list[OpFinding]) -> str:
    """Which op made a NaN of an infinity."""
    if root.has_nan:
        return ""
    made = [one for one in path if one.has_nan and one is not root]
    first = min(made, key=lambda one: one.position, default=None)
    return "" if first is None or not first.op else f"{first.op} made a NaN of it; "
