"""A finding at op level, with the counts of the operators that read it."""

from __future__ import annotations

from typing import Optional

import numpy as np

from fastcheck.record.format import Flag, Verdict
from fastcheck.verdict.finding import Finding, is_event, saturated_signs

__all__ = ["WAITING", "OpFinding", "is_absorbed", "why_absorbed"]


class OpFinding(Finding):
    """A finding with the counts of its consumers."""

    def __init__(self, record: np.void, role: str) -> None:
        super().__init__(record, role)
        # Ops that read it and returned finite values; the findings of those that did not.
        self.finite_consumers = 0
        # Ops that read it and whose outputs were not read.
        self.unseen_consumers = 0
        self.derived_findings: list[OpFinding] = []
        # The inputs of the op that wrote it: the argument's name and the sequence number.
        self.inputs: list[tuple[str, int]] = []
        # Where consequences count: the undecided findings that it was made of, the op that made
        # it, and the verdict that it has where something it led to counts.
        self.parents: list[OpFinding] = []
        self.op = ""
        self.if_reached: Optional[tuple[Verdict, str]] = None
        # The verdict under which its step was closed.
        self.archived: Optional[Verdict] = None

    def detach(self) -> None:
        super().detach()
        # A weight is read in every step: what is made of it would never go.
        self.derived_findings.clear()

    @property
    def signs(self) -> int:
        """Bit 0: it has +Inf; bit 1: -Inf; or values that saturated in their places. 0: unknown."""
        record = self.record
        signs = int(record["posinf_count"] > 0) | int(record["neginf_count"] > 0) << 1
        return signs | saturated_signs(record) if self.is_saturated else signs

    @property
    def is_certain(self) -> bool:
        """Whether it is judged without its consumers: a NaN, or saturated values that are no
        mask.
        """
        return self.has_nan or (self.is_saturated and self.signs != 2)

    @property
    def is_plain_number(self) -> bool:
        """Whether it is only the largest finite number in an input or a stored tensor, which may
        hold it on purpose.
        """
        return not is_event(self.record, self.role)

    @property
    def is_waiting(self) -> bool:
        """Whether it is an infinity that its consumers decide."""
        return self.verdict is Verdict.UNRESOLVED

    @property
    def is_recompute(self) -> bool:
        """Whether activation checkpointing computed it again in backward."""
        return bool(int(self.record["flags"]) & int(Flag.RECOMPUTE))

    @property
    def is_open(self) -> bool:
        """Whether it becomes an event where something that it led to counts."""
        return self.if_reached is not None and self.verdict in _OPEN


_OPEN = frozenset((Verdict.UNRESOLVED, Verdict.ABSORBED, Verdict.SCALED))

WAITING = frozenset((Verdict.UNRESOLVED, Verdict.ABSORBED, Verdict.INTENDED))


def is_absorbed(finding: OpFinding, among: frozenset[Verdict] = WAITING) -> bool:
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
        if not ends and not one.derived_findings:
            return False
        has_end = has_end or ends > 0
        stack += one.derived_findings
    return has_end


def why_absorbed(finding: OpFinding) -> str:
    consumers = finding.finite_consumers + len(finding.derived_findings)
    plural = "s" if consumers > 1 else ""
    if consumers:
        return f"{consumers} op{plural} read it, and came out finite"
    return (
        "only what passes unread (a filter leaves it out, or it runs compiled) took it in, and "
        "nothing that was read afterwards is a NaN"
    )
