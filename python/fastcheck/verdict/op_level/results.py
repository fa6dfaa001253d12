"""What a non-finite result of an operator is, by its record and the operator alone."""

from __future__ import annotations

from .finding import OpFinding
from .incident import Incident
from .rules import WRITERS

__all__ = ["LARGEST", "carries", "is_written", "recomputed", "why_nan"]


def recomputed(op: str) -> str:
    return f"{op} was recomputed in backward (activation checkpointing): its first run counts"


def why_nan(finding: OpFinding, op: str, has_intended: bool) -> str:
    if not has_intended:
        return "everything that it read was finite"
    what = "made a NaN" if finding.has_nan else "overflowed"
    return (
        f"{op} {what} where it read only finite values and infinities that were written on purpose "
        "(a row that is masked entirely does this)"
    )


LARGEST = "the largest number, which may have been written on purpose"


def is_written(finding: OpFinding, incident: Incident) -> bool:
    """Whether the op was given as numbers what it has made. A product may overflow like any other
    where one factor is the largest number; a negative one makes a mask.
    """
    written = incident.infinite_scalars & 3
    if finding.is_saturated:
        largest = incident.infinite_scalars >> 2
        is_writer = ".".join(incident.op.split(".")[:2]) in WRITERS
        written |= largest if is_writer else largest & 2
    return bool(written) and finding.signs & ~written == 0


def carries(finding: OpFinding, sources: list[OpFinding]) -> bool:
    signs = 0
    for source in sources:
        signs |= source.signs
    return finding.signs & ~signs == 0
