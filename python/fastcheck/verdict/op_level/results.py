"""Classifies a non-finite result of an operator, from its record and the operator alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Callable, Optional

import numpy as np

from fastcheck.record.site import SiteTable

from .finding import OpFinding
from .incident import Incident
from .rules import WRITERS

__all__ = [
    "LARGEST",
    "carries",
    "is_copied",
    "is_written",
    "leaked",
    "recomputed",
    "why_nan",
    "writer_of",
]


def recomputed(op: str) -> str:
    return f"{op} was recomputed in backward (activation checkpointing): its first run counts"


def why_nan(finding: OpFinding, op: str, writer: str) -> str:
    """``writer``: who has written the infinities that it read; empty where it read none."""
    if not writer:
        return "everything that it read was finite"
    what = "made a NaN" if finding.has_nan else "overflowed"
    return (
        f"{op} {what} where it read only finite values and infinities that were written on purpose "
        f"in {writer} (a row that is masked entirely does this)"
    )


def leaked(intended: Sequence[OpFinding], sites: SiteTable) -> str:
    """Why a result is an event that was made of what allow_nonfinite() allows elsewhere; empty
    where none was.
    """
    last = next((f for one in intended for f in (one, one.root) if f.is_allowed), None)
    return (
        "" if last is None else f"what allow_nonfinite() allows in {sites[last.site]} came this far"
    )


def writer_of(intended: Sequence[OpFinding], sites: SiteTable) -> str:
    """Where infinities began that were written on purpose, and the line; empty without any."""
    if not intended:
        return ""
    root = intended[0].root
    return f"{sites[root.site]}{f', {root.line}' if root.line else ''}"


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


def is_copied(
    finding: OpFinding, incident: Incident, record_of: Callable[[int], Optional[np.void]]
) -> bool:
    """Whether one of the op's inputs held the largest number of the same dtype."""
    if not finding.is_saturated:
        return False
    dtype = finding.record["dtype"]
    records = (record_of(seq) for _, seq in incident.inputs)
    return any(
        record is not None and record["saturated_count"] and record["dtype"] == dtype
        for record in records
    )


def carries(finding: OpFinding, sources: list[OpFinding]) -> bool:
    signs = 0
    for source in sources:
        signs |= source.signs
    return finding.signs & ~signs == 0
